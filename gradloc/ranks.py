"""What several processes have to agree on. Each method is a collective: all ranks call it, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """The processes that share one step."""

    rank: int
    size: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element over all ranks."""

    def max(self, value: float) -> float:
        """The largest of all ranks; NaN counts as infinite."""

    def gather(self, item: Any) -> list[Any]:
        """Everybody's item, in the order of the ranks. Picklable, small."""

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum over all ranks, in place."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def max(self, value: float) -> float:
        return value if value == value else float("inf")

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def add(self, tensors: Sequence[Tensor]) -> None:
        pass


class Group:
    """The processes of a ``torch.distributed`` group.

    Args:
        device: for the collectives' tensors; NCCL takes only its own.
        group: all processes where None.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduced([value if value == value else float("inf")], dist.ReduceOp.MAX)[0]

    def gather(self, item: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, item, group=self._group)
        return found

    def add(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._group)

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        tensor: Tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, how, group=self._group)
        return [float(x) for x in tensor.tolist()]


def everywhere(ranks: Ranks, attempt: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run something on all ranks that may fail on some: its value and None, or None and the first failure's reason.

    So that no rank goes on to a collective which another one never reaches.
    """
    value, reason = None, None
    try:
        value = attempt()
    except Exception as e:
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
    reasons = [r for r in ranks.gather(reason) if r is not None]
    return (None, reasons[0]) if reasons else (value, None)
