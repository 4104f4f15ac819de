"""Commands that a test runs as a user would: in an interpreter of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
"""Of the repository."""


def python(*arguments: str | Path, cwd: Path = ROOT, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` on one thread, which has to succeed; what it has written."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done
