"""``seismograd serve``: shows the runs of a folder in the browser."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

PORT = 8686
_NEEDED = ("starlette", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them on the command's parser."""
    add = parser.add_argument
    runs = os.environ.get("SEISMOGRAD_RUNS", "runs")
    add("runs", nargs="?", type=Path, default=Path(runs), metavar="RUNS", help=f"the runs' folder (default {runs})")
    add(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1); beyond this machine with --token"
    )
    add("--port", type=int, default=PORT, help=f"0 for a free one (default {PORT})")
    token = "that a browser or script has to bring (SEISMOGRAD_TOKEN)"
    add("--token", default=os.environ.get("SEISMOGRAD_TOKEN"), help=token)


def missing() -> list[str]:
    """The packages that the page needs and that are not installed."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


def serve(args: argparse.Namespace) -> int:
    """Runs the command until Ctrl-C; returns 0, or 2 where it cannot."""
    if missing():
        return _complain(f"needs {', '.join(missing())}, not installed here: pip install 'seismograd[page]'")
    from seismograd.dashboards.page.server import Access, PageServer, PortTaken

    if args.runs.exists() and not args.runs.is_dir():
        return _complain(f"{args.runs}: no folder; give the folder that watch(runs=...) writes to")
    try:
        access = Access(args.host, args.token)
        server = PageServer(args.runs, access, args.port)
    except (ValueError, PortTaken) as e:
        return _complain(e)
    suffix = "?token=..." if access.token is not None else ""
    print(f"seismograd: runs of {args.runs.absolute()} at {server.url}{suffix} (Ctrl-C ends it)", flush=True)
    server.serve()
    return 0


def _complain(problem: object) -> int:
    print(f"seismograd serve: {problem}", file=sys.stderr)
    return 2
