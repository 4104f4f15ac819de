"""The weight-sync probe: the share of weights whose value, as a rollout engine holds it, a step really changed.

An engine gets the weights in its own precision, and an update below half a unit in the last place of that is lost on
the way: at a weight of 1 BF16's is 0.0078, and Adam moves it by about its learning rate. About 99% of the updates of a
step were found to be invisible at usual learning rates (Miahi and Belilovsky 2026, arXiv:2602.03839), and the policy
that generates does not move: why alpha may not grow. Compared are

* the weights before and after a step, and
* the weights after a step and those that the rollout engine was last given: of the step at which the newest of the
  samples was generated, by their staleness. Known where that step was probed too.

Trained parameters are looked at as they are: LoRA's adapters rather than what they are merged into, and one rank's
shards of what is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from seismograd.collectors.table import TokenTable
from seismograd.collectors.transfer import Host
from seismograd.telemetry.layers import ALL, places
from seismograd.telemetry.records import Reading

SAMPLED = 2**18
_HELD = 8


class Weights:
    """Compares a sample of a model's trained weights with itself at other steps.

    Args:
        model: the trained one.
        dtype: the engine's, of 16 bits.
        sampled: weights in all, at most; see `Sample`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, sampled: int = SAMPLED) -> None:
        self._model, self._dtype, self._sampled = model, dtype, sampled
        self.sample: Sample | None = None
        self._held: dict[int, Tensor] = {}  # by step, as it began

    def before(self, step: int) -> None:
        """A step begins: its weights are held until it ends, and longer where the engine may have them."""
        trained = _trained(self._model)
        if self.sample is None or not self.sample.of_same(trained):
            self.sample, self._held = Sample.of(trained, self._sampled), {}
        if any(held >= step for held in self._held):  # the loop counts anew
            self._held.clear()
        self._held[step] = self.sample.take(self._dtype)

    def after(self, step: int, synced: int | None) -> Tensor | None:
        """The weights have moved.

        Args:
            step: for which `before` was called; None is returned where it was not, or where there are no weights.
            synced: the step whose first weights the engine generates with, where that is known.

        Returns:
            (2, L) shares by layer, on the device: changed in this step, and since `synced` (NaN where its weights are
            not held).
        """
        begun = self._held.get(step)
        if self.sample is None or begun is None or not len(begun):
            return None
        now = self.sample.take(self._dtype)
        shares = self.sample.changed(begun, now)
        given = None if synced is None else self._held.get(synced)
        since = torch.full_like(shares, torch.nan) if given is None else self.sample.changed(given, now)
        last = sorted(self._held)[-_HELD:]
        self._held = {s: x for s, x in self._held.items() if s == synced or (s in last and s >= (synced or s))}
        return torch.stack([shares, since])


@dataclass(frozen=True)
class Sample:
    """Which weights stand for all: in each layer the same number, drawn once and in proportion to its parameters'
    sizes; a layer that has no more is taken whole. Of 2^18 weights in 30 layers a share of 1% is known to 0.1% of the
    layer (one standard deviation).

    Args:
        parameters: those that have weights here, layer by layer.
        drawn: of each its indices, (k,) int64 and rising, on its device; None for all.
        layers: L names.
        sizes: (L,) weights by layer.
        counts: (L,) sampled of them; K in all.
    """

    parameters: tuple[Tensor, ...]
    drawn: tuple[Tensor | None, ...]
    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, trained: Sequence[tuple[str, Tensor]], sampled: int) -> Sample:
        """Drawn from a generator of its own, so that no random number of the training's is used.

        Args:
            trained: names and parameters.
            sampled: weights, about, at most.
        """
        found = [(place.layer, p) for place, (_, p) in zip(places([n for n, _ in trained]), trained, strict=True)]
        found = [(layer, p) for layer, p in found if _local(p).numel()]
        layers = tuple(dict.fromkeys(layer for layer, _ in found))
        generator = torch.Generator().manual_seed(0)
        parameters, drawn, sizes, counts = [], [], [], []
        for layer in layers:
            mine = [p for of, p in found if of == layer]
            size, count = sum(_local(p).numel() for p in mine), 0
            for p in mine:
                n = _local(p).numel()
                k = min(n, -(-n * (sampled // len(layers)) // size))
                index = torch.randint(n, (k,), generator=generator).sort().values.to(p.device) if k < n else None
                parameters.append(p)
                drawn.append(index)
                count += k
            sizes.append(size)
            counts.append(count)
        return cls(tuple(parameters), tuple(drawn), layers, tuple(sizes), tuple(counts))

    def of_same(self, trained: Sequence[tuple[str, Tensor]]) -> bool:
        """Whether it was drawn from these parameters: a trainer may make its model anew."""
        return set(map(id, self.parameters)) == {id(p) for _, p in trained if _local(p).numel()}

    @torch.no_grad()
    def take(self, dtype: torch.dtype) -> Tensor:
        """(K,) int16, the bits of the sampled weights in a dtype of 16 bits."""
        if not self.parameters:
            return torch.empty(0, dtype=torch.int16)
        values = [_local(p) for p in self.parameters]
        chosen = [x.reshape(-1) if i is None else torch.take(x, i) for x, i in zip(values, self.drawn, strict=True)]
        return torch.cat([x.to(values[0].device, dtype) for x in chosen]).view(torch.int16)

    def changed(self, a: Tensor, b: Tensor) -> Tensor:
        """(L,) float32, by layer the share of the sample whose bits differ."""
        return torch.stack([differs.float().mean() for differs in torch.split(a != b, list(self.counts))])


def newest_sync(step: int, tokens: TokenTable | None) -> int | None:
    """The step at whose beginning the engine had the weights that the newest of a step's samples comes from; None where
    no staleness is known.
    """
    if tokens is None or not (known := tokens.staleness[np.isfinite(tokens.staleness)]).size:
        return None
    return step - int(known.min())


def weight_readings(sample: Sample, shares: Host) -> list[Reading]:
    """Of what `Weights.after` gave, on the host; the whole model's by its layers' sizes."""
    names = ("weights_changed_ratio", "weights_changed_since_sync_ratio")
    readings = []
    for name, row in zip(names, shares.astype(np.float64), strict=True):
        if not np.isnan(row).any():
            whole = float(np.average(row, weights=sample.sizes))
            by_layer = zip((ALL, *sample.layers), (whole, *row.tolist()), strict=True)
            readings += [Reading(name, share, {"layer": layer}) for layer, share in by_layer]
    return readings


def _trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()]


def _local(p: Tensor) -> Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()
