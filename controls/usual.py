"""What is usual for a layer's gradient norm in a step: the two references of LayerClip.

    peers    level_l = usual(rho_l) * reference        the other layers of the same step
    history  level_l = envelope_l                      the layer's own norms of the steps before

Peers: rho_l is the layer's norm over the median of all layers' norms in its step, usual(rho_l) its median over the last
steps. The reference of a step is taken over the layers, each divided by its usual proportion, with the upper 40%
trimmed away: the median of what is left. So a burst of the whole model raises the reference with the layers, and up to
40% of the layers may be out of proportion at once without moving it. A proportion may drift by a factor of four within
the window while the model learns fast: so a layer has also to leap, to twice its largest proportion of the last 16
steps, those aside at which it was beyond its threshold. And where many layers vanish, the others are large only beside
them: so a layer's own norm has to leap too, to twice its median of those steps.

History is the literal reading of "a threshold a layer from that layer's history": the largest norm seen, decaying
(`seismograd.telemetry.baselines.Envelope`). It cannot tell a layer's explosion from a burst of the whole model. An
explosion enters it a little above the level, not at the threshold: at the threshold, four of them would make a
hundredfold norm usual. So a lasting change is usual after some 16 steps for each doubling, about when peers takes it
for that. What is learnt in the warm-up is bounded by its median.

Both work on numpy arrays of shape (U,), one entry a layer (or module group), on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from seismograd.telemetry.baselines import Envelope, Flags, Robust, RobustState, Values

_REFRESH = 8  # steps between two looks at the medians, which move slowly
FEWEST = 3  # layers that a proportion can be taken over
_RECENT = 16  # steps within which an honest layer's proportion does not leap
_LEAP = np.log(2.0)  # least log-quotient of an exploded layer's proportion and its largest one in them; honest: 1.8
_RISE = 2 ** (1 / 16)  # what an explosion may add to a layer's history


class Reference(Protocol):
    """What is usual for each unit. Units are columns; `extend` makes room for further ones."""

    def judge(self, norms: Values) -> tuple[Values, Values]:
        """(level, threshold) of this step, each (U,), NaN where nothing is usual yet. Learns nothing."""

    def learn(self, norms: Values, beyond: Flags) -> None:
        """Take this step's norms in, those `beyond` their threshold clipped at it. NaN was not measured."""

    def extend(self, n: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], columns: Sequence[int]) -> None:
        """Take up the columns of a saved state, in this order; where it cannot be read everything stays as it is."""


@dataclass(frozen=True)
class PeersSettings:
    """Args:
    factor: least quotient of a norm and its level at which the layer is out of proportion.
    mads: and as many scaled MADs of log rho_l, for layers whose proportion is restless.
    window: steps that the medians are taken over.
    warmup: steps that have to be known of a layer before it may be clipped.
    trim: upper part of the layers that the reference leaves out.
    """

    factor: float
    mads: float
    window: int
    warmup: int
    trim: float


class Peers:
    """See the module's docstring."""

    def __init__(self, settings: PeersSettings) -> None:
        self._settings = settings
        self._rho = RobustState(Robust(window=settings.window, warmup=settings.warmup), 0)
        self._median: Values = np.zeros(0)
        self._reach: Values = np.zeros(0)
        self._recent: Values = np.zeros((_RECENT, 0))
        self._own: Values = np.zeros((_RECENT, 0))
        self._leapt: Flags = np.zeros(0, dtype=np.bool_)  # in the step that was judged last, beside the others
        self._since = 0

    def judge(self, norms: Values) -> tuple[Values, Values]:
        self._leapt = np.zeros(len(norms), dtype=np.bool_)
        usable = np.isfinite(norms) & (norms > 0) & np.isfinite(self._median)
        unknown = np.full_like(norms, np.nan)
        if usable.sum() < FEWEST:
            return unknown, unknown
        # The median of what is left when the upper part is gone is a lower quantile of all.
        left = np.log(norms[usable]) - self._median[usable]
        reference = _quantile(left, (1 - self._settings.trim) / 2)
        level = np.exp(self._median + reference)
        leap = self._recent.max(axis=0) + _LEAP - self._median
        threshold = level * np.exp(np.maximum(self._reach, leap))
        with np.errstate(invalid="ignore"):
            self._leapt = norms > threshold
        for i in np.flatnonzero(self._leapt):
            own = self._own[np.isfinite(self._own[:, i]), i]
            if len(own):
                threshold[i] = max(threshold[i], float(np.exp(np.median(own) + _LEAP)))
        return level, threshold

    def learn(self, norms: Values, beyond: Flags) -> None:
        usable = np.isfinite(norms) & (norms > 0)
        if usable.sum() < FEWEST:
            return
        logs = np.log(norms, out=np.full_like(norms, np.nan), where=usable)
        rho = logs - _quantile(logs[usable], 0.5)
        columns = np.flatnonzero(usable)
        self._rho.logs[self._rho.next[columns] % self._settings.window, columns] = rho[columns]
        self._rho.next[columns] += 1
        # Nothing is beyond a threshold while warming up: what is seen then may be an explosion too.
        honest = usable & ~beyond & np.isfinite(self._median)
        self._recent = np.vstack([self._recent[1:], np.where(honest & ~self._leapt, rho, -np.inf)])
        self._own = np.where(honest, np.vstack([self._own[1:], logs]), self._own)
        self._since += 1
        starting = (self._rho.next[columns] <= 2 * self._settings.warmup).any()
        if starting or self._since >= _REFRESH:
            self._refresh()

    def extend(self, n: int) -> None:
        self._rho.extend(n)
        unknown = np.full(n, np.nan)
        self._median, self._reach = np.append(self._median, unknown), np.append(self._reach, unknown)
        self._recent = np.hstack([self._recent, np.full((_RECENT, n), -np.inf)])
        self._own = np.hstack([self._own, np.full((_RECENT, n), np.nan)])

    def state_dict(self) -> dict[str, Any]:
        return {**self._rho.state_dict(), "recent": _told(self._recent), "own": _told(self._own)}

    def load_state_dict(self, state: Mapping[str, Any], columns: Sequence[int]) -> None:
        logs, recent, own = (_columns(state[name], columns) for name in ("logs", "recent", "own"))
        rho = RobustState(self._rho.settings, len(columns))
        seen = _entries(state["next"], columns).astype(np.int64)
        if len(logs) == len(rho.logs):  # another window begins anew
            rho.logs, rho.next = logs, seen
        if not len(recent) == len(own) == _RECENT:
            raise ValueError(f"{len(recent)} and {len(own)} recent steps, not {_RECENT}")
        self._rho, self._recent, self._own = rho, np.where(np.isnan(recent), -np.inf, recent), own
        self._refresh()

    def _refresh(self) -> None:
        self._since = 0
        self._median = self._rho.median()
        spread = self._settings.mads * self._rho.scaled_mad(self._median)
        self._reach = np.maximum(spread, np.log(self._settings.factor))


class History:
    """See the module's docstring."""

    def __init__(self, envelope: Envelope) -> None:
        self._settings = envelope
        self._state = envelope.state(0)
        self._first: Values = np.zeros((envelope.warmup, 0))

    def judge(self, norms: Values) -> tuple[Values, Values]:
        ready = (self._state.seen >= self._settings.warmup) & (self._state.level > 0)
        level = np.where(ready, self._state.level, np.nan)
        return level, self._settings.factor * level

    def learn(self, norms: Values, beyond: Flags) -> None:
        observed = np.isfinite(norms) & (norms > 0)
        for i in np.flatnonzero(observed & (self._state.seen < self._settings.warmup)):
            self._first[int(self._state.seen[i]), i] = norms[i]
        self._state.judge(np.where(beyond, _RISE * self._state.level, norms))
        for i in np.flatnonzero(observed & (self._state.seen == self._settings.warmup)):
            most = self._settings.factor * np.median(self._first[:, i])  # an explosion in the warm-up is none to come
            self._state.level[i] = min(self._state.level[i], most)

    def extend(self, n: int) -> None:
        self._state.extend(n)
        self._first = np.hstack([self._first, np.full((len(self._first), n), np.nan)])

    def state_dict(self) -> dict[str, Any]:
        return {**self._state.state_dict(), "first": _told(self._first)}

    def load_state_dict(self, state: Mapping[str, Any], columns: Sequence[int]) -> None:
        first, taken = _columns(state["first"], columns), self._settings.state(len(columns))
        level, seen = (_entries(state[name], columns) for name in ("level", "seen"))
        if len(first) == len(self._first):
            taken.level, taken.seen = level, seen
        else:  # another warm-up begins anew
            first = np.full((len(self._first), len(columns)), np.nan)
        self._state, self._first = taken, first


def _columns(rows: Any, columns: Sequence[int]) -> Values:
    """(R, U) the columns of saved rows, NaN where they hold None."""
    found: Values = np.array(rows, dtype=np.float64)
    if found.ndim != 2:
        raise ValueError(f"{found.ndim} dimensions, not 2")
    return found[:, list(columns)]


def _entries(row: Any, columns: Sequence[int]) -> Values:
    """(U,) the entries of a saved row."""
    found: Values = np.array(row, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ValueError("not one finite number a column")
    return found[list(columns)]


def _told(rows: Values) -> list[list[float | None]]:
    """JSON-serialisable: None where there is no finite number."""
    return [[x if np.isfinite(x) else None for x in row] for row in rows.tolist()]


def _quantile(values: Values, q: float) -> float:
    """As ``np.quantile``, in a tenth of its time where the values are few."""
    ordered = np.sort(values)
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
