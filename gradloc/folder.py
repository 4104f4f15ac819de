"""RUN/incidents: each incident as step-NNNNNN.json, with a page and perhaps micro-batches of the same name."""

from __future__ import annotations

import os
from pathlib import Path

from seismograd.telemetry.incidents import Explained


class IncidentFolder:
    """Writes incidents. The folder is made with the first.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, explained: Explained) -> str:
        """Write its files; the path of the JSON. A step that has an incident already keeps it.

        Raises:
            OSError: they cannot be written; the message names the file and the fix.
        """
        # Jinja is loaded with the first incident only.
        from seismograd.gradloc.page import incident_page
        from seismograd.gradloc.saved import write_saved

        incident = explained.incident
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            file = self._free(f"step-{max(0, incident.step):06d}")
            _write(file, incident.to_json() + "\n")
            _write(file.with_suffix(".html"), incident_page(incident))
            if explained.saved is not None:
                write_saved(explained.saved, file.with_suffix(".pt"))
        except OSError as e:
            raise OSError(
                f"cannot write into {self._path} ({e.strerror}): free space there, or set runs= or SEISMOGRAD_RUNS to "
                "another folder"
            ) from e
        return str(file)

    def _free(self, stem: str) -> Path:
        """Steps may be counted anew in one run."""
        number = 1
        while True:
            file = self._path / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
            if not file.exists():
                return file
            number += 1


def _write(file: Path, text: str) -> None:
    """Whole or not at all, for those who read while the run goes on."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
