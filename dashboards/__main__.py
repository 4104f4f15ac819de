"""``python -m seismograd.dashboards``: write the generated files again, or check that they are up to date.

Exit codes: 0 done or up to date, 1 a committed file is stale (``--check``), 2 it cannot be said.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from seismograd.dashboards.generated import GENERATED, checkout


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m seismograd.dashboards", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a committed file is stale")
    options = parser.parse_args(argv)
    try:
        root = checkout()
        stale = [file for file in GENERATED if file.stale(root)]
    except FileNotFoundError as e:
        print(e, file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        print(f"{e}: generating needs the extra 'dev' (pip install -e '.[dev]')", file=sys.stderr)
        return 2
    for file in stale:
        if options.check:
            print(f"{file.path} is stale: run python -m seismograd.dashboards", file=sys.stderr)
        else:
            file.write(root)
            print(f"wrote {file.path}")
    if not stale:
        print("all generated files are up to date")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
