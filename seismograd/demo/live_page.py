"""The page beside the demo: its address at the start, and at the end as long as somebody looks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from seismograd.dashboards.page.server import PageServer


@contextmanager
def live_page(out: Console, runs: str, name: str, wanted: bool) -> Iterator[PageServer | None]:
    """Serves the folder of runs on loopback; at the end of the block until Ctrl-C, where a person runs it.

    None where it is not wanted or cannot be served.
    """
    server = _server(out, runs) if wanted else None
    if server is None:
        yield None
        return
    with server:
        out.print(f"Page: {server.run_url(name)}", soft_wrap=True)
        yield server
        if sys.stdin.isatty() and sys.stdout.isatty():
            out.print(f"The page stays up: {server.run_url(name)}  Ctrl-C ends it.", soft_wrap=True)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                out.print("ended")
        else:
            out.print(f"The page again: seismograd serve {runs}", soft_wrap=True)


def _server(out: Console, runs: str) -> PageServer | None:
    from seismograd.serve_command import PORT, missing

    if missing():
        out.print(f"No page: {', '.join(missing())} not installed (pip install 'seismograd[page]')")
        return None
    from seismograd.dashboards.page.server import Access, PageServer, PortTaken

    for port in (PORT, 0):  # another page may be open there
        try:
            return PageServer(Path(runs), Access("127.0.0.1"), port)
        except PortTaken as e:
            taken = e
    out.print(f"No page: {taken}")
    return None
