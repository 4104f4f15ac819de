"""Bisection: the published GradLoc, and the fallback where no replay can be differentiated or moved.

A probe is a forward and a backward of the loss with only some tokens in it; the gradient norm that is left says where
the spike is. The search goes from the micro-batch to the rank to the segment of tokens, always into the half with the
larger norm, and comes back to the other one as long as the budget of passes lasts.

Thresholds adapt to how many tokens are aggregated (Tencent-Hunyuan/GradLoc): with T the norm that counts as a spike for
one token, N tokens in the step, M micro-batches and L tokens in a segment,

    tau_micro_batch = T sqrt(M / N)    tau_segment = T / sqrt(L)

The published procedure lets one rank search while the others idle, keeps only the micro-batch with the largest norm,
divides a segment's loss by its own length, and takes a NaN for no spike. Each of these is a switch of `Bisection`, so
that it can be measured as published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from seismograd.gradloc.attribution import Shares, Step
from seismograd.gradloc.replay import LOGP, Replay
from seismograd.gradloc.sameness import another_forward, most_off, nats_off
from seismograd.gradloc.tokens import Ints
from seismograd.gradloc.vectors import Gradient, root
from seismograd.telemetry.incidents import Attempt


@dataclass(frozen=True)
class Bisection:
    """How the search goes.

    Args:
        budget: probes that each rank may spend; a probe is a forward and a backward of one micro-batch.
        found: tokens after which the search ends.
        spike: share of |G| above which a micro-batch is searched; it sets T = spike * |G| * sqrt(N / M).
        every_rank: each rank searches its own tokens; published: only the one with the largest norm does.
        every_micro_batch: all micro-batches above the threshold are searched; published: only the largest.
        renormalise: a segment's loss is divided by its own length rather than by the step's; published: yes.
        nan_is_spike: a norm that is not finite is followed first; published: no.

    Raises:
        ValueError: a setting that cannot be.
    """

    budget: int = 128
    found: int = 8
    spike: float = 0.1
    every_rank: bool = True
    every_micro_batch: bool = True
    renormalise: bool = False
    nan_is_spike: bool = True

    def __post_init__(self) -> None:
        for name in ("budget", "found", "spike"):
            value = getattr(self, name)
            if not (0 < value < math.inf and (name == "spike" or value == int(value))):
                raise ValueError(
                    f"bisection.{name}={value!r}: give a {'' if name == 'spike' else 'whole '}number above 0"
                )

    @classmethod
    def published(cls, budget: int = 128) -> Bisection:
        """As Tencent-Hunyuan/GradLoc does it."""
        return cls(budget, every_rank=False, every_micro_batch=False, renormalise=True, nan_is_spike=False)


@dataclass(frozen=True)
class _Segment:
    """Tokens of one micro-batch, still to be searched."""

    norm: float
    tokens: Ints


def bisect(step: Step, replay: Replay, how: Bisection | None = None) -> tuple[Shares | None, list[Attempt]]:
    """The norms of the tokens that the search came down to, as shares of |G|; zero for the others.

    A share here is the token's own norm over |G|: without its sign, and not part of a sum of 1.
    """
    if replay.joint:
        return None, [Attempt("bisect", "the parameters are sharded, and ranks cannot search on their own")]
    how = how or Bisection()
    search = _Search(step, replay, how)
    found, reason = step.everywhere(search.run)
    spent = search.probes / max(1, len(step.batches))
    mismatch, cut = step.ranks.max(search.mismatch), step.ranks.max(float(search.cut_short))
    if reason is None and mismatch > most_off(replay):
        reason = another_forward(mismatch)
    if reason is None and cut and not sum(step.ranks.sum([float(len(found))])):
        reason = f"the budget of {how.budget} probes ended before a token was found"
    detail = f"{search.probes} probes on rank {step.ranks.rank}"
    if reason is not None:
        return None, [Attempt("bisect", reason, forwards=spent, backwards=spent, detail=detail)]
    shares = np.zeros(len(step.tokens))
    for token, norm in found.items():
        shares[token] = norm / step.norm if math.isfinite(step.norm) and step.norm > 0 else norm
    short = ", cut short by the budget" if cut else ""
    detail += f", {len(found)} tokens found{short}"
    attempt = Attempt("bisect", "believed", forwards=spent, backwards=spent, detail=detail)
    return Shares(shares), [attempt]


class _Search:
    """One rank's search."""

    def __init__(self, step: Step, replay: Replay, how: Bisection) -> None:
        self._step, self._replay, self._how = step, replay, how
        self.probes = 0
        self.mismatch = 0.0  # nats, see `nats_off`, of the micro-batch that is furthest off
        self.cut_short = False
        self._total, self._micro_batches = step.ranks.sum([float(len(step.tokens)), float(len(step.batches))])
        # The same share of |G| at the micro-batch level, whatever the sizes.
        self._spike = how.spike * step.norm * math.sqrt(max(1.0, self._total) / max(1.0, self._micro_batches))

    def run(self) -> dict[int, float]:
        """Index of each token found to its own gradient norm."""
        segments = self._micro_batch_level()
        if self._how.every_rank or self._step.ranks.size == 1:
            return self._token_level(segments)
        guilty = self._rank_level(segments)
        return self._token_level(segments) if guilty == self._step.ranks.rank else {}  # as published, the others wait

    def _micro_batch_level(self) -> list[_Segment]:
        """A probe of each micro-batch whole; those worth searching, the worst last."""
        found = []
        for i in range(len(self._step.batches)):
            tokens = self._weighty(i)
            if len(tokens) == 0:
                continue
            if self._spent(1):
                break
            found.append(self._segment(tokens))
        found.sort(key=self._order)
        if not self._how.every_micro_batch:
            return found[-1:]
        return [segment for segment in found if self._follows(segment, math.sqrt(self._micro_batches / self._total))]

    def _rank_level(self, segments: list[_Segment]) -> int:
        """The published bisection of the ranks: two probes a level, in which the ranks not asked give zeros."""
        low, high = 0, self._step.ranks.size
        while high - low > 1:
            middle = (low + high) // 2
            first, second = (self._joint_norm(segments, a, b) for a, b in ((low, middle), (middle, high)))
            low, high = (low, middle) if first >= second else (middle, high)
        return low

    def _joint_norm(self, segments: list[_Segment], low: int, high: int) -> float:
        asked = low <= self._step.ranks.rank < high and bool(segments)
        gradient = self._gradient(segments[-1].tokens) if asked else [None] * len(self._replay.parameters)
        dense = [
            torch.zeros_like(p) if g is None else g for p, g in zip(self._replay.parameters, gradient, strict=True)
        ]
        self._step.ranks.add(dense)
        return root(self._replay.norms(dense))

    def _token_level(self, stack: list[_Segment]) -> dict[int, float]:
        """Depth first, the larger half first; the others stay on the stack to come back to."""
        found: dict[int, float] = {}
        while stack and len(found) < self._how.found:
            segment = stack.pop()
            if len(segment.tokens) == 1:
                found[int(segment.tokens[0])] = segment.norm / (self._total if self._how.renormalise else 1.0)
                continue
            if self._spent(2):
                break
            halves = [self._segment(half) for half in np.array_split(segment.tokens, 2)]
            halves.sort(key=self._order)
            stack += [half for half in halves if self._follows(half, 1 / math.sqrt(len(half.tokens)))]
        return found

    def _spent(self, probes: int) -> bool:
        """Whether the budget does not hold so many more."""
        self.cut_short = self.probes + probes > self._how.budget
        return self.cut_short

    def _segment(self, tokens: Ints) -> _Segment:
        norm = root(self._replay.norms(self._gradient(tokens)))
        if math.isfinite(self._step.norm) and not math.isfinite(norm):
            self.mismatch = math.inf  # no part of a finite gradient is NaN
        return _Segment(norm, tokens)

    def _gradient(self, tokens: Ints) -> Gradient:
        """The gradient of these tokens alone; they are of one micro-batch."""
        self.probes += 1
        step, i = self._step, int(self._step.tokens.batch[tokens[0]])
        weight = step.tokens.weights(i, step.batches[i].logp, tokens) * step.scale
        if self._how.renormalise:
            weight = weight * (self._total / len(tokens))
        ((logp, gradient),) = self._replay.backward(i, [{LOGP: weight}])
        mine = step.tokens.of_batch(i)
        replayed, recorded = step.tokens.pick(i, logp), step.tokens.logp[mine]
        if not math.isfinite(step.norm):  # a forward that is not finite is what is looked for
            recorded = np.where(np.isfinite(replayed), recorded, math.nan)
        self.mismatch = max(self.mismatch, nats_off(replayed, recorded, step.tokens.weight[mine]))
        return gradient

    def _weighty(self, i: int) -> Ints:
        """Tokens of micro-batch `i` that have a weight in the loss."""
        tokens = self._step.tokens.of_batch(i)
        weighty: Ints = tokens[self._step.tokens.weight[tokens] != 0]
        return weighty

    def _order(self, segment: _Segment) -> float:
        """What is worse is larger."""
        if math.isnan(segment.norm):
            return math.inf if self._how.nan_is_spike else -math.inf
        return segment.norm

    def _follows(self, segment: _Segment, tau: float) -> bool:
        """Whether the segment is above its threshold, `tau` in units of T.

        Where segments are not divided by their own length, a culprit's norm does not depend on the segment around it,
        and the threshold is the same share of |G| for all.
        """
        if not math.isfinite(segment.norm):
            return self._how.nan_is_spike
        if not self._how.renormalise:
            return segment.norm > self._how.spike * self._step.norm
        return segment.norm > self._spike * tau
