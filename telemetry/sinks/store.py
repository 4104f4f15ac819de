"""The sink that is always on: RUN/run.db."""

from __future__ import annotations

from pathlib import Path

from seismograd.telemetry.records import Event, Row, RunInfo
from seismograd.telemetry.store import RunStore


class StoreSink:
    """Writes the run store.

    Args:
        path: of the file to create.
    """

    name = "store"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._store: RunStore | None = None

    def open(self, run: RunInfo) -> None:
        self._store = RunStore.create(self._path, run)

    def write(self, row: Row) -> None:
        assert self._store is not None
        self._store.write(row)

    def event(self, event: Event) -> None:
        assert self._store is not None
        self._store.event(event)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
