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
    command: str
    findings: list[Finding] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    def markdown(self) -> str:
        """The report as a document."""
        m = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        rows = [(f.what, f.target, f.measured, f.verdict) for f in self.findings]
        return "\n\n".join(
            [
                f"# {self.title}",
                f"`{self.command}`, {m['date']}. {m['cpu']}, {m['cores']} cores, {m['threads']} of them torch's, "
                f"load average {m['load']:.1f} at the start; {m['system']}, Python {m['python']}; {versions}.",
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
        content = {"command": self.command, "machine": self.machine, "findings": findings, "notes": self.notes}
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


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
        "cpu": _cpu(),
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


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
