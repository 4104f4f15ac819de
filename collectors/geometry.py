"""Gradient geometry: where the step's gradient points, beside the one that neither clip nor precision has touched.

    G            the step's real gradient, of the trainer's own backward, before any clipping
    c            the clean REINFORCE gradient, of -1/N sum_t A_t logp_t: each trained token with its advantage, at the
                 weight 1 that a token has on-policy, whatever its ratio, rollout log-prob and clip are
    c1 + c2 = c  the same of two halves of the step, its sequences in turn

The cosine of G and c is 1 where the loss is the on-policy one. Clipping, the gap of precision, importance weights, KL
and a normalisation by sequence turn G away. A cosine has no meaning without its floor, the cosine of c1 and c2: how
well two halves of the step agree with each other (by noise alone 0.13 to 0.36 in small runs).

|G|^2 is split into three shares that add up to 1:

    distortion   1 - cos(G, c)^2           what is not along the clean gradient
    signal       cos(G, c)^2 s             along it, and common to both halves
    noise        cos(G, c)^2 (1 - s)       along it, and of this step's sampling alone

    s = c1 . c2 / (f1 f2 |c|^2)            f1, f2: shares of the trained tokens

With independent halves c1 . c2 has the expectation f1 f2 |E c|^2, so that s estimates |E c|^2 / |c|^2 without bias in
its numerator; it may be negative. After the estimate of |G|^2 from batches of two sizes in McCandlish et al. 2018, An
Empirical Model of Large-Batch Training, arXiv:1812.06162, A.1. Halves of one step share its prompts, where these stand
side by side: noise is then that of sampling completions.

It costs a forward and two backwards of the step's micro-batches, replayed under their own random numbers into
gradients of their own. None of these is held: inner products come from sketches of a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from seismograd.collectors.sketch import Sketches
from seismograd.collectors.transfer import Host
from seismograd.telemetry.ranks import Ranks, everywhere
from seismograd.telemetry.records import Reading, TokenBatch

LOGP = "logp"
_SAME = 1e-2
"""Nats that replayed log-probs may be off: beyond it is another forward. In 16 bits kernels differ in last digits."""

_REAL, _FIRST, _SECOND = range(3)


class Replay(Protocol):
    """The step's micro-batches, run again; see `seismograd.gradloc.replay.ModelReplay`."""

    parameters: Sequence[Tensor]
    gradient: Sequence[Tensor]

    def backward(
        self, i: int, weights: Sequence[Mapping[str, Tensor]], rows: Sequence[int] | None = None, into: Any = None
    ) -> Iterator[tuple[Tensor, Any]]:
        """Under each of the weightings of micro-batch i's log-probs, its gradient, given to `into`."""

    def kept(self) -> AbstractContextManager[None]:
        """All that a forward may change is as before when the context ends."""


class Replays(Protocol):
    """Makes a `Replay` of a step."""

    def __call__(self, model: nn.Module, batches: Sequence[TokenBatch], /) -> Replay: ...


def geometry(model: nn.Module, batches: Sequence[TokenBatch], replays: Replays, ranks: Ranks) -> Tensor:
    """Measure a step whose gradient stands in .grad; leaves everything as it was, bit for bit.

    With several processes all call it, each with its own micro-batches, and what fails on one is raised on all: its own
    backwards hold no collectives, and only sketches are added up.

    Args:
        model: the trained one, not sharded.
        batches: each with replay and advantage.
        replays: run them again.
        ranks: those whose gradients G is the mean of.

    Returns:
        (4,) float32 on the device: the cosine of G and c, its floor, s, and the replay error in nats, added up over the
        ranks. See the module's docstring; NaN where one is not defined.

    Raises:
        RuntimeError: it failed on one of several ranks.
        ValueError: a micro-batch cannot be replayed, no parameter has a gradient, or one is sparse.
    """
    if ranks.size == 1:
        return _measured(_sums(model, batches, replays))
    sums, failure = everywhere(ranks, lambda: _sums(model, batches, replays), told=False)
    if failure is not None:
        raise RuntimeError(f"on one of the ranks: {failure}")
    ranks.add([sums.sketches.values[_FIRST:], sums.tokens, sums.error])
    return _measured(sums)


def geometry_readings(found: Host) -> list[Reading]:
    """Of what `geometry` gave, on the host; what is not defined is left out.

    Raises:
        ValueError: the replays were not those of the training forwards, so that nothing of it is believed.
    """
    cosine, floor, common, error = (float(x) for x in found)
    if not error <= _SAME:
        raise ValueError(f"the replayed log-probs are {error:.2g} nats off the training's: no gradient geometry")
    cosines = {"gradient_cosine": cosine, "gradient_cosine_floor": floor}
    readings = [Reading(name, value) for name, value in cosines.items() if math.isfinite(value)]
    along = cosine**2
    if math.isfinite(along * common):
        shares = {"signal": along * common, "noise": along * (1 - common), "distortion": 1 - along}
        readings += [Reading("gradient_share", share, {"part": part}) for part, share in shares.items()]
    return readings


@dataclass(frozen=True)
class _Sums:
    """Of one rank, then of all.

    Args:
        sketches: of G, c1 and c2.
        tokens: (2,) trained tokens of each half.
        error: () nats.
    """

    sketches: Sketches
    tokens: Tensor
    error: Tensor


def _sums(model: nn.Module, batches: Sequence[TokenBatch], replays: Replays) -> _Sums:
    replay = replays(model, batches)
    trained = [p for p in model.parameters() if p.requires_grad]
    place = {id(p): k for k, p in enumerate(trained)}
    places = [place[id(p)] for p in replay.parameters]
    sketches = Sketches(trained, 3)
    device = sketches.values.device
    tokens, error = torch.zeros(2, device=device), torch.zeros((), device=device)
    for k, gradient in zip(places, replay.gradient, strict=True):
        sketches.add(_REAL, k, gradient)
    rows = 0
    with replay.kept():
        for i, batch in enumerate(batches):
            assert batch.advantage is not None
            halves = _halves(batch, rows)
            weights = [{LOGP: torch.where(half, -batch.advantage, 0.0).float()} for half in halves]
            receiver = _Receiver(sketches, places, batch)
            for _ in replay.backward(i, weights, into=receiver):
                pass
            tokens += torch.stack([half.sum() for half in halves]).to(device)
            error = torch.maximum(error, receiver.error.to(device))
            rows += len(batch.mask)
    return _Sums(sketches, tokens, error)


def _measured(sums: _Sums) -> Tensor:
    p = sums.sketches.products()
    clean = p[_FIRST, _FIRST] + 2 * p[_FIRST, _SECOND] + p[_SECOND, _SECOND]
    cosine = (p[_REAL, _FIRST] + p[_REAL, _SECOND]) / (p[_REAL, _REAL] * clean).sqrt()
    floor = p[_FIRST, _SECOND] / (p[_FIRST, _FIRST] * p[_SECOND, _SECOND]).sqrt()
    shares = sums.tokens / sums.tokens.sum()
    common = p[_FIRST, _SECOND] / (shares.prod() * clean)
    return torch.stack([cosine.clamp(-1, 1), floor.clamp(-1, 1), common, sums.error]).float()


def _halves(batch: TokenBatch, before: int) -> tuple[Tensor, Tensor]:
    """(B, T-1) bool twice: the trained tokens of each half of the step that have an advantage.

    Args:
        batch: a micro-batch.
        before: rows of the step before it, so that one row a micro-batch takes turns too.
    """
    assert batch.advantage is not None
    counted = batch.mask & torch.isfinite(batch.advantage)
    rows = torch.arange(len(counted), device=counted.device).unsqueeze(1)
    second = ((rows if batch.sequence is None else batch.sequence) + before) % 2 == 1
    return counted & ~second, counted & second


class _Receiver:
    """Takes the gradients of one micro-batch into the sketches of both halves.

    Args:
        sketches: of the step.
        places: (P,) of each of the replay's parameters among those of the sketches.
        batch: as recorded.
    """

    def __init__(self, sketches: Sketches, places: Sequence[int], batch: TokenBatch) -> None:
        self._sketches, self._places, self._batch = sketches, places, batch
        self._earlier = sketches.values[_FIRST:].clone()
        self.error = torch.zeros((), device=batch.logp.device)

    def accepts(self, logp: Tensor) -> bool:
        """Always: whether the log-probs are the recorded ones is known on the device only."""
        counted = self._batch.mask & torch.isfinite(self._batch.logp)
        off = torch.where(counted, (logp - self._batch.logp).abs().float(), 0.0)
        if off.numel():
            self.error = torch.maximum(self.error, off.max())
        return True

    def take(self, weighting: int, parameter: int, gradient: Tensor) -> None:
        self._sketches.add(_FIRST + weighting, self._places[parameter], gradient)

    def restart(self) -> None:
        self._sketches.values[_FIRST:] = self._earlier
