"""Off the training thread: nothing waits, nothing is lost silently."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import seismograd.telemetry.hub as hub_module
from seismograd.telemetry.faults import Faults
from seismograd.telemetry.hub import Hub
from seismograd.telemetry.records import Event, Reading, Row, RunInfo


class Memory:
    """A sink that keeps everything, and does what the test tells it to before."""

    def __init__(self, name: str = "memory", before: Callable[[str], None] = lambda _: None) -> None:
        self.name, self._before = name, before
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.opened = self.closed = 0

    def open(self, run: RunInfo) -> None:
        self._before("open")
        self.opened += 1

    def write(self, row: Row) -> None:
        self._before("write")
        self.rows.append(row)

    def event(self, event: Event) -> None:
        self._before("event")
        self.events.append(event)

    def close(self) -> None:
        self._before("close")
        self.closed += 1


class Step:
    """A payload of two readings."""

    size = 2

    def __init__(self, step: int) -> None:
        self.step = step


def process(payload: Any) -> tuple[list[Row], list[Event]]:
    if payload.step < 0:
        raise RuntimeError("broken")
    readings = (Reading("step", payload.step), Reading("step_seconds", 0.5))
    return [Row(payload.step, 0.0, readings)], []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def made(*sinks: Memory, **sizes: int) -> Hub:
    hub: Hub
    faults = Faults(lambda event: hub.event(event))
    hub = Hub(process, sinks, RunInfo("run", None, {}), faults, **sizes)
    return hub


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_RETRIES", (0.0, 0.0))


def test_rows_and_events_arrive_in_order() -> None:
    sink = Memory()
    hub = made(sink)
    for step in range(50):
        while not hub.put(Step(step)):
            hub.flush()
    hub.event(Event("note", "last"))
    assert hub.close()
    assert [row.step for row in sink.rows] == list(range(50))
    assert [event.message for event in sink.events if event.kind == "note"] == ["last"]
    assert (sink.opened, sink.closed) == (1, 1)


def test_hanging_sink_fills_its_own_queue_only() -> None:
    release = threading.Event()
    stuck = Memory("stuck", lambda what: release.wait(30) if what == "write" else None)  # type: ignore[func-returns-value]
    fine = Memory("fine")
    hub = made(stuck, fine, sink_capacity=4)
    for step in range(20):
        hub.put(Step(step))
        wait_for(lambda step=step: len(fine.rows) > step)
    assert [row.step for row in fine.rows] == list(range(20))
    assert hub.dropped() == 2 * (20 - 1 - 4)  # one in its hands, four in its queue
    release.set()
    assert hub.flush()
    hub.put(Step(20))
    assert hub.close()
    (gap,) = [event for event in stuck.events if event.kind == "gap"]
    assert gap.data == {"readings": 30, "first": 5, "last": 19}
    assert [row.step for row in stuck.rows] == [0, 1, 2, 3, 4, 20]


def test_close_abandons_a_sink_that_hangs() -> None:
    release = threading.Event()
    stuck = Memory("stuck", lambda what: release.wait(30) if what == "write" else None)  # type: ignore[func-returns-value]
    fine = Memory("fine")
    hub = made(stuck, fine)
    hub.put(Step(0))
    assert not hub.close(timeout=0.2)
    assert fine.closed == 1
    release.set()


def test_worker_that_is_behind_drops_and_says_so() -> None:
    release = threading.Event()
    sink = Memory()
    hub: Hub

    def slow(payload: Any) -> tuple[list[Row], list[Event]]:
        release.wait(30)
        return process(payload)

    hub = Hub(slow, [sink], RunInfo("run", None, {}), Faults(lambda event: hub.event(event)), capacity=2)
    accepted = [hub.put(Step(step)) for step in range(10)]
    release.set()
    assert hub.close()
    assert not all(accepted)
    assert [row.step for row in sink.rows] == [step for step, ok in enumerate(accepted) if ok]
    gaps = [event for event in sink.events if event.kind == "gap"]
    assert [gap.step for gap in gaps] == [step for step, ok in enumerate(accepted) if not ok]
    assert hub.dropped() == 2 * len(gaps)


def test_sink_that_fails_once_is_retried() -> None:
    fails = iter([True])
    sink = Memory("shaky", lambda what: _raise() if what == "write" and next(fails, False) else None)
    hub = made(sink)
    hub.put(Step(0))
    assert hub.close()
    assert [row.step for row in sink.rows] == [0]
    assert hub.dropped() == 0


def test_sink_that_keeps_failing_is_muted_says_so_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [True]
    sink = Memory("shaky", lambda what: _raise() if what == "write" and broken[0] else None)
    fine = Memory("fine")
    hub = made(sink, fine)
    for step in range(3):
        hub.put(Step(step))
        assert hub.flush()
    faults = [event for event in fine.events if event.kind == "fault"]
    assert [event.data["part"] for event in faults] == ["sink:shaky"]  # tried once, muted since
    assert "No space left on device" in faults[0].message
    broken[0] = False
    for lane in hub._lanes:
        lane._muted_until = 0.0
    hub.put(Step(3))
    assert hub.close()
    assert [row.step for row in fine.rows] == [0, 1, 2, 3]
    assert [row.step for row in sink.rows] == [3]
    (gap,) = [event for event in sink.events if event.kind == "gap"]
    assert (gap.data["first"], gap.data["last"]) == (0, 2)


@pytest.mark.parametrize("where", ["open", "write", "event", "close"])
def test_fault_in_any_method_of_a_sink_stays_there(where: str) -> None:
    sink, fine = Memory("shaky", lambda what: _raise() if what == where else None), Memory("fine")
    hub = made(sink, fine)
    hub.put(Step(0))
    hub.event(Event("note", "x"))
    assert hub.close()
    assert [row.step for row in fine.rows] == [0]
    assert hub._faults.counts()["sink:shaky"] >= 1


def test_worker_that_keeps_failing_is_switched_off() -> None:
    sink = Memory()
    hub = made(sink)
    for _ in range(5):
        hub.put(Step(-1))
        hub.flush()
    assert hub._faults.counts()["worker"] == 3
    assert hub.close()
    messages = [event.message for event in sink.events if event.kind == "fault"]
    assert len(messages) == 2
    assert "switched off" in messages[-1]


@pytest.mark.parametrize("recovers", [True, False])
def test_sink_that_is_muted_at_the_end_gets_its_gap_or_it_is_said(
    caplog: pytest.LogCaptureFixture, recovers: bool
) -> None:
    broken = [True]
    sink = Memory("shaky", lambda what: _raise() if what in ("open", "event") and broken[0] else None)
    hub = made(sink)
    for step in (4, 5):
        hub.put(Step(step))
    assert hub.flush()
    broken[0] = not recovers
    assert hub.close()
    lacks = "sink shaky lacks 5 readings of steps 4 to 5"  # four, and the event of the fault
    assert [event.message for event in sink.events if event.kind == "gap"] == [lacks] * recovers
    assert any(lacks in record.getMessage() for record in caplog.records) is not recovers


@pytest.mark.parametrize("where", ["open", "write", "event", "close"])
def test_sink_that_wants_to_exit_ends_nothing(where: str) -> None:
    def leave(what: str) -> None:
        if what == where:
            raise SystemExit(1)

    sink, fine = Memory("leaving", leave), Memory("fine")
    hub = made(sink, fine)
    hub.put(Step(0))
    hub.event(Event("note", "x"))
    assert hub.close()
    assert [row.step for row in fine.rows] == [0]
    assert hub._faults.counts()["sink:leaving"] >= 1


def test_worker_that_wants_to_exit_goes_on() -> None:
    def leaving(payload: Any) -> tuple[list[Row], list[Event]]:
        if payload.step == 0:
            raise SystemExit(1)
        return process(payload)

    sink = Memory()
    hub: Hub
    hub = Hub(leaving, [sink], RunInfo("run", None, {}), Faults(lambda event: hub.event(event)))
    hub.put(Step(0))
    hub.put(Step(1))
    assert hub.close()
    assert [row.step for row in sink.rows] == [1]


def test_dropping_from_two_threads_counts_every_reading() -> None:
    """The thread that offers and the lane itself both drop; each reading is in the gap once."""
    broken = [True]
    sink = Memory("shaky", lambda what: _raise() if what != "close" and broken[0] else None)
    hub = made(sink, sink_capacity=2)
    for step in range(400):
        while not hub.put(Step(step)):
            time.sleep(0.001)
    assert hub.flush()
    broken[0] = False
    assert hub.close()
    gap = sink.events[-1]
    assert gap.data["readings"] == hub._lanes[0].dropped >= 800
    assert (gap.data["first"], gap.data["last"]) == (0, 399)


def _raise() -> None:
    raise OSError(28, "No space left on device")


def test_what_fails_at_the_very_end_is_still_told_to_the_others() -> None:
    """A sink that fails slowly on the last row reports it while the others are about to be closed."""

    def slow(what: str) -> None:
        if what in ("write", "close"):
            time.sleep(0.05)
            _raise()

    shaky, fine = Memory("shaky", slow), Memory("fine")
    hub = made(fine, shaky)
    hub.put(Step(0))
    assert hub.close()
    told = [event.data["part"] for event in fine.events if event.kind == "fault"]
    assert told == ["sink:shaky"]
    assert "sink:fine" not in hub._faults.counts() or hub._faults.counts()["sink:fine"] == 0
