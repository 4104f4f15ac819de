"""What the demo has seen of the run so far, for its live line and its summary."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence

from seismograd.telemetry.records import Event, Row

CELLS = ("legitimate", "phantom", "hidden", "open")
"""The values of clip_fraction's label ``cell``."""

GRAD_NORM = ("grad_norm", "all", "all")
"""The series of the global gradient norm."""


def cell(name: str) -> tuple[str, ...]:
    """The series of one cell of the PPO ratio."""
    return ("clip_fraction", name, "ppo")


class Seen:
    """The readings by series, as they came, the spikes, the incidents and the controls' changes of state.

    A series is the metric's name and its label values, see `seismograd.telemetry.records.Reading.series`.
    """

    def __init__(self) -> None:
        self.spikes: list[Event] = []
        self.incidents: list[Event] = []
        self.changes: list[Event] = []
        self._values: dict[tuple[str, ...], dict[int, float]] = {}

    def add(self, row: Row) -> None:
        """Take in one row; a later row of a step adds to the earlier."""
        for reading in row.readings:
            self._values.setdefault(reading.series, {})[row.step] = reading.value

    def last(self, *series: str) -> float | None:
        """The newest value, None where there is none yet."""
        values = self._values.get(series)
        return next(reversed(values.values())) if values else None

    def over_run(
        self, *series: str, by: Callable[[Sequence[float]], float] = statistics.median, but: Collection[int] = ()
    ) -> float | None:
        """One value for the whole run.

        Args:
            series: see above.
            by: how the steps' values become one.
            but: steps that are left out.
        """
        values = [value for step, value in self._values.get(series, {}).items() if step not in but]
        return by(values) if values else None

    def last_by_label(self, name: str) -> dict[str, float]:
        """The newest value of each series of a metric with one label, by the label's value."""
        return {series[1]: next(reversed(v.values())) for series, v in self._values.items() if series[0] == name and v}
