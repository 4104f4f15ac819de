"""The examples run as the README shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPERIMENTS = {"phantom_clipping.py"}
"""Those have their own arguments, and their own tests in test_experiments.py."""


@pytest.mark.parametrize(
    "script", sorted(p for p in EXAMPLES.glob("*.py") if p.name not in EXPERIMENTS), ids=lambda path: path.name
)
def test_example(tmp_path: Path, script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "20"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "watching: " in done.stdout
    assert "http://127.0.0.1:" in done.stdout
    assert "fault" not in done.stderr
    assert len(list((tmp_path / "runs").glob("*/run.db"))) == 1
