"""Verification: what a few tokens really contribute, by a backward of their own each.

A share says how much of |G| a token holds; its own backward says how long its gradient is, in which layers, and what
|G| would be without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seismograd.gradloc.attribution import Step
from seismograd.gradloc.replay import LOGP, Replay
from seismograd.gradloc.tokens import Floats, Ints
from seismograd.gradloc.vectors import Gradient, add_to, along, less, norm_of, root
from seismograd.telemetry.incidents import LayerNorms
from seismograd.telemetry.layers import ALL, Grouping, places

# Nats: how far rows that are replayed alone may be off, since kernels differ with the size of a batch.
_SAME, _SAME_ROUNDED = 1e-4, 2e-3
_SENT = 50_000_000  # parameters whose gradients are summed over ranks, once an incident


@dataclass(frozen=True)
class Verified:
    """One token's own gradient g.

    Args:
        token: its index in `Tokens`.
        norm: |g|.
        share: g . G / |G|^2, exact.
        without: |G - g|.
        norms: |g| by layer and module group.
        heterogeneity: the largest quotient over the layers of |g| to |G - g| there, over the quotient that is usual for
            them (the median of the lower 60%, since an explosion may reach many layers): not far above 1 where the
            token's gradient is spread over the layers as everybody's is.
    """

    token: int
    norm: float
    share: float
    without: float
    norms: LayerNorms
    heterogeneity: float


@dataclass(frozen=True)
class Verification:
    """What the backwards of this rank's candidates gave.

    Args:
        tokens: in the order of the candidates.
        replay_error: largest |logp replayed - logp recorded| over the tokens of the replayed micro-batches, nats.
        backwards: in units of the step's micro-batches; `forwards` as well.
        total: sum of all the candidates' gradients, or None where there are none.
    """

    tokens: tuple[Verified, ...]
    replay_error: float
    forwards: float
    backwards: float
    total: Gradient | None


def verify(step: Step, replay: Replay, candidates: Ints) -> Verification:
    """A masked backward for each of this rank's candidates; those of one micro-batch share its forward.

    Of all their gradients no whole one is held but their sum.
    """
    if replay.joint:
        return _verify_jointly(step, replay, candidates)
    found: dict[int, Verified] = {}
    error, forwards, backwards = 0.0, 0.0, 0.0
    total: Gradient = [None] * len(replay.parameters)
    usual = replay.norms(replay.gradient)
    for i in dict.fromkeys(int(step.tokens.batch[t]) for t in candidates):
        mine = [int(t) for t in candidates if step.tokens.batch[t] == i]
        own = _Own(step, replay, i, mine, usual, total)
        tried, part = _run(replay, own)
        found |= {token: own.verified(n) for n, token in enumerate(mine)}
        error = max(error, own.error)
        forwards, backwards = forwards + tried + part, backwards + part * own.weightings
    share = 1 / max(1, len(step.batches))
    tokens = tuple(found[int(t)] for t in candidates)
    return Verification(tokens, error, forwards * share, backwards * share, total if tokens else None)


class _Own:
    """Receives the gradients of some tokens of one micro-batch, and measures them parameter by parameter.

    Their sum has a backward of its own, the last: it begins to be held when the micro-batch's graph begins to go.

    Args:
        step, replay: as ever.
        i: the micro-batch.
        tokens: at least one.
        usual: (P,) norms of the step's gradient.
        total: to which the sum of the tokens' gradients is added.
    """

    def __init__(
        self, step: Step, replay: Replay, i: int, tokens: Sequence[int], usual: Floats, total: Gradient
    ) -> None:
        self._step, self._replay, self.batch, self._tokens, self._total = step, replay, i, tokens, total
        self.rows: list[int] | None = sorted({int(step.tokens.row[t]) for t in tokens})
        self.size = len(step.batches[i].logp)
        self.weightings = len(tokens) + (len(tokens) > 1)
        self.error = 0.0
        self._earlier = any(g is not None for g in total)
        self._usual = usual
        self._begin()

    def _begin(self) -> None:
        self._norms = np.zeros((len(self._tokens), len(self._usual)))
        self._rest = np.tile(self._usual, (len(self._tokens), 1))
        self._along = [0.0] * len(self._tokens)

    def weights(self) -> list[dict[str, Tensor]]:
        """Each token's alone, then all of them together where there are several."""
        like = self._step.batches[self.batch].logp
        chosen = [np.array([t]) for t in self._tokens]
        if len(chosen) > 1:
            chosen.append(np.array(self._tokens))
        weights = [self._step.tokens.weights(self.batch, like, t) * self._step.scale for t in chosen]
        return [{LOGP: w if self.rows is None else w[self.rows]} for w in weights]

    def accepts(self, logp: Tensor) -> bool:
        """Rows alone have to give the recorded log-probs (no dropout, no routing by batch)."""
        recorded, mask = self._step.batches[self.batch].logp, self._step.batches[self.batch].mask
        if self.rows is not None:
            recorded, mask = recorded[self.rows], mask[self.rows]
        self.error = _distance(logp, recorded, mask)
        return self.rows is None or self.error <= (_SAME if self._replay.precise else _SAME_ROUNDED)

    def take(self, weighting: int, parameter: int, gradient: Tensor) -> None:
        if weighting < len(self._tokens):
            whole = [self._replay.gradient[parameter]]
            self._norms[weighting, parameter] = norm_of([gradient])
            self._rest[weighting, parameter] = norm_of(less(whole, [gradient]))
            self._along[weighting] += along([gradient], whole, self._step.norm)
        if weighting == self.weightings - 1:
            add_to(self._total, parameter, gradient)

    def restart(self) -> None:
        if self._earlier:
            raise RuntimeError("some of the micro-batches run under reentrant checkpointing, and some do not")
        self._total[:] = [None] * len(self._total)
        self._begin()

    def verified(self, n: int) -> Verified:
        return _verified(self._step, self._replay, self._tokens[n], self._norms[n], self._rest[n], self._along[n])


def _run(replay: Replay, own: _Own) -> tuple[float, float]:
    """Run its backwards on its rows alone, where that can be believed, else on the whole micro-batch.

    Returns:
        What part of the micro-batch's forward was run in vain, and what part counted.
    """
    rows, of = own.rows or [], own.size
    tried = 0.0
    if replay.by_rows(own.batch) and len(rows) < of:
        if _drained(replay.backward(own.batch, own.weights(), rows, own)):
            return 0.0, len(rows) / of
        tried = len(rows) / of
    own.rows = None
    _drained(replay.backward(own.batch, own.weights(), None, own))
    return tried, 1.0


def _drained(backwards: Iterable[object]) -> bool:
    """Whether any was run."""
    return sum(1 for _ in backwards) > 0


def _distance(logp: Tensor, recorded: Tensor, mask: Tensor) -> float:
    """The largest between the trained tokens' log-probs, of those that are finite."""
    distance = (logp.float() - recorded.float()).abs()[mask]
    return float(distance[distance.isfinite()].max()) if distance.isfinite().any() else 0.0


def _verify_jointly(step: Step, replay: Replay, candidates: Ints) -> Verification:
    """Where a backward is that of all ranks: one for each candidate of any rank, in which the others weigh nothing."""
    found: dict[int, Verified] = {}
    error, number = 0.0, 0
    total: Gradient = [None] * len(replay.parameters)
    everybody = step.ranks.gather([int(t) for t in candidates])
    for rank, token in [(rank, token) for rank, tokens in enumerate(everybody) for token in tokens]:
        mine = rank == step.ranks.rank
        i = int(step.tokens.batch[token]) if mine else 0
        like = step.batches[i].logp
        weight = step.tokens.weights(i, like, np.array([token])) * step.scale if mine else torch.zeros_like(like)
        ((logp, gradient),) = replay.backward(i, [{LOGP: weight}])
        norms, rest = replay.norms(gradient), replay.norms(less(replay.gradient, gradient))
        verified = _verified(step, replay, token, norms, rest, replay.along(gradient, step.norm))
        for parameter, g in enumerate(gradient):
            if g is not None:
                add_to(total, parameter, g)
        del gradient  # before the next one
        number += 1
        if mine:
            found[token] = verified
            error = max(error, _distance(logp, like, step.batches[i].mask))
    part = number / max(1, replay.rounds)
    return Verification(tuple(found[int(t)] for t in candidates), error, part, part, total if number else None)


def layer_norms(replay: Replay, per_parameter: Floats) -> LayerNorms:
    """Norms by layer and module group, the layer whole under "all", from those of the parameters, (P,)."""
    grouping = Grouping.of(places(replay.names))
    norms = grouping.norms(per_parameter, root(per_parameter))
    found: dict[str, dict[str, float]] = {}
    for (layer, group), norm in list(zip(grouping.series, norms.tolist(), strict=True))[1:]:
        found.setdefault(layer, {})[group] = norm
    return found


def norm_without(step: Step, replay: Replay, verification: Verification) -> float | None:
    """|G| less the sum of all verified tokens on all ranks. A collective.

    None where the culprits lie on several ranks and their gradients are too long to be sent about.
    """
    total = verification.total
    if replay.joint:
        return step.norm if total is None else root(replay.norms(less(replay.gradient, total)))
    holders: list[bool] = step.ranks.gather(total is not None)
    if sum(holders) > 1 and sum(p.numel() for p in replay.parameters) <= _SENT:
        own = total or [None] * len(replay.parameters)
        dense = [torch.zeros_like(p) if g is None else g for p, g in zip(replay.parameters, own, strict=True)]
        step.ranks.add(dense)  # in place: nobody needs the rank's own any more
        return root(replay.norms(less(replay.gradient, dense)))
    own_norm = None if total is None else root(replay.norms(less(replay.gradient, total)))
    norms = step.ranks.gather(own_norm)
    if sum(holders) > 1:
        return None
    return next((norm for norm in norms if norm is not None), step.norm)


def _verified(step: Step, replay: Replay, token: int, norms: Floats, rest: Floats, along_whole: float) -> Verified:
    """From the norms of its gradient g and of G - g by parameter, and g . G / |G|."""
    own, others = layer_norms(replay, norms), layer_norms(replay, rest)
    return Verified(
        token=token,
        norm=root(norms),
        share=along_whole / step.norm,
        without=root(rest),
        norms=own,
        heterogeneity=_heterogeneity(own, others),
    )


def _heterogeneity(own: LayerNorms, rest: LayerNorms) -> float:
    quotients = np.array([own[layer][ALL] / rest[layer][ALL] for layer in own if rest[layer][ALL] > 0])
    usual = float(np.quantile(quotients, 0.3)) if len(quotients) >= 3 else 0.0
    return float(quotients.max()) / usual if usual > 0 else 1.0
