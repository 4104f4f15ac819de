"""What a benchmark found: targets with their verdicts, the machine it ran on, and the files that keep both."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("seismograd", "torch", "transformers", "trl", "accelerate", "prometheus-client", "numpy")


@dataclass(frozen=True)
class Finding:
    """One measured thing.

    Args:
        what: in plain words.
        target: or "reported" where there is none.
        measured: with its unit and its interval.
        passed: whether the target is met; None where there is none.
        values: the same as numbers.
    """

    what: str
    target: str
    measured: str
    passed: bool | None
    values: dict[str, Any]

    @property
    def verdict(self) -> str:
        return "" if self.passed is None else ("PASS" if self.passed else "FAIL")


@dataclass
class Report:
    """Everything of one run of a benchmark."""

    title: str
    command: str = ""
    findings: list[Finding] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    @property
    def where(self) -> str:
        """How and where it was measured, in a sentence."""
        m = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        return (
            f"`{self.command}`, {m['date']}. {m['cpu']}, {m['threads']} of its cores torch's, load average "
            f"{m['load']:.1f} at the start; {m['system']}, Python {m['python']}; {versions}."
        )

    def markdown(self) -> str:
        """The report as a document."""
        rows = [(f.what, f.target, f.measured, f.verdict) for f in self.findings]
        return "\n\n".join(
            [
                f"# {self.title}",
                self.where,
                table(("what", "target", "measured", "verdict"), rows),
                *self.tables,
                *(["\n".join(f"- {note}" for note in self.notes)] if self.notes else []),
            ]
        )

    def write(self, folder: Path, name: str) -> None:
        """NAME.md and NAME.json in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self.markdown() + "\n")
        findings = [asdict(f) | {"verdict": f.verdict} for f in self.findings]
        content = {
            "command": self.command, "machine": self.machine, "findings": findings, "tables": self.tables,
            "notes": self.notes,
        }  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


@dataclass
class Parts:
    """A report of parts that can be measured apart, each with its own command, date and load."""

    title: str
    parts: dict[str, Report]

    @classmethod
    def read(cls, title: str, folder: Path, name: str) -> Parts:
        """What NAME.json holds; no part where there is no such file."""
        file = folder / f"{name}.json"
        held = json.loads(file.read_text())["parts"] if file.is_file() else {}
        parts = {}
        for part, content in held.items():
            findings = [Finding(**{k: x for k, x in f.items() if k != "verdict"}) for f in content["findings"]]
            parts[part] = Report(title, **{**content, "findings": findings})
        return cls(title, parts)

    @property
    def findings(self) -> list[Finding]:
        return [finding for report in self.parts.values() for finding in report.findings]

    def markdown(self) -> str:
        """All parts as one document."""
        measured: dict[str, list[str]] = {}
        for part, report in self.parts.items():
            measured.setdefault(report.where, []).append(part)
        rows = [(f.what, f.target, f.measured, f.verdict) for f in self.findings]
        notes = [note for report in self.parts.values() for note in report.notes]
        return "\n\n".join(
            [
                f"# {self.title}",
                *(f"{', '.join(parts)}: {where}" for where, parts in measured.items()),
                table(("what", "target", "measured", "verdict"), rows),
                *(text for report in self.parts.values() for text in report.tables),
                *(["\n".join(f"- {note}" for note in notes)] if notes else []),
            ]
        )

    def write(self, folder: Path, name: str) -> None:
        """NAME.md and NAME.json in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(self.markdown() + "\n")
        parts = {}
        for part, report in self.parts.items():
            content = {k: x for k, x in asdict(report).items() if k != "title"}
            parts[part] = content | {"findings": [asdict(f) | {"verdict": f.verdict} for f in report.findings]}
        (folder / f"{name}.json").write_text(json.dumps({"parts": parts}, indent=2) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that reads well both as text and as Markdown."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def machine() -> dict[str, Any]:
    """Versions, processor, cores, date."""
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{os.cpu_count()}-core {_kind()} CPU",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)},
    }


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _kind() -> str:
    return "x86" if platform.machine() in ("x86_64", "AMD64") else platform.machine()
