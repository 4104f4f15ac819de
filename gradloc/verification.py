"""Verification: what a few tokens really contribute, by a backward of their own each.

A share says how much of |G| a token holds; its own backward says how long its gradient is, in which layers, and what
|G| would be without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from seismograd.gradloc.attribution import Step
from seismograd.gradloc.replay import LOGP, Replay
from seismograd.gradloc.tokens import Ints
from seismograd.gradloc.vectors import Gradient, added, less, root
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
    """A masked backward for each of this rank's candidates; those of one micro-batch share its forward."""
    if replay.joint:
        return _verify_jointly(step, replay, candidates)
    found: dict[int, Verified] = {}
    error, forwards, backwards = 0.0, 0.0, 0.0
    total: Gradient | None = None
    for i in dict.fromkeys(int(step.tokens.batch[t]) for t in candidates):
        mine = [int(t) for t in candidates if step.tokens.batch[t] == i]
        gradients, off, part = _gradients(step, replay, i, mine)
        for token, gradient in gradients:
            found[token] = _verified(step, replay, token, gradient)
            total = gradient if total is None else added(total, gradient)
        error = max(error, off)
        forwards, backwards = forwards + part, backwards + part * len(mine)
    share = 1 / max(1, len(step.batches))
    return Verification(tuple(found[int(t)] for t in candidates), error, forwards * share, backwards * share, total)


def _verify_jointly(step: Step, replay: Replay, candidates: Ints) -> Verification:
    """Where a backward is that of all ranks: one for each candidate of any rank, in which the others weigh nothing."""
    found: dict[int, Verified] = {}
    error, total, number = 0.0, None, 0
    everybody = step.ranks.gather([int(t) for t in candidates])
    for rank, token in [(rank, token) for rank, tokens in enumerate(everybody) for token in tokens]:
        mine = rank == step.ranks.rank
        i = int(step.tokens.batch[token]) if mine else 0
        like = step.batches[i].logp
        weight = step.tokens.weights(i, like, np.array([token])) * step.scale if mine else torch.zeros_like(like)
        ((logp, gradient),) = replay.backward(i, [{LOGP: weight}])
        verified = _verified(step, replay, token, gradient)
        total = gradient if total is None else added(total, gradient)
        number += 1
        if mine:
            found[token] = verified
            distance = (logp.float() - like.float()).abs()[step.batches[i].mask]
            error = max(error, float(distance[distance.isfinite()].max()) if distance.isfinite().any() else 0.0)
    part = number / max(1, replay.rounds)
    return Verification(tuple(found[int(t)] for t in candidates), error, part, part, total)


def _gradients(
    step: Step, replay: Replay, i: int, tokens: Sequence[int]
) -> tuple[list[tuple[int, Gradient]], float, float]:
    """The tokens of one micro-batch with their gradients, how far the replay was off, and what part of it was run.

    Their rows alone, where those give the recorded log-probs (no dropout, no routing by batch), else all.
    """
    like = step.batches[i].logp
    weights = [step.tokens.weights(i, like, np.array([t])) * step.scale for t in tokens]
    rows = sorted({int(step.tokens.row[t]) for t in tokens})
    tried = 0.0
    if replay.by_rows(i) and len(rows) < len(like):
        tried = len(rows) / len(like)
        found, off = _run(step, replay, i, tokens, [w[rows] for w in weights], rows)
        if off <= (_SAME if replay.precise else _SAME_ROUNDED):
            return found, off, tried
    found, off = _run(step, replay, i, tokens, weights, None)
    return found, off, 1.0 + tried


def _run(
    step: Step, replay: Replay, i: int, tokens: Sequence[int], weights: Sequence[Tensor], rows: Sequence[int] | None
) -> tuple[list[tuple[int, Gradient]], float]:
    recorded = step.batches[i].logp if rows is None else step.batches[i].logp[list(rows)]
    mask = step.batches[i].mask if rows is None else step.batches[i].mask[list(rows)]
    found, off = [], 0.0
    for token, (logp, gradient) in zip(tokens, replay.backward(i, [{LOGP: w} for w in weights], rows), strict=True):
        found.append((token, gradient))
        distance = (logp.float() - recorded.float()).abs()[mask]
        off = max(off, float(distance[distance.isfinite()].max()) if distance.isfinite().any() else 0.0)
    return found, off


def layer_norms(replay: Replay, gradient: Sequence[Tensor | None]) -> LayerNorms:
    """Norms by layer and module group, the layer whole under "all"."""
    grouping = Grouping.of(places(replay.names))
    per_parameter = replay.norms(gradient)
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
        dense = [torch.zeros_like(p) for p in replay.parameters]
        for own, g in zip(dense, total or [], strict=False):
            if g is not None:
                own.copy_(g)
        step.ranks.add(dense)
        return root(replay.norms(less(replay.gradient, list(dense))))
    own_norm = None if total is None else root(replay.norms(less(replay.gradient, total)))
    norms = step.ranks.gather(own_norm)
    if sum(holders) > 1:
        return None
    return next((norm for norm in norms if norm is not None), step.norm)


def _verified(step: Step, replay: Replay, token: int, gradient: Gradient) -> Verified:
    rest = less(replay.gradient, gradient)
    own, others = layer_norms(replay, gradient), layer_norms(replay, rest)
    return Verified(
        token=token,
        norm=root(replay.norms(gradient)),
        share=replay.along(gradient, step.norm) / step.norm,
        without=root(replay.norms(rest)),
        norms=own,
        heterogeneity=_heterogeneity(own, others),
    )


def _heterogeneity(own: LayerNorms, rest: LayerNorms) -> float:
    quotients = np.array([own[layer][ALL] / rest[layer][ALL] for layer in own if rest[layer][ALL] > 0])
    usual = float(np.quantile(quotients, 0.3)) if len(quotients) >= 3 else 0.0
    return float(quotients.max()) / usual if usual > 0 else 1.0
