"""Carries a step's payload off the training thread: one worker computes, then one lane a sink writes.

Threading contract: `Hub.put` and `Hub.event` are called from the training thread and never wait; everything else
happens on daemon threads. Each queue is bounded. What a full queue drops is counted, and recorded as a gap in the sink
that lacks it. A sink that hangs fills its own queue only.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from seismograd.telemetry.faults import Faults, warn
from seismograd.telemetry.records import Event, Row, RunInfo
from seismograd.telemetry.sinks import Sink

_RETRIES = (0.05, 0.2)  # seconds before the second and the third try of a write
_MUTED_SECONDS = 30.0  # a muted sink is tried again after this


class Payload(Protocol):
    """What the training thread hands over for one step."""

    step: int

    @property
    def size(self) -> int:
        """The number of readings in it, as far as known, for counting what is dropped."""


@dataclass
class _Flush:
    """Travels through the queues behind everything that was put before it."""

    done: threading.Event = field(default_factory=threading.Event)


class _Stop:
    """Ends a lane's thread once it has worked off what lies before it."""


class _Lane(ABC):
    """A bounded queue and the daemon thread that works it off."""

    def __init__(self, name: str, part: str, faults: Faults, capacity: int) -> None:
        self.name, self._part, self._faults = name, part, faults
        self.seconds = 0.0
        """Thread CPU seconds used so far; written by the lane's own thread only."""
        self._queue: queue.Queue[Any] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._run, name=f"seismograd-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> bool:
        """Without waiting; False where the queue is full."""
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return False
        return True

    def put_patiently(self, item: Any, deadline: float) -> bool:
        """Waits for room until `deadline` (time.monotonic); for flush and close only."""
        try:
            self._queue.put(item, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        return True

    def join(self, deadline: float) -> bool:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    @abstractmethod
    def handle(self, item: Any) -> None:
        """Work off one item, on the lane's thread."""

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, _Stop):
                return
            try:
                self.handle(item)
            except BaseException as e:  # nobody waits above this thread whom a SystemExit could be meant for
                self._faults.count(self._part, e)
            if isinstance(item, _Flush):
                item.done.set()
            self.seconds = time.thread_time()


class _SinkLane(_Lane):
    """One sink on its own thread: opened, written, retried, muted, closed."""

    def __init__(self, sink: Sink, run: RunInfo, faults: Faults, capacity: int) -> None:
        self._sink, self._info = sink, run
        self._opened = self._closed = False
        self._muted_until = 0.0
        self._lock = threading.Lock()  # of the two below, which the thread that offers changes as well
        self._gap = _Gap()
        self._dropped = 0
        super().__init__(sink.name, f"sink:{sink.name}", faults, capacity)

    @property
    def dropped(self) -> int:
        """Readings that the sink has missed so far."""
        return self._dropped

    def offer(self, item: Row | Event) -> None:
        if not self.put(item):
            self._drop(item)

    def handle(self, item: Any) -> None:
        if isinstance(item, _Close):
            self._close()
        elif isinstance(item, _Flush) or self._closed:
            return  # what comes after the close is a fault of another sink's close; it has been logged
        elif time.monotonic() < self._muted_until or not self._deliver(item):
            self._drop(item)

    def _deliver(self, item: Row | Event) -> bool:
        error: BaseException | None = None
        for pause in (0.0, *_RETRIES):
            if pause:
                time.sleep(pause)
            try:
                self._write(item)
            except BaseException as e:
                error = e
                continue
            return True
        assert error is not None
        self._muted_until = time.monotonic() + _MUTED_SECONDS
        muted = f", which is muted for {_MUTED_SECONDS:.0f} s after three failed writes"
        self._faults.count(self._part, error, muted)
        return False

    def _write(self, item: Row | Event) -> None:
        self._open()
        self._write_gap()
        self._sink.event(item) if isinstance(item, Event) else self._sink.write(item)

    def _open(self) -> None:
        if not self._opened:
            self._sink.open(self._info)
            self._opened = True

    def _write_gap(self) -> None:
        """Record what the sink lacks; it is given back to the next try where that fails."""
        with self._lock:
            gap, self._gap = self._gap, _Gap()
        if gap.readings:
            try:
                self._sink.event(gap.event(self.name))
            except BaseException:
                with self._lock:
                    self._gap = gap.followed_by(self._gap)
                raise

    def _drop(self, item: Row | Event) -> None:
        with self._lock:
            self._gap.add(item)
            self._dropped += len(item.readings) if isinstance(item, Row) else 1

    def _close(self) -> None:
        self._closed = True
        try:
            if self._gap.readings:  # muted or behind until now: one more try, so that the gap stands in the record
                self._open()
                self._write_gap()
        except BaseException:
            warn(self._gap.event(self.name).message)
        if self._opened:
            self._sink.close()


class _Close(_Flush):
    """Closes a sink, in its own thread."""


@dataclass
class _Gap:
    """What a sink lacks since its last successful write."""

    readings: int = 0
    first: int = -1
    last: int = -1

    def add(self, item: Row | Event) -> None:
        self.readings += len(item.readings) if isinstance(item, Row) else 1
        if item.step >= 0:  # events outside of steps have none
            self.first = item.step if self.first < 0 else min(self.first, item.step)
            self.last = max(self.last, item.step)

    def followed_by(self, later: _Gap) -> _Gap:
        """One gap of two."""
        steps = [step for step in (self.first, self.last, later.first, later.last) if step >= 0]
        return _Gap(self.readings + later.readings, min(steps, default=-1), max(steps, default=-1))

    def event(self, sink: str) -> Event:
        message = f"sink {sink} lacks {self.readings} readings of steps {self.first} to {self.last}"
        return Event(
            "gap", message, self.last, data={"readings": self.readings, "first": self.first, "last": self.last}
        )


class Hub(_Lane):
    """The worker: turns payloads into rows and events with `process`, and offers them to every sink's lane.

    Args:
        process: computes the rows and the events of one payload; runs on the worker's thread.
        sinks: in the order in which they are offered things.
        run: given to each sink's `open`.
        faults: counts what fails.
        capacity: payloads that may wait. They hold a step's token columns, so this bounds memory.
        sink_capacity: rows and events that may wait for one sink.
    """

    def __init__(
        self,
        process: Callable[[Any], tuple[Sequence[Row], Sequence[Event]]],
        sinks: Iterable[Sink],
        run: RunInfo,
        faults: Faults,
        capacity: int = 16,
        sink_capacity: int = 1024,
    ) -> None:
        self._process = process
        self._lanes = [_SinkLane(sink, run, faults, sink_capacity) for sink in sinks]
        self._dropped = 0
        super().__init__("worker", "worker", faults, capacity)

    def put(self, item: Payload | Any) -> bool:
        """Hand over one step's payload from the training thread.

        Never waits; a payload that finds no room is counted.
        """
        accepted = super().put(item)
        if not accepted:
            self._dropped += item.size
            self._event(
                Event(
                    "gap",
                    f"the worker is behind: step {item.step} was dropped ({item.size} readings)",
                    item.step,
                    data={"readings": item.size, "first": item.step, "last": item.step},
                )
            )
        return accepted

    def event(self, event: Event) -> None:
        """Offer an event to all sinks, behind the payloads that were put before it. Never waits."""
        if not super().put(event):
            self._event(event)

    def dropped(self) -> int:
        """Readings dropped so far, by the worker's queue and by the sinks'."""
        return self._dropped + sum(lane.dropped for lane in self._lanes)

    def cpu_seconds(self) -> dict[str, float]:
        """Thread CPU seconds used so far: the worker's, and each sink's as ``sink_NAME``."""
        return {"worker": self.seconds, **{f"sink_{lane.name}": lane.seconds for lane in self._lanes}}

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was put before has been written; False where a sink is still busy after `timeout`
        seconds.
        """
        deadline = time.monotonic() + timeout
        return self.settle(timeout) and self._through_lanes(_Flush, deadline)

    def settle(self, timeout: float) -> bool:
        """Wait until the worker has computed all that was put before, whatever the sinks do."""
        deadline = time.monotonic() + timeout
        mine = _Flush()
        return self.put_patiently(mine, deadline) and mine.done.wait(max(0.0, deadline - time.monotonic()))

    def close(self, timeout: float = 10.0) -> bool:
        """Write what is queued, close the sinks and end the threads; False where a sink had to be abandoned."""
        # Twice: a sink that fails on what the first flush brought it reports that to the others.
        clean = self.flush(timeout) and self.flush(timeout)
        deadline = time.monotonic() + (timeout if clean else 1.0)
        clean = self._through_lanes(_Close, deadline) and clean
        lanes: list[_Lane] = [*self._lanes, self]
        for lane in lanes:
            clean = lane.put_patiently(_Stop(), deadline) and lane.join(deadline) and clean
        return clean

    def handle(self, item: Any) -> None:
        if isinstance(item, _Flush):
            return
        if isinstance(item, Event):
            self._event(item)
        elif self._faults.working("worker"):
            with self._faults.fence("worker"):
                rows, events = self._process(item)
                for row in rows:
                    for lane in self._lanes:
                        lane.offer(row)
                for event in events:
                    self._event(event)

    def _event(self, event: Event) -> None:
        for lane in self._lanes:
            lane.offer(event)

    def _through_lanes(self, kind: type[_Flush], deadline: float) -> bool:
        marks = [kind() for _ in self._lanes]
        put = [lane.put_patiently(mark, deadline) for lane, mark in zip(self._lanes, marks, strict=True)]
        return all(put) and all(mark.done.wait(max(0.0, deadline - time.monotonic())) for mark in marks)
