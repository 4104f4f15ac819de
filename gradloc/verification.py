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
from seismograd.gradloc.vectors import Gradient, added, along, less, norm_of
from seismograd.telemetry.incidents import LayerNorms
from seismograd.telemetry.layers import ALL, Grouping, places


@dataclass(frozen=True)
class Verified:
    """One token's own gradient g.

    Args:
        token: its index in `Tokens`.
        norm: |g|.
        share: g . G / |G|^2, exact.
        without: |G - g|.
        norms: |g| by layer and module group.
        heterogeneity: the largest quotient over the layers of |g| to |G - g| there, over the median quotient: about 1
            where the token's gradient is spread over the layers as everybody's is.
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
    grouping = Grouping.of(places(replay.names))
    found: dict[int, Verified] = {}
    error, forwards = 0.0, 0
    total: Gradient | None = None
    for i in dict.fromkeys(int(step.tokens.batch[t]) for t in candidates):
        mine = [int(t) for t in candidates if step.tokens.batch[t] == i]
        like = step.batches[i].logp
        one_each = [{LOGP: step.tokens.weights(i, like, np.array([t])) * step.scale} for t in mine]
        forwards += 1
        for token, (logp, gradient) in zip(mine, replay.backward(i, one_each), strict=True):
            found[token] = _verified(step, replay, grouping, token, gradient)
            total = gradient if total is None else added(total, gradient)
            error = max(error, _distance(step, i, logp))
    share = 1 / max(1, len(step.batches))
    ordered = tuple(found[int(t)] for t in candidates)
    return Verification(ordered, error, forwards * share, len(ordered) * share, total)


def layer_norms(names: Sequence[str], gradient: Gradient) -> LayerNorms:
    """Norms by layer and module group, the layer whole under "all"."""
    return _by_layer(Grouping.of(places(names)), gradient)


def norm_without(step: Step, replay: Replay, verification: Verification) -> float:
    """|G| less the sum of all verified tokens on all ranks. A collective."""
    total = verification.total or [None] * len(replay.parameters)
    if step.ranks.size > 1:
        total = [torch.zeros_like(p) if g is None else g.clone() for p, g in zip(replay.parameters, total, strict=True)]
        step.ranks.add([g for g in total if g is not None])
    return norm_of(less(replay.gradient, total))


def _verified(step: Step, replay: Replay, grouping: Grouping, token: int, gradient: Gradient) -> Verified:
    rest = less(replay.gradient, gradient)
    own = _by_layer(grouping, gradient)
    return Verified(
        token=token,
        norm=norm_of(gradient),
        share=along(gradient, replay.gradient, step.norm) / step.norm,
        without=norm_of(rest),
        norms=own,
        heterogeneity=_heterogeneity(own, _by_layer(grouping, rest)),
    )


def _heterogeneity(own: LayerNorms, rest: LayerNorms) -> float:
    quotients = np.array([own[layer][ALL] / rest[layer][ALL] for layer in own if rest[layer][ALL] > 0])
    usual = float(np.median(quotients)) if len(quotients) >= 3 else 0.0
    return float(quotients.max()) / usual if usual > 0 else 1.0


def _by_layer(grouping: Grouping, gradient: Gradient) -> LayerNorms:
    per_parameter = np.array([0.0 if g is None else float(g.norm()) for g in gradient])
    norms = grouping.norms(per_parameter, float(np.linalg.norm(per_parameter)))
    found: dict[str, dict[str, float]] = {}
    for (layer, group), norm in list(zip(grouping.series, norms.tolist(), strict=True))[1:]:
        found.setdefault(layer, {})[group] = norm
    return found


def _distance(step: Step, i: int, logp: Tensor) -> float:
    chosen = step.tokens.of_batch(i)
    off = np.abs(step.tokens.pick(i, logp) - step.tokens.logp[chosen])
    return float(off[np.isfinite(off)].max(initial=0.0))
