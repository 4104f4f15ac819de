"""The run store: one SQLite file a run, written as the run goes and readable while it does. Format: docs/run-folder.md.

Tables: ``steps(id, step, time, layout, row)``, ``events(id, step, time, kind, message, data)`` and ``meta(key,
value)``. A step's readings are one packed row of little-endian float64, in the order of its layout; the layouts, lists
of series, stand in meta, since nearly all steps share a few of them. Write-ahead log, one commit a row: a killed
process leaves a store that opens, with everything that had reached it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.records import SCHEMA_VERSION, Event, Reading, Row, RunInfo

_SCHEMA = """
CREATE TABLE steps (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, time REAL NOT NULL, layout INTEGER NOT NULL, row
BLOB); CREATE INDEX steps_by_step ON steps (step);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, message TEXT, data TEXT
);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class StoreError(Exception):
    """A run store that cannot be read; the message names the file and what can be done."""


@dataclass(frozen=True)
class Block:
    """Rows of one layout, in the order in which they were written.

    Args:
        series: (K,) name and label values of each column.
        ids: (N,) int64, the rows' numbers in the store, counted from 1 over all layouts.
        steps: (N,) int64.
        times: (N,) float64 Unix seconds.
        values: (N, K) float64.
    """

    series: tuple[tuple[str, ...], ...]
    ids: NDArray[np.int64]
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


class RunStore:
    """A run's store. Made by `create` (to write) or `read` (to read, also while another process writes).

    One thread at a time.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._db = connection
        self._layouts: dict[tuple[tuple[str, ...], ...], int] = {}
        self._series: dict[int, list[tuple[str, ...]]] = {}

    @classmethod
    def create(cls, path: Path, run: RunInfo) -> RunStore:
        """A new store at `path`.

        Raises:
            FileExistsError: the file is already there.
            sqlite3.Error: it cannot be written.
        """
        if path.exists():
            raise FileExistsError(f"{path} exists; a run never writes into another run's store")
        # Opened by the thread that asks for the run, written by the sink's.
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        meta = {
            "schema_version": SCHEMA_VERSION,
            "name": run.name,
            "started": run.started,
            "config": dict(run.config),
        }
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.executescript(_SCHEMA)
            db.executemany("INSERT INTO meta VALUES (?, ?)", [(key, json.dumps(value)) for key, value in meta.items()])
        except sqlite3.Error:
            db.close()
            path.unlink(missing_ok=True)  # a store without its tables would refuse the next try
            raise
        return cls(db, path)

    @classmethod
    def read(cls, path: Path | str) -> RunStore:
        """An existing store, opened read-only.

        Raises:
            StoreError: there is none, it is damaged, or it was written by a newer version.
        """
        path = Path(path)
        if not path.is_file():
            raise StoreError(f"{path}: no such run store; a run's store is RUNS/NAME/run.db")
        db = None
        try:
            db = sqlite3.connect(path.absolute().as_uri() + _mode(path), uri=True, isolation_level=None)
            store = cls(db, path)
            version = store.meta().get("schema_version")
        except sqlite3.DatabaseError as e:
            if db is not None:
                db.close()
            raise StoreError(
                f"{path}: not a readable run store ({e}); what is left of it comes out with `sqlite3 run.db .recover`"
            ) from e
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            db.close()
            raise StoreError(
                f"{path}: schema version {version}, this seismograd reads {SCHEMA_VERSION}; update seismograd"
            )
        return store

    def write(self, row: Row) -> None:
        """Append a row and commit it."""
        series = tuple(reading.series for reading in row.readings)
        values = np.array([reading.value for reading in row.readings], dtype="<f8")
        layout = self._layout(series)
        self._db.execute(
            "INSERT INTO steps (step, time, layout, row) VALUES (?, ?, ?, ?)",
            (row.step, row.time, layout, values.tobytes()),
        )

    def event(self, event: Event) -> None:
        """Append an event and commit it."""
        self._db.execute(
            "INSERT INTO events (step, time, kind, message, data) VALUES (?, ?, ?, ?, ?)",
            (event.step, event.time, event.kind, event.message, json.dumps(dict(event.data), allow_nan=False)),
        )

    def meta(self) -> dict[str, Any]:
        """The run's name, start, settings and schema version (the layouts left out)."""
        rows = self._db.execute("SELECT key, value FROM meta WHERE key NOT LIKE 'layout/%'")
        return {key: json.loads(value) for key, value in rows}

    def rows(self, after: int = 0) -> Iterator[Row]:
        """All rows in the order in which they were written; `after` leaves out that many of the first."""
        query = "SELECT step, time, layout, row FROM steps WHERE id > ? ORDER BY id"
        for step, time, layout, blob in self._db.execute(query, (after,)):
            values = np.frombuffer(blob, dtype="<f8").tolist()
            readings = tuple(
                Reading(name, value, dict(zip(CATALOGUE[name].labels, labels, strict=True)))
                for (name, *labels), value in zip(self._layout_series(layout), values, strict=True)
                if name in CATALOGUE
            )
            yield Row(step, time, readings)

    def blocks(self, after: int = 0, limit: int = 5_000) -> list[Block]:
        """The rows that follow row number `after`, at most `limit`, packed by layout: `rows` for many at once."""
        query = "SELECT layout, id, step, time, row FROM steps WHERE id > ? ORDER BY id LIMIT ?"
        by_layout: dict[int, list[tuple[int, int, int, float, bytes]]] = {}
        for row in self._db.execute(query, (after, limit)).fetchall():
            by_layout.setdefault(row[0], []).append(row)
        blocks = []
        for layout, found in by_layout.items():
            series = self._layout_series(layout)
            _, ids, steps, times, rows = zip(*found, strict=True)
            values = np.frombuffer(b"".join(rows), dtype="<f8").reshape(len(ids), len(series))
            blocks.append(Block(tuple(series), np.array(ids), np.array(steps), np.array(times, dtype=float), values))
        return blocks

    def last_row(self) -> int:
        """The number of the last row, 0 where there is none."""
        (last,) = self._db.execute("SELECT coalesce(max(id), 0) FROM steps").fetchone()
        return int(last)

    def step_range(self) -> tuple[int, int] | None:
        """The smallest and the largest step, None where there is no row."""
        first, last = self._db.execute("SELECT min(step), max(step) FROM steps").fetchone()
        return None if first is None else (int(first), int(last))

    def known_series(self) -> list[tuple[str, ...]]:
        """Name and label values of every series, in the order in which they first appeared."""
        texts = self._db.execute("SELECT value FROM meta WHERE key LIKE 'layout/%' ORDER BY rowid")
        return list(dict.fromkeys(tuple(series) for (text,) in texts for series in json.loads(text)))

    def last_event(self) -> Event | None:
        """The event that was written last."""
        query = "SELECT kind, message, step, time, data FROM events ORDER BY id DESC LIMIT 1"
        row = self._db.execute(query).fetchone()
        if row is None:
            return None
        kind, message, step, time, data = row
        return Event(kind, message, step, time, json.loads(data))

    def counts(self) -> dict[str, int]:
        """The number of events of each kind."""
        return dict(self._db.execute("SELECT kind, count(*) FROM events GROUP BY kind"))

    def series(self, metric: str, /, **labels: str) -> list[tuple[int, float]]:
        """(step, value) of one series over the run."""
        return [
            (row.step, reading.value)
            for row in self.rows()
            for reading in row.readings
            if reading.name == metric and dict(reading.labels) == labels
        ]

    def events(self, kind: str | None = None) -> list[Event]:
        """The events in order, of one kind if given."""
        return [event for _, event in self.numbered_events(kind=kind)]

    def numbered_events(self, after: int = 0, kind: str | None = None) -> list[tuple[int, Event]]:
        """The events that follow event number `after`, each with its number in the store."""
        query = (
            "SELECT id, kind, message, step, time, data FROM events "
            "WHERE id > ?1 AND (?2 IS NULL OR kind = ?2) ORDER BY id"
        )
        return [(i, Event(k, m, s, t, json.loads(d))) for i, k, m, s, t, d in self._db.execute(query, (after, kind))]

    def close(self) -> None:
        """Close the file; the write-ahead log is merged into it."""
        self._db.close()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _layout(self, series: tuple[tuple[str, ...], ...]) -> int:
        layout = self._layouts.get(series)
        if layout is None:
            layout = len(self._layouts)
            self._db.execute("INSERT INTO meta VALUES (?, ?)", (f"layout/{layout}", json.dumps(series)))
            self._layouts[series] = layout  # only once it is written
        return layout

    def _layout_series(self, layout: int) -> list[tuple[str, ...]]:
        if layout not in self._series:
            (text,) = self._db.execute("SELECT value FROM meta WHERE key = ?", (f"layout/{layout}",)).fetchone()
            self._series[layout] = [tuple(key) for key in json.loads(text)]
        return self._series[layout]


def _mode(path: Path) -> str:
    """How a store is opened to be read. One without a write-ahead log is finished, since no run writes into another's
    store: opened as unchangeable, it gets no files beside it and can be read where nothing may be written.
    """
    return "?mode=ro" if Path(f"{path}-wal").exists() else "?mode=ro&immutable=1"
