"""Which files are generated, and how each is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
"""The dashboards folder itself, behind the symbolic link through which it is imported."""


@dataclass(frozen=True)
class Generated:
    """A committed file that is made from telemetry's tables.

    Args:
        path: below the repository's root.
        text: makes its content; imports what it needs when called.
    """

    path: str
    text: Callable[[], str]

    def stale(self, root: Path) -> bool:
        """Whether the file is missing or differs from what would be written now."""
        file = root / self.path
        return not file.is_file() or file.read_text(encoding="utf-8") != self.text()

    def write(self, root: Path) -> None:
        (root / self.path).write_text(self.text(), encoding="utf-8")


def checkout() -> Path:
    """The repository's root.

    Raises:
        FileNotFoundError: this is an installed copy, which has no docs folder to write to.
    """
    root = HERE.parent
    if not (root / "pyproject.toml").is_file():
        raise FileNotFoundError(f"{root} is no checkout of seismograd: the files can be generated only in one")
    return root


def _run_board() -> str:
    from seismograd.dashboards.boards.run import run_board

    return run_board()


def _rules() -> str:
    from seismograd.dashboards.prometheus.rules import rules_file

    return rules_file()


def _rules_test() -> str:
    from seismograd.dashboards.prometheus.promtool import rules_test_file

    return rules_test_file()


def _metrics() -> str:
    from seismograd.dashboards.metrics_doc import metrics_page

    return metrics_page()


GENERATED = (
    Generated("dashboards/boards/run.json", _run_board),
    Generated("dashboards/prometheus/seismograd.rules.yml", _rules),
    Generated("dashboards/prometheus/seismograd.rules.test.yml", _rules_test),
    Generated("docs/metrics.md", _metrics),
)
