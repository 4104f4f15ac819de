"""Baselines: what is usual for a signal, so that "too much" needs no unit and no constant of one's own for each model.

Three kinds, one for each way in which training signals behave (docs/detection.md):

* `Envelope` for things that are honest in bursts between silences (gradient norms, loss weights, log-ratio extremes);
* `Robust` for things with one mode (layer proportions, KL, |beta|);
* `Above`, `MeanAbove` and `Below` for fractions and counts that mean something by themselves.

The settings are frozen dataclasses; `state(n)` makes the running state for n series that are judged together (all
layers, say), on numpy arrays of shape (n,). `judge` compares one step's values with what was known before the step,
then learns from them: a value is never its own baseline. NaN in the values means that a series was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Verdict:
    """One step's judgement of n series.

    Args:
        fired: (n,) bool.
        baseline: (n,) what each value was held against, NaN while warming up.
        threshold: (n,) the value beyond which it fires.
        score: (n,) value / baseline.
    """

    fired: Flags
    baseline: Values
    threshold: Values
    score: Values


class State(Protocol):
    """The running state of one rule."""

    def judge(self, values: Values) -> Verdict:
        """Judge one step's values, shape (n,), then learn from them."""

    def extend(self, n: int) -> None:
        """Make room for n further series, which begin their own warm-up."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off, for as many series; where that cannot be read it stays as it is."""


class Baseline(Protocol):
    """The settings of one kind of baseline."""

    def state(self, n: int) -> State:
        """Fresh state for n series."""


def saved(state: Mapping[str, Any], name: str, like: NDArray[Any]) -> NDArray[Any]:
    """An array of a saved state, of the shape and dtype of `like`; ValueError where it has another shape."""
    found = np.array(state[name], dtype=like.dtype)
    if found.shape != like.shape:
        raise ValueError(f"{name} has the shape {found.shape}, not {like.shape}")
    return found


@dataclass(frozen=True)
class Envelope:
    """Fires above `factor` times the largest value seen, which decays with `half_life` steps.

    A spike enters the envelope clipped at its threshold, so that it raises what is usual by one factor and no more.
    Exact zeros (all rewards of a group equal) and non-finite values are no observations. On 4,000 honest steps of GRPO
    in tests/data no norm exceeds 2 times it after the warm-up.

    Args:
        factor: of the envelope, above 1.
        half_life: steps after which the largest value counts half.
        warmup: observations before it may fire.
        floor: never fires below it, for metrics whose size means something by itself.
    """

    factor: float = 3.0
    half_life: float = 500.0
    warmup: int = 10
    floor: float = 0.0

    def state(self, n: int) -> EnvelopeState:
        return EnvelopeState(self, n)


class EnvelopeState:
    """See `Envelope`. Holds the level and the number of observations of each series."""

    def __init__(self, settings: Envelope, n: int) -> None:
        self.settings = settings
        self.level: Values = np.zeros(n)
        self.seen: Values = np.zeros(n)
        self._decay = 0.5 ** (1.0 / settings.half_life)

    def judge(self, values: Values) -> Verdict:
        observed = np.isfinite(values) & (values > 0)
        ready = (self.seen >= self.settings.warmup) & (self.level > 0)
        threshold = np.where(ready, np.maximum(self.settings.factor * self.level, self.settings.floor), np.inf)
        fired = observed & (values > threshold)
        verdict = Verdict(
            fired=fired,
            baseline=np.where(ready, self.level, np.nan),
            threshold=threshold,
            score=np.divide(values, self.level, out=np.full_like(values, np.nan), where=ready),
        )
        learned = np.maximum(self.level * self._decay, np.minimum(values, threshold))
        self.level = np.where(observed, learned, self.level)
        self.seen += observed
        return verdict

    def extend(self, n: int) -> None:
        self.level = np.append(self.level, np.zeros(n))
        self.seen = np.append(self.seen, np.zeros(n))

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level.tolist(), "seen": self.seen.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.level, self.seen = saved(state, "level", self.level), saved(state, "seen", self.seen)


@dataclass(frozen=True)
class Robust:
    """Fires where |log value - median| exceeds `mads` scaled MADs and a factor of `factor`, over the last `window`
    values.

    The scaled MAD, 1.4826 * median|log x - median|, estimates a normal distribution's standard deviation. `factor` is
    the floor: it keeps a history without variance from firing on noise. Only the upper side fires, unless `both_sides`.

    Args:
        mads: scaled MADs on the log scale.
        factor: least quotient of value and median, above 1.
        window: observations kept.
        warmup: observations before it may fire.
        both_sides: whether unusually small values fire too.
        floor: never fires below it, for metrics whose size means something by itself.
    """

    mads: float = 6.0
    factor: float = 2.0
    window: int = 128
    warmup: int = 32
    both_sides: bool = False
    floor: float = 0.0

    def state(self, n: int) -> RobustState:
        return RobustState(self, n)


class RobustState:
    """See `Robust`. Holds the last logs of each series in a ring, NaN where there is none yet."""

    def __init__(self, settings: Robust, n: int) -> None:
        self.settings = settings
        self.logs: Values = np.full((settings.window, n), np.nan)
        self.next: NDArray[np.int64] = np.zeros(n, dtype=np.int64)

    def median(self) -> Values:
        """(n,) the median of the logs; NaN where fewer than `warmup` values are known."""
        median = np.full(self.logs.shape[1], np.nan)
        ready = self.next >= self.settings.warmup
        if ready.any():
            median[ready] = _median(self.logs[:, ready])
        return median

    def scaled_mad(self, median: Values) -> Values:
        """(n,) the scaled MAD of the logs about `median`, NaN where that is NaN."""
        mad = np.full_like(median, np.nan)
        ready = ~np.isnan(median)
        if ready.any():
            mad[ready] = 1.4826 * _median(np.abs(self.logs[:, ready] - median[ready]))
        return mad

    def judge(self, values: Values) -> Verdict:
        observed = np.isfinite(values) & (values > 0)
        logs = np.log(values, out=np.full_like(values, np.nan), where=observed)
        median = self.median()
        reach = np.maximum(self.settings.mads * self.scaled_mad(median), np.log(self.settings.factor))
        away = np.abs(logs - median) if self.settings.both_sides else logs - median
        with np.errstate(invalid="ignore"):
            fired = observed & (away > reach) & (values > self.settings.floor)
        verdict = Verdict(
            fired=fired,
            baseline=np.exp(median),
            threshold=np.maximum(np.exp(median + reach), self.settings.floor),
            score=np.exp(np.abs(logs - median)),
        )
        # A spike enters clipped at its threshold, as in the envelope: it does not blind the next one, and a lasting
        # change of level becomes usual after half a window.
        clipped = np.where(fired, median + np.sign(logs - median) * reach, logs)
        for i in np.flatnonzero(observed):
            self.logs[self.next[i] % self.settings.window, i] = clipped[i]
        self.next += observed
        return verdict

    def extend(self, n: int) -> None:
        self.logs = np.hstack([self.logs, np.full((self.settings.window, n), np.nan)])
        self.next = np.append(self.next, np.zeros(n, dtype=np.int64))

    def state_dict(self) -> dict[str, Any]:
        logs = [[None if np.isnan(x) else x for x in row] for row in self.logs.tolist()]
        return {"logs": logs, "next": self.next.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.logs, self.next = saved(state, "logs", self.logs), saved(state, "next", self.next)


def _median(logs: Values) -> Values:
    """Over the first axis, NaN left out.

    nanmedian is ten times as slow, and is only needed where series differ in length.
    """
    unknown = np.isnan(logs)
    empty = unknown.all(axis=1)
    alike = bool((unknown.any(axis=1) == empty).all())
    found: Values = np.median(logs[~empty], axis=0) if alike else np.nanmedian(logs, axis=0)
    return found


@dataclass(frozen=True)
class Above:
    """Fires where a value has been above `bound` for `steps` measured steps in a row: once, until it has come back.

    Args:
        bound: in the metric's own unit.
        steps: consecutive measurements.
    """

    bound: float
    steps: int = 1

    def state(self, n: int) -> State:
        return ThresholdState(self.bound, self.steps, n, sign=1.0)


@dataclass(frozen=True)
class MeanAbove(Above):
    """Fires where the mean of the last `steps` measured values is above `bound`, and the value itself is: once, until
    the mean has come back.

    For values that swing with the age of the rollouts, such as the phantom fraction: with rollouts 0 to 3 steps old it
    was 0.11, 0.08, 0.05, 0.03, and again, so that no five steps in a row were above 0.05.
    """

    def state(self, n: int) -> MeanState:
        return MeanState(self.bound, self.steps, n)


@dataclass(frozen=True)
class Below:
    """Fires where a value has been below `bound` for `steps` measured steps in a row: once, until it has come back."""

    bound: float
    steps: int = 1

    def state(self, n: int) -> ThresholdState:
        return ThresholdState(self.bound, self.steps, n, sign=-1.0)


class MeanState:
    """See `MeanAbove`. Holds the last values of each series in a ring, NaN where there is none yet."""

    def __init__(self, bound: float, steps: int, n: int) -> None:
        self.bound = bound
        self.last: Values = np.full((steps, n), np.nan)
        self.next: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
        self.above: Flags = np.zeros(n, dtype=bool)

    def judge(self, values: Values) -> Verdict:
        for i in np.flatnonzero(~np.isnan(values)):
            self.last[self.next[i] % len(self.last), i] = values[i]
            self.next[i] += 1
        with np.errstate(invalid="ignore"):  # infinities of both signs
            above = self.last.mean(axis=0) > self.bound  # a NaN among them is above nothing: not enough values yet
        fired = above & ~self.above & (values > self.bound)
        self.above = above & (self.above | fired)
        bound = np.full_like(values, self.bound)
        score = values / self.bound if self.bound else values
        return Verdict(fired=fired, baseline=bound, threshold=bound, score=score)

    def extend(self, n: int) -> None:
        self.last = np.hstack([self.last, np.full((len(self.last), n), np.nan)])
        self.next = np.append(self.next, np.zeros(n, dtype=np.int64))
        self.above = np.append(self.above, np.zeros(n, dtype=bool))

    def state_dict(self) -> dict[str, Any]:
        last = [[None if np.isnan(x) else x for x in row] for row in self.last.tolist()]
        return {"last": last, "next": self.next.tolist(), "above": self.above.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        read = (saved(state, "last", self.last), saved(state, "next", self.next), saved(state, "above", self.above))
        self.last, self.next, self.above = read


class ThresholdState:
    """See `Above` and `Below`. Holds the length of each series' present run beyond the bound."""

    def __init__(self, bound: float, steps: int, n: int, sign: float) -> None:
        self.bound, self.steps, self.sign = bound, steps, sign
        self.run: Values = np.zeros(n)

    def judge(self, values: Values) -> Verdict:
        measured = ~np.isnan(values)
        beyond = measured & (self.sign * values > self.sign * self.bound)
        self.run = np.where(measured, np.where(beyond, self.run + 1, 0), self.run)
        bound = np.full_like(values, self.bound)
        score = values / self.bound if self.bound else values
        return Verdict(fired=measured & (self.run == self.steps), baseline=bound, threshold=bound, score=score)

    def extend(self, n: int) -> None:
        self.run = np.append(self.run, np.zeros(n))

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.run = saved(state, "run", self.run)
