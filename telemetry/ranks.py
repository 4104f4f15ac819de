"""What several processes have to agree on. Each method is a collective: all ranks call it, in the same order.

On a group of its own, over the CPU, so that nothing of the trainer's is in its way; with a timeout of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from seismograd.telemetry.faults import reason


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
    """The processes of a ``torch.distributed`` group whose collectives work on the CPU (gloo).

    Args:
        group: all processes where None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
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
            host = tensor.cpu()
            dist.all_reduce(host, group=self._group)
            tensor.copy_(host)

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        tensor: Tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self._group)
        return [float(x) for x in tensor.tolist()]


_JOINED, _CLAIMED, _LEFT = 1, 10, 100


def meet(seconds: float = 30.0) -> Group | None:
    """A group of one's own of all processes, or None where not all of them come here within `seconds`.

    Making a group is a collective that waits for ever for those who do not take part, so the processes first meet at
    the job's store: each says that it has come, rank 0 claims them one by one, and says whether all were there.
    Whoever has waited in vain leaves, and can no longer be claimed.

    Args:
        seconds: that rank 0 waits for the others, and they for it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    job = PrefixStore("seismograd/", _get_default_store())
    # Each rank's n-th meeting is the n-th of all.
    store = PrefixStore(f"{job.add(f'meetings/{rank}', 1)}/", job)
    store.add(str(rank), _JOINED)
    if rank == 0:
        everybody = _came(store, [str(r) for r in range(1, size)], seconds)
        claimed = everybody and all(store.add(str(r), _CLAIMED) == _JOINED + _CLAIMED for r in range(1, size))
        store.set("together", "yes" if claimed else "no")
    elif not _came(store, ["together"], seconds) and store.add(str(rank), _LEFT) < _LEFT + _CLAIMED:
        return None
    if store.get("together") != b"yes":
        return None
    # A localisation on one rank may take longer than on the others; a process that is gone costs this wait once.
    return Group(dist.new_group(backend="gloo", timeout=timedelta(minutes=10)))


def _came(store: PrefixStore, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # DistStoreError where the wait was in vain
        return False
    return True


def everywhere(ranks: Ranks, attempt: Callable[[], Any], told: bool) -> tuple[Any, str | None]:
    """Run something on all ranks that may fail on some: its value and None, or None and the first failure's reason.

    So that no rank goes on to a collective which another one never reaches.

    Args:
        ranks: all of which call it.
        attempt: what is run.
        told: whether the reason may quote the exception, see `seismograd.telemetry.faults.reason`.
    """
    value, failure = None, None
    try:
        value = attempt()
    except Exception as e:
        failure = reason(e, told)
    reasons = [r for r in ranks.gather(failure) if r is not None]
    return (None, reasons[0]) if reasons else (value, None)
