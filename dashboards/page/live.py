"""What is new in a run, as server-sent events, from where the page left off.

Each event's id is ROW-EVENT, the numbers of the last row and the last event that it holds. A browser that lost the
connection sends the id back (Last-Event-ID), and goes on there. One that is too far behind is told to read again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from seismograd.dashboards.page.columns import ColumnCache
from seismograd.dashboards.page.queries import Selector, rows_after
from seismograd.dashboards.page.runs import NoSuchRun, RunsFolder, summary_json
from seismograd.telemetry.records import Event
from seismograd.telemetry.store import RunStore, StoreError

_EVERY = 0.5
"""Seconds between looks into the store."""

_BEHIND = 2000
"""Rows beyond which the page reads the run again."""

_BEAT = 15.0
"""Seconds after which a silent stream sends a comment, so that a dead connection is noticed."""


@dataclass(frozen=True)
class Cursor:
    """Up to where somebody knows a run: the numbers of its last row and event."""

    row: int = 0
    event: int = 0

    @staticmethod
    def read(text: str) -> Cursor:
        """Raises:
        ValueError: it is no ROW-EVENT.
        """
        row, event = (int(number) for number in text.split("-"))
        if max(row, event) >= 2**62:
            raise ValueError(f"{text}: no store has so many")
        return Cursor(row, event)

    def __str__(self) -> str:
        return f"{self.row}-{self.event}"


def event_json(number: int, event: Event) -> dict[str, Any]:
    """An event, JSON-serialisable."""
    return {
        "number": number,
        "kind": event.kind,
        "message": event.message,
        "step": event.step,
        "time": plain_json(event.time),
        "data": plain_json(dict(event.data)),
    }


def plain_json(x: Any) -> Any:
    """Numbers may be infinite (a bound that is not there): as text, JSON has no sign for it."""
    if isinstance(x, dict):
        return {key: plain_json(value) for key, value in x.items()}
    if isinstance(x, list):
        return [plain_json(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


class Stream:
    """One page's stream of one run.

    Args:
        runs: the folder.
        cache: of decoded columns.
        name: of the run.
        selectors: the series that the page draws.
        cursor: what it has already.
    """

    def __init__(
        self, runs: RunsFolder, cache: ColumnCache, name: str, selectors: Sequence[Selector], cursor: Cursor
    ) -> None:
        self._runs, self._cache, self._name, self._selectors = runs, cache, name, selectors
        self._store: Path = runs.store(name)
        self._cursor = cursor
        self._state: dict[str, Any] = {}

    async def events(self, stopped: Callable[[], bool]) -> AsyncIterator[str]:
        """The stream's text, until it is cancelled or the server stops."""
        yield "retry: 1000\n\n"
        quiet = time.monotonic()
        while not stopped():
            try:
                found = await to_thread.run_sync(self._look)
            except (NoSuchRun, StoreError) as e:
                yield _message("gone", {"error": str(e)}, self._cursor)
                return
            for text in found:
                yield text
            if found:
                quiet = time.monotonic()
            elif time.monotonic() - quiet > _BEAT:
                quiet = time.monotonic()
                yield ": still here\n\n"
            await anyio.sleep(_EVERY)

    def _look(self) -> list[str]:
        texts = []
        columns = self._cache.get(self._store)
        if columns.last < self._cursor.row or columns.last - self._cursor.row > _BEHIND:
            self._cursor = Cursor(columns.last, self._cursor.event)
            texts.append(_message("reset", {"row": columns.last}, self._cursor))
        elif columns.last > self._cursor.row:
            rows = rows_after(columns, self._selectors, self._cursor.row)
            self._cursor = Cursor(int(rows["row"]), self._cursor.event)
            texts.append(_message("rows", rows, self._cursor))
        with RunStore.read(self._store) as store:
            events = store.numbered_events(self._cursor.event)
        if events:
            self._cursor = Cursor(self._cursor.row, events[-1][0])
            texts.append(_message("events", [event_json(i, e) for i, e in events], self._cursor))
        state = summary_json(self._runs.summary(self._name))
        if state != self._state:
            self._state = state
            texts.append(_message("state", state, self._cursor))
        return texts


def _message(event: str, data: Any, cursor: Cursor) -> str:
    return f"id: {cursor}\nevent: {event}\ndata: {json.dumps(data, allow_nan=False)}\n\n"
