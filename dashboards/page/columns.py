"""A run's rows as columns in memory, read once and then only what is new."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seismograd.telemetry.store import Block, RunStore

Series = tuple[str, ...]
"""Name and label values, as in a layout of the store."""


@dataclass(frozen=True)
class Rows:
    """Rows of several layouts, sorted by step, and by number within a step.

    Args:
        ids, steps: (N,) int64.
        times: (N,) float64 Unix seconds.
        order: (N,) where each row lies in the layouts' rows put one after the other; None where it is as it is.
    """

    ids: NDArray[np.int64]
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    order: NDArray[np.int64] | None


class Columns:
    """The decoded columns of one run. Any thread may call it.

    Args:
        path: of the run store.
    """

    _READ = 500  # rows at a time: few enough to stay in the processor's cache on their way

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = 0
        self._lock = threading.RLock()
        self._file: tuple[int, int] | None = None
        self._tables: dict[tuple[Series, ...], _Table] = {}
        self._where: dict[Series, list[tuple[_Table, int]]] = {}
        self._rows: dict[tuple[int, ...], tuple[int, Rows]] = {}

    def refresh(self) -> None:
        """Read what has been written since the last call.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._lock, RunStore.read(self.path) as store:
            status = os.stat(self.path)
            file = (status.st_dev, status.st_ino)
            if file != self._file or store.last_row() < self.last:
                self._forget(file)  # another run took its place
            while blocks := store.blocks(self.last, self._READ):
                for block in blocks:
                    self._add(block)
                self.last = max(int(block.ids[-1]) for block in blocks)
                if sum(len(block.ids) for block in blocks) < self._READ:
                    break

    @property
    def series(self) -> list[Series]:
        """All series, in the order in which they first appeared."""
        with self._lock:
            return list(self._where)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(table.nbytes for table in self._tables.values())

    def groups(self, wanted: list[Series]) -> list[tuple[Rows, list[tuple[Series, NDArray[np.float64]]]]]:
        """The wanted series that exist, grouped by the rows that they share: (N,) values of each.

        A series has values only at rows of the layouts that it is part of.
        """
        with self._lock:
            by_rows: dict[tuple[int, ...], list[Series]] = {}
            tables = list(self._tables.values())
            number = {id(table): i for i, table in enumerate(tables)}
            for series in wanted:
                if series in self._where:
                    key = tuple(number[id(table)] for table, _ in self._where[series])
                    by_rows.setdefault(key, []).append(series)
            groups = []
            for key, members in by_rows.items():
                rows = self._sorted(key, [tables[i] for i in key])
                groups.append((rows, [(series, self._values(series, rows)) for series in members]))
            return groups

    def all_rows(self) -> Rows:
        """The rows of all layouts."""
        with self._lock:
            return self._sorted(tuple(range(len(self._tables))), list(self._tables.values()))

    def values(self, series: Series) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(steps, values) of one series, sorted by step; empty where there is none."""
        for rows, members in self.groups([series]):
            return rows.steps, members[0][1]
        return np.zeros(0, dtype=np.int64), np.zeros(0)

    def _forget(self, file: tuple[int, int]) -> None:
        self._file, self.last = file, 0
        self._tables, self._where, self._rows = {}, {}, {}

    def _add(self, block: Block) -> None:
        table = self._tables.get(block.series)
        if table is None:
            table = self._tables[block.series] = _Table(len(block.series))
            for column, series in enumerate(block.series):
                self._where.setdefault(series, []).append((table, column))
        table.append(block)

    def _values(self, series: Series, rows: Rows) -> NDArray[np.float64]:
        values = np.concatenate([part for table, column in self._where[series] for part in table.column(column)])
        return values if rows.order is None else values[rows.order]

    def _sorted(self, key: tuple[int, ...], tables: list[_Table]) -> Rows:
        n = sum(table.n for table in tables)
        known = self._rows.get(key)
        if known is not None and known[0] == n:
            return known[1]
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *(part for table in tables for part in table.ids())])
        steps = np.concatenate([np.zeros(0, dtype=np.int64), *(part for table in tables for part in table.steps())])
        times = np.concatenate([np.zeros(0), *(part for table in tables for part in table.times())])
        order: NDArray[np.int64] | None = None
        if len(tables) > 1 or bool(np.any(np.diff(steps) < 0)):  # steps may be counted anew in one run
            order = np.lexsort((ids, steps))
            ids, steps, times = ids[order], steps[order], times[order]
        rows = Rows(ids, steps, times, order)
        self._rows[key] = (n, rows)
        return rows


class _Table:
    """The rows of one layout, in pieces that are filled one after the other, so that nothing is copied as it grows."""

    _SMALLEST, _LARGEST = 64, 4096  # rows of a piece

    def __init__(self, k: int) -> None:
        self.n = 0
        self._k = k
        self._pieces: list[_Piece] = []

    @property
    def nbytes(self) -> int:
        return sum(piece.values.nbytes for piece in self._pieces)

    def append(self, block: Block) -> None:
        at = 0
        while at < len(block.ids):
            if not self._pieces or self._pieces[-1].full:
                room = min(self._SMALLEST << len(self._pieces), self._LARGEST)
                self._pieces.append(_Piece(self._k, room))
            at += self._pieces[-1].fill(block, at)
        self.n += len(block.ids)

    def ids(self) -> list[NDArray[np.int64]]:
        return [piece.ids[: piece.n] for piece in self._pieces]

    def steps(self) -> list[NDArray[np.int64]]:
        return [piece.steps[: piece.n] for piece in self._pieces]

    def times(self) -> list[NDArray[np.float64]]:
        return [piece.times[: piece.n] for piece in self._pieces]

    def column(self, i: int) -> list[NDArray[np.float64]]:
        return [piece.values[i, : piece.n] for piece in self._pieces]


class _Piece:
    """Up to `room` rows, each series in one stretch of memory."""

    def __init__(self, k: int, room: int) -> None:
        self.n = 0
        self.ids = np.empty(room, dtype=np.int64)
        self.steps = np.empty(room, dtype=np.int64)
        self.times = np.empty(room)
        self.values = np.empty((k, room))

    @property
    def full(self) -> bool:
        return self.n == len(self.ids)

    def fill(self, block: Block, at: int) -> int:
        """Take rows of the block from row `at` on; how many."""
        taken = min(len(self.ids) - self.n, len(block.ids) - at)
        here, there = slice(self.n, self.n + taken), slice(at, at + taken)
        self.ids[here], self.steps[here], self.times[here] = block.ids[there], block.steps[there], block.times[there]
        for i in range(0, taken, 512):  # transposed in parts that the processor's cache holds
            part = slice(self.n + i, self.n + min(i + 512, taken))
            self.values[:, part] = block.values[at + i : at + min(i + 512, taken)].T
        self.n += taken
        return taken


class ColumnCache:
    """The columns of the runs that are looked at. Beyond the budget the least recently used are forgotten.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int = 512 * 2**20) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._runs: OrderedDict[Path, Columns] = OrderedDict()

    def get(self, path: Path) -> Columns:
        """The run's columns, up to date.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._lock:
            columns = self._runs.setdefault(path, Columns(path))
            self._runs.move_to_end(path)
        columns.refresh()
        with self._lock:
            while len(self._runs) > 1 and sum(c.nbytes for c in self._runs.values()) > self._budget:
                self._runs.popitem(last=False)
        return columns
