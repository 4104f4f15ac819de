"""Replays of a model whose parameters are sharded by FSDP2 (``torch.distributed.fsdp.fully_shard``).

Each rank moves its own shards by its own shards of the gradient, which needs no communication that a forward would not
do anyway. A forward gathers the parameters, so all ranks run as many, those with fewer micro-batches their last one
again; and a backward reduces, so that its gradient is that of all ranks' tokens together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from seismograd.gradloc.replay import LOGP, ModelReplay, Receiver, loss_of
from seismograd.gradloc.tokens import Floats
from seismograd.gradloc.vectors import Gradient, along
from seismograd.telemetry.ranks import Ranks
from seismograd.telemetry.records import TokenBatch


class ShardedReplay(ModelReplay):
    """See `ModelReplay`; here `parameters` and all gradients are this rank's shards.

    Args:
        model: as there.
        batches: of this rank; at least one.
        ranks: those that share the step, and the parameters.

    Raises:
        ValueError: as there; also where a rank has no micro-batch, or parameters of 16 bits.
    """

    joint = True

    def __init__(self, model: nn.Module, batches: Sequence[TokenBatch], ranks: Ranks) -> None:
        counts = ranks.gather(len(batches))
        if not all(counts):
            raise ValueError(f"rank {counts.index(0)} has no micro-batch to run a forward of, and all must")
        meshes = [p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)]
        if max(meshes) > ranks.size:
            raise ValueError(
                f"the parameters are sharded over {max(meshes)} processes, and {ranks.size} take part: "
                "call watch() on all"
            )
        super().__init__(model, batches)
        self.precise = self.precise and not any(_casts(module) for module in model.modules())
        if any(p.element_size() < 4 for p in self.parameters):
            raise ValueError("sharded parameters of 16 bits cannot hold a step that is small enough")
        self.rounds = max(counts)
        self._ranks = ranks
        self._whole: Sequence[Tensor] = self.parameters
        self.parameters = [_local(p.detach()) for p in self._whole]
        self.gradient = [_local(g) for g in self.gradient]
        self._copies = np.array([_copies(p, ranks.size) for p in self._whole], dtype=np.float64)

    def by_rows(self, i: int) -> bool:
        return False

    def forward(self, i: int, rows: Sequence[int] | None = None) -> Mapping[str, Tensor]:
        outputs = super().forward(min(i, len(self._batches) - 1))
        if not torch.is_grad_enabled():
            # The root stays gathered after a forward without a backward, and would not see the next move.
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return outputs

    def backward(
        self,
        i: int,
        weights: Sequence[Mapping[str, Tensor]],
        rows: Sequence[int] | None = None,
        into: Receiver | None = None,
    ) -> Iterator[tuple[Tensor, Gradient]]:
        """By .backward(), with the step's gradients set aside meanwhile. FSDP averages over ranks; this is the sum."""
        assert into is None
        for weight in weights:
            kept = [p.grad for p in self._whole]
            try:
                for p in self._whole:
                    p.grad = None
                with torch.enable_grad():
                    outputs = self.forward(i)
                    # Every output takes part on every rank, or a rank would skip the reduction.
                    for p in self._whole:
                        p.grad = None  # a replay of the user's may have run a backward itself
                    anchor = outputs[LOGP].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).sum() * 0.0
                    (anchor + self._ranks.size * loss_of(outputs, weight)).backward()  # type: ignore[no-untyped-call]
                found = [None if p.grad is None else _local(p.grad) for p in self._whole]
                yield outputs[LOGP].detach(), found
            finally:
                for p, grad in zip(self._whole, kept, strict=True):
                    p.grad = grad

    def norms(self, gradient: Iterable[Tensor | None]) -> Floats:
        squares = np.square(super().norms(gradient)) / self._copies
        return np.sqrt(np.array(self._ranks.sum(squares.tolist()), dtype=np.float64))

    def along(self, gradient: Sequence[Tensor | None], norm: float) -> float:
        parts = [along([g], [w], norm) / n for g, w, n in zip(gradient, self.gradient, self._copies, strict=True)]
        return self._ranks.sum([sum(parts)])[0]

    @contextmanager
    def movable(self) -> Iterator[Callable[[float], None]]:
        with self._in_float32(), torch.no_grad(), self._moving(list(self.parameters)) as move:
            yield move

    def first_nonfinite(self, i: int | None) -> str | None:
        return None  # ranks would run unequal numbers of forwards


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is a DTensor."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _copies(p: Tensor, size: int) -> int:
    """How many ranks hold the same shard."""
    if not isinstance(p, DTensor):
        return size
    mesh = p.device_mesh
    return math.prod(mesh.size(i) for i, placement in enumerate(p.placements) if not placement.is_shard())


def _casts(module: nn.Module) -> bool:
    """Whether FSDP's mixed precision computes the module in 16 bits, as far as it lets that be seen."""
    with suppress(AttributeError):
        policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
        return bool(policy.param_dtype is not None and policy.param_dtype.itemsize < 4)
    return False
