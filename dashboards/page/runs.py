"""The runs of a folder: where they lie, in which state they are, what they last measured."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from seismograd.telemetry.store import RunStore, StoreError

State = Literal["live", "finished", "died", "unreadable"]

SHOWN: dict[str, tuple[str, ...]] = {
    "reward": ("trainer_metric", "reward"),
    "loss": ("trainer_metric", "loss"),
    "kl": ("kl", "k3"),
    "grad_norm": ("grad_norm", "all", "all"),
    "snr": ("snr",),
    "step_seconds": ("step_seconds",),
}
"""The series whose last values the list shows."""

_RECENT = 40
"""Rows in which last values are looked for."""

_QUIET = 120.0
_STEPS_QUIET = 10.0
_BEFORE_FIRST = 1800.0
"""Seconds: a run without an end counts as dead when nothing has come for 2 minutes and for 10 of its steps, or for half
an hour where it has no step yet (a model may be compiling)."""

_INCIDENT = re.compile(r"step-(\d{6,})(-\d+)?")


class NoSuchRun(Exception):
    """The message names the run and the folder."""


@dataclass(frozen=True)
class Summary:
    """A run in one line.

    Args:
        name: of its folder.
        state: "live", "finished" (it said so), "died" (it has gone quiet without an end), "unreadable".
        started, updated: Unix seconds, of its start and of its last step or event.
        step: the last one, or None.
        values: the last of each of `SHOWN` that was measured lately; "nan" and the like as text.
        spikes, incidents, faults: events.
        ended: whether the run said that it has ended.
        problem: why it cannot be read, or None.
    """

    name: str
    state: State
    started: float | None = None
    updated: float | None = None
    step: int | None = None
    values: dict[str, float | str] | None = None
    spikes: int = 0
    incidents: int = 0
    faults: int = 0
    ended: bool = False
    problem: str | None = None

    def at(self, now: float) -> Summary:
        """The same with its state at a time."""
        return self if self.state == "unreadable" else replace(self, state=self._state(now))

    def _state(self, now: float) -> State:
        if self.ended:
            return "finished"
        seconds = (self.values or {}).get("step_seconds", 0.0)
        usual = seconds if isinstance(seconds, float) else 0.0
        patience = _BEFORE_FIRST if self.step is None else max(_QUIET, _STEPS_QUIET * usual)
        return "live" if now - (self.updated or 0.0) <= patience else "died"


class RunsFolder:
    """A folder of runs, or one run's own folder. Nothing outside of it is reached. Any thread may call it.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # without "..", which no address may end with
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[tuple[int, ...], Summary]] = {}

    @property
    def single(self) -> bool:
        """Whether it is one run's own folder."""
        return (self.path / "run.db").is_file()

    def stores(self) -> Iterator[tuple[str, Path]]:
        """Name and store of each run."""
        if self.single:
            if self._inside(self.path / "run.db"):
                yield self.path.name, self.path / "run.db"
            return
        try:
            entries = sorted(self.path.iterdir())
        except OSError:
            return
        for entry in entries:
            store = entry / "run.db"
            if _addressable(entry.name) and _is_file(store) and self._inside(store):
                yield entry.name, store

    def store(self, name: str) -> Path:
        """The store of a run.

        Raises:
            NoSuchRun: there is none of this name in the folder.
        """
        store = self.path / "run.db" if self.single else self.path / name / "run.db"
        known = name == self.path.name if self.single else _addressable(name)
        if known and _is_file(store) and self._inside(store):
            return store
        raise NoSuchRun(f"no run {name!r} in {self.path}")

    def summary(self, name: str) -> Summary:
        """Raises:
        NoSuchRun: there is none of this name.
        """
        return self._summary(name, self.store(name)).at(time.time())

    def summaries(self) -> list[Summary]:
        """All runs, the last started first."""
        now = time.time()
        found = [self._summary(name, store).at(now) for name, store in self.stores()]
        return sorted(found, key=lambda s: s.started or 0.0, reverse=True)

    def incidents(self, name: str) -> list[dict[str, Any]]:
        """The incident files of a run, by step."""
        folder = self.store(name).parent / "incidents"
        try:
            files = [file.stem for file in folder.iterdir() if file.suffix == ".json"]
        except OSError:
            return []
        found = [(int(match[1]), stem) for stem in files if (match := _INCIDENT.fullmatch(stem))]
        return [{"step": step, "name": stem, "page": _is_file(folder / f"{stem}.html")} for step, stem in sorted(found)]

    def incident_file(self, name: str, incident: str, suffix: str) -> Path:
        """Raises:
        NoSuchRun: there is no such run or incident.
        """
        file = self.store(name).parent / "incidents" / f"{incident}{suffix}"
        if _INCIDENT.fullmatch(incident) and _is_file(file) and self._inside(file):
            return file
        raise NoSuchRun(f"no incident {incident!r} of run {name!r}")

    def _inside(self, file: Path) -> bool:
        """A link may lead anywhere; what lies outside of the folder is not shown."""
        try:
            return file.resolve(strict=True).is_relative_to(self.path.resolve())
        except (OSError, RuntimeError):
            return False

    def _summary(self, name: str, store: Path) -> Summary:
        try:
            signature = _signature(store)
            with self._lock:
                known = self._known.get(store)
            if known is not None and known[0] == signature:
                return known[1]
            made = _read(name, store)
        except (StoreError, OSError) as e:
            return Summary(name, "unreadable", problem=str(e))
        except Exception as e:  # what a damaged file may lead to has no end, and the other runs are to be seen
            problem = f"{store}: damaged, not what seismograd has written ({type(e).__name__}: {e})"
            return Summary(name, "unreadable", problem=problem)
        with self._lock:
            self._known[store] = signature, made
        return made


def _signature(store: Path) -> tuple[int, ...]:
    """Changes whenever something is written."""
    signature: list[int] = []
    for path in (store, Path(f"{store}-wal")):
        try:
            status = os.stat(path)
            signature += [status.st_ino, status.st_mtime_ns, status.st_size]
        except FileNotFoundError:
            signature.append(0)
    return tuple(signature)


def _read(name: str, path: Path) -> Summary:
    with RunStore.read(path) as store:
        started = _finite(store.meta().get("started"))
        counts = store.counts()
        values: dict[str, float | str] = {}
        step, updated = None, started or 0.0
        rows = sorted(store.blocks(after=store.last_row() - _RECENT), key=lambda block: int(block.ids[-1]))
        for block in rows:
            step = int(block.steps[-1])
            updated = max(updated, _finite(block.times[-1]) or 0.0)
        for key, series in SHOWN.items():
            found = [
                (int(block.ids[-1]), float(block.values[-1, block.series.index(series)]))
                for block in rows
                if series in block.series
            ]
            if found:
                value = max(found)[1]
                values[key] = value if math.isfinite(value) else str(value)
        last = store.last_event()
        if last is not None:
            updated = max(updated, _finite(last.time) or 0.0)
    return Summary(
        name,
        "live",
        started,
        updated,
        step,
        values,
        counts.get("spike", 0),
        counts.get("incident", 0),
        counts.get("fault", 0),
        "run_end" in counts,
    )


def _finite(seconds: Any) -> float | None:
    """A time, None where it is none."""
    return float(seconds) if isinstance(seconds, (int, float)) and math.isfinite(seconds) else None


def _addressable(name: str) -> bool:
    """Whether it is one component of a path that an address can hold: file systems take names that are no text."""
    if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def summary_json(summary: Summary) -> dict[str, Any]:
    """JSON-serialisable."""
    return {key: value for key, value in vars(summary).items() if key != "ended"} | {"values": summary.values or {}}
