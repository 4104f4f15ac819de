"""Applies the rule table to a step's values and says which spiked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seismograd.telemetry.baselines import State, Values
from seismograd.telemetry.records import Reading, Spike
from seismograd.telemetry.rules import Rule, Selection


@dataclass(frozen=True)
class Measured:
    """One metric's series at one step.

    Args:
        labels: of each series.
        values: (n,), NaN where a series was not measured.
    """

    labels: Sequence[Mapping[str, str]]
    values: Values


def measured(readings: Iterable[Reading]) -> dict[str, Measured]:
    """Readings grouped by metric, as `Detector.judge` takes them."""
    labels: dict[str, list[Mapping[str, str]]] = {}
    values: dict[str, list[float]] = {}
    for reading in readings:
        labels.setdefault(reading.name, []).append(reading.labels)
        values.setdefault(reading.name, []).append(reading.value)
    return {name: Measured(labels[name], np.array(values[name], dtype=np.float64)) for name in labels}


class Detector:
    """The running state of a set of rules. Not shared between threads: one for the step, one for the worker.

    Args:
        rules: those that this detector judges.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._watches = [_Watch(rule) for rule in rules]

    def judge(self, step: int, values: Mapping[str, Measured]) -> list[Spike]:
        """The spikes of one step, at most one a rule: its worst series. Then learns from the step."""
        spikes = []
        for watch in self._watches:
            spike = watch.judge(step, values)
            if spike is not None:
                spikes.append(spike)
        return spikes

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable, by signal."""
        return {watch.rule.signal: watch.state_dict() for watch in self._watches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off; signals that it does not name begin anew.

        Where it cannot be read everything stays as it is.
        """
        watches = [_Watch(watch.rule) for watch in self._watches]
        for watch in watches:
            if watch.rule.signal in state:
                watch.load_state_dict(state[watch.rule.signal])
        self._watches = watches

    def reset(self) -> None:
        """Begin anew."""
        self._watches = [_Watch(watch.rule) for watch in self._watches]


class _Watch:
    """One rule at work: which series it has met, their baselines, and when it last fired."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._index: dict[tuple[str, ...], int] = {}
        self._state: State = rule.baseline.state(0)
        self._last_spike: int | None = None

    def judge(self, step: int, values: Mapping[str, Measured]) -> Spike | None:
        found = values.get(self.rule.selection.metric)
        if found is None or not self._given(values):
            return None
        chosen = [(labels, x) for labels, x in zip(found.labels, found.values, strict=True) if self._accepts(labels)]
        if not chosen:
            return None
        verdict = self._state.judge(row := self._row(chosen))
        if not verdict.fired.any():
            return None
        # Infinite and NaN scores are the worst of all.
        score = np.where(verdict.fired, np.nan_to_num(verdict.score, nan=np.inf), -np.inf)
        worst = int(np.argmax(score))
        label_values = list(self._index)[worst]
        labels = dict(zip(found.labels[0], label_values, strict=True))
        repeat = self._last_spike is not None and 0 <= step - self._last_spike <= self.rule.cooldown
        self._last_spike = step
        return Spike(
            signal=self.rule.signal,
            key=Reading(self.rule.selection.metric, 0.0, labels).key,
            step=step,
            value=float(row[worst]),
            baseline=float(verdict.baseline[worst]),
            threshold=float(verdict.threshold[worst]),
            score=float(verdict.score[worst]),
            severity=self.rule.severity,
            summary=self.rule.summary,
            repeat=repeat,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "series": [list(key) for key in self._index],
            "state": self._state.state_dict(),
            "last_spike": self._last_spike,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        index = {tuple(key): i for i, key in enumerate(state["series"])}
        taken, last = self.rule.baseline.state(len(index)), state["last_spike"]
        taken.load_state_dict(state["state"])
        self._last_spike = None if last is None else int(last)
        self._index, self._state = index, taken

    def _accepts(self, labels: Mapping[str, str]) -> bool:
        return self.rule.selection.accepts(labels)

    def _given(self, values: Mapping[str, Measured]) -> bool:
        if self.rule.given is None:
            return True
        selection: Selection = self.rule.given.selection
        found = values.get(selection.metric)
        return found is not None and any(
            x > self.rule.given.above
            for labels, x in zip(found.labels, found.values, strict=True)
            if selection.accepts(labels)
        )

    def _row(self, chosen: Sequence[tuple[Mapping[str, str], float]]) -> Values:
        """The step's values at their series' places, NaN where one was not measured; new series get a place."""
        keys = [tuple(labels.values()) for labels, _ in chosen]
        new = [key for key in keys if key not in self._index]
        if new:
            self._index.update({key: len(self._index) + i for i, key in enumerate(new)})
            self._state.extend(len(new))
        row = np.full(len(self._index), np.nan)
        row[[self._index[key] for key in keys]] = [x for _, x in chosen]
        return row
