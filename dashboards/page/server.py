"""Starts the page's server: in the foreground for `seismograd serve`, on a thread of its own for the demo."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import uvicorn

from seismograd.dashboards.page.api import application
from seismograd.dashboards.page.runs import RunsFolder
from seismograd.dashboards.page.safety import Access, is_loopback

PORT = 8686


class PortTaken(Exception):
    """The message names the port and the fix."""


class PageServer:
    """The page of a runs folder.

    Args:
        runs: the folder; it need not exist yet.
        access: who may ask.
        port: 0 for a free one.

    Raises:
        PortTaken: something else listens there.
    """

    def __init__(self, runs: Path, access: Access, port: int = PORT) -> None:
        self._access = access
        self._socket = _bound(access.host, port)
        self.port = int(self._socket.getsockname()[1])
        app = application(RunsFolder(runs), access, lambda: self._server.should_exit)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The page's address on this machine."""
        host = self._access.host
        shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"

    def run_url(self, name: str) -> str:
        """The address of a run."""
        return f"{self.url}runs/{quote(name, safe='')}"

    def serve(self) -> None:
        """Serve until Ctrl-C."""
        # The server raises Ctrl-C again once it has ended.
        with closing(self._socket), suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])

    def __enter__(self) -> PageServer:
        self._thread = threading.Thread(target=self.serve, name="seismograd-page", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.should_exit = True
        assert self._thread is not None
        self._thread.join(10.0)


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise PortTaken(f"--port {port}: give a number up to 65535, or 0 for a free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as e:
        made.close()
        raise PortTaken(
            f"cannot listen on {host}:{port} ({e.strerror}): give another --port, or 0 for a free one"
        ) from e
    made.listen(128)
    return made


__all__ = ["PORT", "Access", "PageServer", "PortTaken", "is_loopback"]
