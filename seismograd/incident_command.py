"""``seismograd incident``: shows a localised spike, or writes it as a web page."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

from seismograd.gradloc.terminal import incident_text
from seismograd.telemetry.incidents import Incident
from seismograd.telemetry.visible import visible

_NAME = re.compile(r"step-(\d+).*\.json")
_WIDTHS = (60, 120)


class _Unreadable(Exception):
    """The message names the path and the fix."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them on the command's parser."""
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="step-NNNNNN.json, or a run's folder: lists all, shows the last")
    add("--html", type=Path, metavar="FILE", help="also write the incident as a web page that needs nothing else")


def show_incident(args: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 2 where something could not be read or written."""
    try:
        files = _files(args.path)
    except _Unreadable as e:
        return _complain(e)
    code = 0
    shown: Incident | None = None
    for file in files:
        try:
            shown = _read(file)
        except _Unreadable as e:
            code = _complain(e)  # the folder's others can still be read
            continue
        if args.path.is_dir():
            say(f"{file.name}  {visible(shown.headline())}\n")
    if shown is None:
        return code
    low, high = _WIDTHS
    width = min(max(shutil.get_terminal_size((100, 24)).columns, low), high)
    say(("\n" if args.path.is_dir() else "") + incident_text(shown, width))
    return max(code, _write_page(shown, args.html, files)) if args.html else code


def _files(path: Path) -> list[Path]:
    """The incident files that a path stands for, in the order of their steps."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise _Unreadable(f"{path}: no such file or folder; incidents are RUNS/NAME/incidents/step-NNNNNN.json")
    folder = path / "incidents" if (path / "incidents").is_dir() else path
    found = {file: match for file in folder.iterdir() if (match := _NAME.fullmatch(file.name))}
    if not found:
        raise _Unreadable(
            f"{folder}: no incidents (step-NNNNNN.json) here; give a run's folder, or none was found in this run"
        )
    return sorted(found, key=lambda file: (int(found[file][1]), file.name))


def _read(file: Path) -> Incident:
    try:
        return Incident.from_json(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise _Unreadable(f"{file}: cannot be read ({e.strerror}); check its permissions") from e
    except UnicodeDecodeError as e:
        raise _Unreadable(f"{file}: damaged, not UTF-8; take the file from the run's folder again") from e
    except ValueError as e:
        raise _Unreadable(f"{file}: {e}") from e


def _write_page(incident: Incident, page: Path, files: list[Path]) -> int:
    # Jinja is loaded only where a page is asked for.
    from seismograd.gradloc.page import incident_page

    if page.resolve() in [file.resolve() for file in files]:
        return _complain(f"{page}: --html would overwrite the incident; give another name, such as {page.stem}.html")
    try:
        page.write_text(incident_page(incident), encoding="utf-8")
    except OSError as e:
        return _complain(f"{page}: the page cannot be written ({e.strerror}); give --html a file in a writable folder")
    say(f"\npage: {page}\n")
    return 0


def say(text: str) -> None:
    """To standard output, whatever its encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _complain(problem: object) -> int:
    print(f"seismograd incident: {problem}", file=sys.stderr)
    return 2
