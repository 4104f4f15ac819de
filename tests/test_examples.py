"""The examples run as the README shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import ROOT, python

EXAMPLES = ROOT / "examples"
EXPERIMENTS = {"phantom_clipping.py"}
"""Those have their own arguments, and their own tests in test_experiments.py."""


@pytest.mark.parametrize(
    "script", sorted(p for p in EXAMPLES.glob("*.py") if p.name not in EXPERIMENTS), ids=lambda path: path.name
)
def test_example(tmp_path: Path, script: Path) -> None:
    done = python(script, "--steps", "20", cwd=tmp_path, seconds=300)
    assert "watching: " in done.stdout
    assert "http://127.0.0.1:" in done.stdout
    assert "fault" not in done.stderr
    assert len(list((tmp_path / "runs").glob("*/run.db"))) == 1
