"""Attribution: each token's share of the step's gradient norm, for two forwards, whatever the number of tokens.

With G the step's gradient, sum_t w_t grad logp_t = G where w_t = dL/dlogp_t, so the shares

    c_t = w_t * (d logp_t / d theta) . G / |G|

add up to |G| over all tokens of all ranks. The directional derivative comes from the forwards at theta +- distance * G:
central differences, with an error of the second order. Whether the distance was right shows in the sum: completeness =
sum of c_t / |G|, which has to be 1. Too large a distance leaves the linear regime, and too small a one drowns in
rounding; the ladder goes the way that the curvature says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from seismograd.gradloc.replay import LOGP, Replay
from seismograd.gradloc.sameness import another_forward, most_off, nats_off
from seismograd.gradloc.tokens import Floats, Tokens
from seismograd.telemetry.incidents import Attempt
from seismograd.telemetry.ranks import Ranks, everywhere
from seismograd.telemetry.records import TokenBatch

MOST = 1.2  # of |G| that what is replayed can make: the rest, pulling the other way, is seldom so large
TOLERANCE = 0.05  # of completeness
_FIRST = 0.1  # nats that the heaviest token's logp moves by, if the gradient is all its own
_ATTEMPTS = 4
_CURVED = 0.05  # second difference over first: above, the distance left the linear regime


@dataclass(frozen=True)
class Shares:
    """What an attribution found, in units of |G|.

    Args:
        tokens: (N,) share of each of this rank's tokens; NaN where its replay was not finite.
        parts: sum over all ranks of the tokens' shares ("tokens"), and of the outputs beside logp, by name.
        replayed: what they should add up to: 1, less the part of G that passes through no replayed output.
    """

    tokens: Floats
    parts: dict[str, float] = field(default_factory=dict)
    replayed: float = 1.0

    @property
    def completeness(self) -> float:
        """The sum of all parts over what it should be."""
        return sum(self.parts.values()) / self.replayed

    @property
    def believable(self) -> bool:
        return self.replayed > TOLERANCE and abs(self.completeness - 1) <= TOLERANCE

    @property
    def outcome(self) -> str:
        """For `Attempt`."""
        return "believed" if self.believable else f"the shares add up to {self.completeness:.3f}, not to 1"

    @property
    def named(self) -> dict[str, float]:
        """All parts of |G|, with what is not replayed."""
        rest = 1 - self.replayed
        return {**self.parts, "not replayed": rest} if abs(rest) > TOLERANCE else dict(self.parts)


@dataclass(frozen=True)
class Step:
    """What every method gets.

    Args:
        batches: this rank's micro-batches.
        tokens: of them.
        norm: |G|, the same on all ranks.
        scale: G = scale * (sum over all ranks' tokens of weight * grad logp): 1 / world size where gradients are
            averaged.
        ranks: the processes that share the step.
        told: whether an attempt's outcome may quote what an exception says.
    """

    batches: Sequence[TokenBatch]
    tokens: Tokens
    norm: float
    scale: float
    ranks: Ranks
    told: bool = True

    def everywhere(self, attempt: Callable[[], Any]) -> tuple[Any, str | None]:
        """See `seismograd.telemetry.ranks.everywhere`."""
        return everywhere(self.ranks, attempt, self.told)

    @property
    def others(self) -> list[str]:
        """Names of the outputs beside logp that have a weight in this rank's loss."""
        return list(dict.fromkeys(name for batch in self.batches for name in batch.others))


class ForeignGradient(Exception):
    """The gradient at hand is not what the recorded weights make: it was clipped, scaled or averaged since. All ranks
    raise it together.
    """

    def __init__(self, replayed: float, attempts: Sequence[Attempt]) -> None:
        super().__init__(
            f"the tokens' gradients make {replayed:.3g} times the step's: it was changed after the backward (a clip, a "
            "scale, an average that grad_scale does not say)"
        )
        self.attempts = list(attempts)


def attribute(step: Step, replay: Replay) -> tuple[Shares | None, list[Attempt]]:
    """The shares by two moved forwards, and what was tried for them: None where no distance gave a sum of 1."""
    attempts: list[Attempt] = []
    heaviest = step.ranks.max(float(np.abs(step.tokens.weight).max(initial=0.0)))
    if not (heaviest > 0 and np.isfinite(heaviest)):
        return None, [Attempt("attribution", "no token has a finite weight in the loss")]
    bound = most_off(replay)
    replayed: float | None = None
    distance, tried, before = _FIRST * heaviest * step.scale / step.norm, set[float](), math.inf
    for _ in range(_ATTEMPTS):
        tried.add(distance)
        found, reason = step.everywhere(lambda d=distance: _difference(step, replay, d))  # type: ignore[misc]
        if reason is not None:
            return None, [*attempts, Attempt("attribution", reason, forwards=2.0)]
        shares, curved, mismatch = found
        shares, curved, mismatch = summed(step, shares), step.ranks.max(curved), step.ranks.max(mismatch)
        detail = f"moved by {distance:.1e} * G / |G|"
        # Curvature goes with the square of the distance; what stays is not the forward that was recorded.
        if mismatch > bound and (curved <= _CURVED or mismatch > 0.5 * before):
            outcome = another_forward(mismatch)
            return None, [*attempts, Attempt("attribution", outcome, shares.completeness, 2.0, 0.0, detail)]
        if not replay.precise:
            curved = 0.0  # the recorded logp was rounded, and is not the middle that curvature is measured from
        # Rounding may be to blame as well: a pass of its own is spent only where another distance has not helped.
        if not shares.believable and curved <= _CURVED and replayed is None and len(tried) > 1:
            replayed, attempt = replayed_part(step, replay)
            attempts.append(attempt)
        if replayed is not None and replayed > MOST:
            raise ForeignGradient(replayed, attempts)
        shares = replace(shares, replayed=replayed or 1.0)
        attempts.append(Attempt("attribution", shares.outcome, shares.completeness, forwards=2.0, detail=detail))
        if shares.believable:
            return shares, attempts
        distance, before = _next(distance, tried, curved), mismatch
    return None, attempts


def replayed_part(step: Step, replay: Replay) -> tuple[float | None, Attempt]:
    """How much of |G| passes through the replayed outputs: (their whole gradient) . G / |G|^2, by one pass of its own.

    The rest comes from terms of the loss that use the model in other ways: a value head, a regulariser.
    """
    found, reason = step.everywhere(lambda: _along_replayed(step, replay))
    if reason is not None:
        return None, Attempt("whole gradient", reason, None, 1.0, 1.0)
    part = (found if replay.joint else step.ranks.sum([found])[0]) / step.norm
    return part, Attempt("whole gradient", f"{part:.3f} of |G| is replayed", None, 1.0, 1.0)


def _along_replayed(step: Step, replay: Replay) -> float:
    found = 0.0
    for i in range(replay.rounds):
        batch = step.batches[min(i, len(step.batches) - 1)]
        weights = {LOGP: step.tokens.weights(i, batch.logp), **(batch.others if i < len(step.batches) else {})}
        scaled = {name: w * step.scale for name, w in weights.items()}
        ((_, gradient),) = replay.backward(i, [scaled])
        found += replay.along(gradient, step.norm)
        del gradient  # before the next one
    return found


def _difference(step: Step, replay: Replay, distance: float) -> tuple[Shares, float, float]:
    """Of one distance: this rank's shares, how curved logp is over it (second difference over first), and the median
    distance of the forwards' middle from the recorded logp, nats.
    """
    sides = []
    with replay.movable() as move:
        for sign in (1.0, -1.0):
            # `move` sets theta + d * G, and the distance is in units of G/|G|.
            move(sign * distance / step.norm)
            sides.append(_outputs(step, replay))
    (ahead, ahead_others), (behind, behind_others) = sides
    derivative = (ahead - behind) / (2 * distance)
    weight = step.tokens.weight
    c = np.where(weight == 0, 0.0, step.scale * weight * derivative)
    parts = {
        name: step.scale * (ahead_others[name] - behind_others[name]) / (2 * distance) / step.norm
        for name in ahead_others
    }
    bend = np.abs(weight * (ahead + behind - 2 * step.tokens.logp)).sum()
    slope = np.abs(weight * (ahead - behind)).sum()
    mismatch = nats_off((ahead + behind) / 2, step.tokens.logp, weight)  # of the middle of the two
    return Shares(c / step.norm, parts), float(bend / slope) if slope > 0 else 0.0, mismatch


@torch.no_grad()
def _outputs(step: Step, replay: Replay) -> tuple[Floats, dict[str, float]]:
    """(N,) logp of the tokens, and the weighted sum of each other output, at the present parameters."""
    logp = []
    others = dict.fromkeys(step.others, 0.0)
    for i in range(replay.rounds):
        outputs = replay.forward(i)
        if i >= len(step.batches):
            continue
        logp.append(step.tokens.pick(i, outputs[LOGP]))
        for name, weight in step.batches[i].others.items():
            others[name] += float((weight.double().cpu() * outputs[name].detach().double().cpu()).sum())
    return np.concatenate(logp) if logp else np.empty(0), others


def summed(step: Step, shares: Shares) -> Shares:
    """The parts, summed over all ranks. A step's ranks have the same kinds of outputs."""
    names = [*shares.parts]
    sums = step.ranks.sum([float(np.nansum(shares.tokens)), *(shares.parts[name] for name in names)])
    return Shares(shares.tokens, dict(zip(["tokens", *names], sums, strict=True)))


def _next(distance: float, tried: set[float], curved: float) -> float:
    """Down the ladder where logp was curved over the distance, up it where rounding is to blame."""
    for factor in (0.1, 10.0) if curved > _CURVED else (10.0, 0.1):
        further = distance * factor
        while any(abs(further / t - 1) < 1e-6 for t in tried):
            further *= factor
        if 1e-6 < further / min(tried) < 1e6:
            return further
    return distance
