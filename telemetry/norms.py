"""Gradient norms before clipping, taken once: the clip uses what was read for the metrics.

Reading every gradient is most of what these metrics would cost, and the trainer's clip reads them anyway. The
operations and their order are those of ``torch.nn.utils.clip_grad_norm_`` (torch 2.6 to 2.13), so the clipped gradients
have the same bits; tests compare them for mixed dtypes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support


@dataclass(frozen=True)
class Norms:
    """L2 norms of one step's gradients, on their device.

    Args:
        parameters: those that have a gradient, P of them, in the order in which they were given.
        per_parameter: (P,) in the gradients' own precision.
        total: scalar tensor, with the bits that ``torch.nn.utils.get_total_norm`` gives.
        sharded: the gradients are DTensors; `total` is then as exact, but not to the bit.
    """

    parameters: tuple[Tensor, ...]
    per_parameter: Tensor
    total: Tensor
    sharded: bool = False

    def unscaled(self, scale: Tensor) -> Norms:
        """With the loss scale taken out."""
        scale = scale.to(self.total.device)
        return replace(self, per_parameter=self.per_parameter / scale, total=self.total / scale)


@torch.no_grad()
def take_norms(parameters: Sequence[Tensor], ranks: int = 1) -> Norms | None:
    """The norms of all gradients, or None where no parameter has one.

    Args:
        parameters: those whose gradients are read.
        ranks: how many processes call this together. None as well where the gradients are sharded over more of them: a
            reduction that the others take no part in would never end.
    """
    having = [p for p in parameters if p.grad is not None]
    if not having:
        return None
    if any(isinstance(p.grad, DTensor) for p in having):
        return _sharded_norms(having, ranks)
    grads: list[Tensor | None] = [p.grad for p in having]
    norms: list[Tensor] = []
    order: list[int] = []
    grouped = _group_tensors_by_device_and_dtype([grads], with_indices=True)
    for (group_device, _), ([group], indices) in grouped.items():
        if _has_foreach_support(group, group_device):  # type: ignore[arg-type]
            norms.extend(torch._foreach_norm(group, 2.0))  # type: ignore[arg-type]
        else:
            norms.extend(torch.linalg.vector_norm(g, 2.0) for g in group)
        order.extend(indices)
    # As torch does: on the device of the first gradient given.
    stacked = torch.stack([norm.to(having[0].device) for norm in norms])
    total = torch.linalg.vector_norm(stacked, 2.0)
    return Norms(tuple(having[i] for i in order), stacked, total)


def _sharded_norms(having: Sequence[Tensor], ranks: int) -> Norms | None:
    """Each rank's shards, summed over the ranks in one reduction. A collective: all ranks have the same parameters."""
    mesh = next(p.grad.device_mesh for p in having if isinstance(p.grad, DTensor))
    if mesh.size() > ranks:
        return None
    local = [g.to_local() if isinstance(g := p.grad, DTensor) else g for p in having]
    squares = torch.stack(torch._foreach_norm(local, 2.0)).square()  # type: ignore[arg-type]
    for dim in range(mesh.ndim):
        cut = torch.tensor(
            [isinstance(p.grad, DTensor) and p.grad.placements[dim].is_shard() for p in having], device=squares.device
        )
        summed = squares.clone()
        dist.all_reduce(summed, group=mesh.get_group(dim))
        squares = torch.where(cut, summed, squares)
    return Norms(tuple(having), squares.sqrt(), squares.sum().sqrt(), sharded=True)
