"""The sink that is always on: RUN/run.db."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
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
        with self._explained():
            self._store = RunStore.create(self._path, run)

    def write(self, row: Row) -> None:
        assert self._store is not None
        with self._explained():
            self._store.write(row)

    def event(self, event: Event) -> None:
        assert self._store is not None
        with self._explained():
            self._store.event(event)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """SQLite's errors with the file and the fix."""
        try:
            yield
        except sqlite3.Error as e:
            fix = "free space there, or set runs= or SEISMOGRAD_RUNS to another folder"
            if type(e) is sqlite3.DatabaseError:  # its subclasses are faults of the file system or of a call
                fix = f"the file is damaged, what is left of it comes out with `sqlite3 {self._path} .recover`"
            raise OSError(f"cannot write {self._path} ({e}): {fix}") from e
