"""The worker's part of a step: payload in, rows and events out. Runs on the hub's thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from seismograd.collectors.clipping import clip_readings
from seismograd.collectors.effective import effective_sample_readings
from seismograd.collectors.effects import control_readings, what_if_readings
from seismograd.collectors.gradients import layer_proportions, proportion_readings
from seismograd.collectors.payload import Gradients, LogPayload, Probed, StepPayload
from seismograd.collectors.ratio import (
    alpha_beta_readings,
    log_ratio_readings,
    loss_weight_readings,
    nonfinite_counts,
)
from seismograd.collectors.sequences import sequence_readings
from seismograd.collectors.surrogate import surrogate_readings
from seismograd.collectors.table import TokenTable
from seismograd.telemetry.baselines import Robust, RobustState
from seismograd.telemetry.detector import Detector, measured
from seismograd.telemetry.faults import Faults, warn
from seismograd.telemetry.incidents import VERDICTS, Explained
from seismograd.telemetry.records import ClipSpec, Event, Reading, Row, Spike

# What each part of the token signals is called where it fails, and the function that computes it.
_TOKEN_PARTS: tuple[tuple[str, Callable[[TokenTable, Sequence[ClipSpec]], list[Reading]]], ...] = (
    ("ratio", lambda table, _: alpha_beta_readings(table)),
    ("log_ratio", lambda table, _: log_ratio_readings(table)),
    ("effective_sample", lambda table, _: effective_sample_readings(table)),
    ("sequences", sequence_readings),
    ("clipping", clip_readings),
    ("surrogate", surrogate_readings),
    ("loss_weight", lambda table, _: loss_weight_readings(table)),
    ("what_if", lambda table, _: what_if_readings(table)),
)


class SignalWorker:
    """Computes a run's readings and keeps what lasts from step to step: counters and the worker's detector.

    Args:
        detector: judges the rules of kind "worker".
        signals: every signal name of the rule table; each is exposed from 0, so that Prometheus sees its first spike.
        faults: fences each part, and is exposed.
        cpu_seconds: thread seconds used so far by the worker and by each sink.
        dropped: readings dropped so far.
        incidents: writes an incident's files and gives back its path; None where nothing is written.
    """

    def __init__(
        self,
        detector: Detector,
        signals: Sequence[str],
        faults: Faults,
        cpu_seconds: Callable[[], Mapping[str, float]],
        dropped: Callable[[], int],
        incidents: Callable[[Explained], str] | None = None,
    ) -> None:
        self._detector, self._faults = detector, faults
        self._cpu_seconds, self._dropped, self._write_incident = cpu_seconds, dropped, incidents
        self._signals = tuple(signals)
        self._begin()
        self._used: Mapping[str, float] = {}
        self._parts: tuple[str, ...] = ()
        self._hook_total = self._step_total = 0.0
        self._lock = threading.Lock()

    def _begin(self) -> None:
        self._incidents = Counter(dict.fromkeys(VERDICTS, 0))
        self._spikes = Counter(dict.fromkeys(self._signals, 0))
        self._nonfinite: Counter[str] = Counter({"gradient": 0})
        self._zero_steps = 0
        self._usual = _UsualProportions()

    def reset(self) -> None:
        """Begin anew."""
        with self._lock:
            self._detector.reset()
            self._begin()

    def process(self, payload: Any) -> tuple[list[Row], list[Event]]:
        """The rows and events of one payload."""
        with self._lock:
            if isinstance(payload, StepPayload):
                return self._step(payload)
            if isinstance(payload, Probed):
                return self._probed([payload], time.time()), []
            assert isinstance(payload, LogPayload)
            return _logged(payload), []

    def state_dict(self) -> dict[str, Any]:
        """Detection state and counters, JSON-serialisable; callable from any thread."""
        with self._lock:
            return {
                "detector": self._detector.state_dict(),
                "usual_proportions": self._usual.state_dict(),
                "spikes": dict(self._spikes),
                "nonfinite": dict(self._nonfinite),
                "zero_steps": self._zero_steps,
                "incidents": dict(self._incidents),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off; where that cannot be read everything stays as it is."""
        counted = [{k: int(n) for k, n in state[name].items()} for name in ("spikes", "nonfinite", "incidents")]
        zero_steps, usual = int(state["zero_steps"]), _UsualProportions()
        usual.load_state_dict(state["usual_proportions"])
        with self._lock:
            self._detector.load_state_dict(state["detector"])
            self._spikes = Counter({**self._spikes, **counted[0]})
            self._nonfinite = Counter({**self._nonfinite, **counted[1]})
            self._incidents = Counter({**self._incidents, **counted[2]})
            self._zero_steps, self._usual = zero_steps, usual

    def _step(self, payload: StepPayload) -> tuple[list[Row], list[Event]]:
        readings: list[Reading] = []
        if payload.tokens is not None:
            for part, compute in _TOKEN_PARTS:
                if part == "what_if" and not payload.looks_at_ratios:
                    continue
                if self._faults.working(part):
                    with self._faults.fence(part):
                        readings += compute(payload.tokens, payload.clips)
            with self._faults.fence("nonfinite"):
                self._nonfinite.update(nonfinite_counts(payload.tokens))
        if payload.gradients is not None:
            with self._faults.fence("gradients"):
                readings += self._gradients(payload.gradients, payload.overflow_expected)
        spikes = list(payload.spikes)
        if self._faults.working("detect_worker"):
            with self._faults.fence("detect_worker"):
                spikes += self._detector.judge(payload.step, measured(readings))
        self._spikes.update(spike.signal for spike in spikes)
        events = [_announced(spike) for spike in spikes]
        if payload.explained is not None:
            with self._faults.fence("incident"):
                readings += self._incident(payload.explained, events)
        with self._faults.fence("control_readings"):
            readings += control_readings(payload)
        readings += [*self._counters(), *self._own_cost(payload)]
        row = Row(payload.step, payload.ended, tuple(readings))
        return [*self._probed(payload.probed, payload.ended), row], events

    def _probed(self, found: Sequence[Probed], at: float) -> list[Row]:
        """A row for each result, of the step that it was measured at."""
        rows = []
        for probed in found:
            with self._faults.fence(f"read_{probed.probe}"):
                readings = tuple(probed.read(probed.values))
                rows += [Row(probed.step, at, readings)] if readings else []
        return rows

    def _incident(self, explained: Explained, events: list[Event]) -> list[Reading]:
        incident = explained.incident
        self._incidents[incident.verdict] += 1
        path = None if self._write_incident is None else self._write_incident(explained)
        where = "" if path is None else f" ({path})"
        events.append(
            Event("incident", f"{incident.headline()}{where}", incident.step, data={"path": path, **incident.summary()})
        )
        if incident.spike is not None:
            warn(events[-1].message)
        found = [Reading("gradloc_seconds", incident.seconds)]
        if incident.completeness is not None:
            found.append(Reading("gradloc_completeness_ratio", incident.completeness))
        return found

    def _gradients(self, gradients: Gradients, overflow_expected: bool) -> list[Reading]:
        series = gradients.grouping.series
        readings = [
            Reading("grad_norm", float(norm), {"layer": layer, "group": group})
            for (layer, group), norm in zip(series, gradients.norms, strict=True)
        ]
        self._nonfinite["gradient_overflow" if overflow_expected else "gradient"] += gradients.nonfinite
        self._zero_steps += gradients.total == 0
        layers = gradients.grouping.layers
        proportions = layer_proportions(gradients.norms[1 : 1 + len(layers)])
        readings += proportion_readings(layers, proportions)
        heterogeneity = self._usual.largest(layers, proportions)
        if heterogeneity is not None:
            readings.append(Reading("heterogeneity", heterogeneity))
        return readings

    def _counters(self) -> list[Reading]:
        return [
            *(Reading("spikes_total", n, {"signal": signal}) for signal, n in self._spikes.items()),
            *(Reading("nonfinite_total", n, {"where": where}) for where, n in self._nonfinite.items()),
            *(Reading("incidents_total", n, {"verdict": verdict}) for verdict, n in self._incidents.items()),
            Reading("zero_gradient_steps_total", self._zero_steps),
            *(Reading("faults_total", n, {"part": part}) for part, n in self._faults.counts().items()),
            Reading("dropped_readings_total", self._dropped()),
        ]

    def _own_cost(self, payload: StepPayload) -> list[Reading]:
        used = self._cpu_seconds()
        since = {part: seconds - self._used.get(part, 0.0) for part, seconds in used.items()}
        self._used = used
        parts = {**dict.fromkeys(self._parts, 0.0), **payload.hook_seconds, **since}
        self._parts = tuple(parts)  # a part that did not run took no time, and its last time is not to go on showing
        self._hook_total += sum(parts.values())
        self._step_total += payload.seconds
        return [
            *(Reading("hook_seconds", seconds, {"part": part}) for part, seconds in parts.items()),
            Reading("overhead_ratio", self._hook_total / self._step_total if self._step_total else 0.0),
            *(Reading("probe_age_steps", age, {"probe": probe}) for probe, age in payload.probe_ages.items()),
            *(Reading("probe_spacing_steps", k, {"probe": probe}) for probe, k in payload.probe_spacings.items()),
            Reading("step", payload.step),
            Reading("step_seconds", payload.seconds),
            Reading("last_step_timestamp_seconds", payload.ended),
        ]


class _UsualProportions:
    """Each layer's running median proportion, which heterogeneity is measured against."""

    def __init__(self) -> None:
        self._layers: tuple[str, ...] = ()
        self._state = RobustState(Robust(warmup=8), 0)

    def state_dict(self) -> dict[str, Any]:
        return {"layers": list(self._layers), "state": self._state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._layers = tuple(state["layers"])
        self._state = RobustState(self._state.settings, len(self._layers))
        self._state.load_state_dict(state["state"])

    def largest(self, layers: tuple[str, ...], proportions: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
        """The largest proportion over its own usual value, before learning from it; None while warming up."""
        if layers != self._layers:
            self._layers, self._state = layers, RobustState(self._state.settings, len(layers))
        quotients = proportions / np.exp(self._state.median())
        self._state.judge(proportions)
        known = quotients[np.isfinite(quotients)]
        return float(known.max()) if known.size else None


def _logged(payload: LogPayload) -> list[Row]:
    numbers = [(k, x) for k, x in payload.values.items() if isinstance(x, (int, float)) and not isinstance(x, bool)]
    readings = tuple(Reading("trainer_metric", float(x), {"name": name}) for name, x in numbers)
    return [Row(payload.step, time.time(), readings)] if readings else []


def _announced(spike: Spike) -> Event:
    event = Event.of(spike)
    if not spike.repeat:
        warn(event.message)
    return event
