"""Where readings go: one file a sink, all behind one small protocol.

Every method runs on the sink's own thread (see `seismograd.telemetry.hub.Lane`), never on the training thread, in the
order open, any number of write and event, close. A method that raises is retried, then the sink is muted and says so.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from seismograd.telemetry.records import Event, Row, RunInfo


@runtime_checkable
class Sink(Protocol):
    """A place that readings and events are written to.

    `name` is the label value under which the sink's own time and faults are reported.
    """

    name: str

    def open(self, run: RunInfo) -> None:
        """Called once, before anything is written."""

    def write(self, row: Row) -> None:
        """Called with each row, in order of time."""

    def event(self, event: Event) -> None:
        """Called with each event, in order of time, between the rows."""

    def close(self) -> None:
        """Called once at the end of the run; what was buffered is written now."""
