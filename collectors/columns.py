"""A micro-batch's columns on their way through the transfer: tensors by name on the device, arrays on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seismograd.collectors.table import FLOAT_COLUMNS, HostBatch
from seismograd.collectors.transfer import Host
from seismograd.telemetry.records import TokenBatch

_PART = (1 << 21) - 1


def device_columns(batch: TokenBatch) -> Iterable[tuple[str, Tensor]]:
    """The tensors that go to the host, by name."""
    yield "mask", batch.mask
    for key in FLOAT_COLUMNS:
        tensor = getattr(batch, key)
        if tensor is not None:
            yield key, tensor
    for reason, flags in batch.left_out.items():
        yield f"left_out.{reason}", flags
    if batch.sequence is not None:
        # In three parts, each of which float32 holds exactly: names of sequences may be any int64.
        yield "sequence.high", batch.sequence >> 42
        yield "sequence.middle", (batch.sequence >> 21) & _PART
        yield "sequence.low", batch.sequence & _PART
    if isinstance(batch.staleness, Tensor):
        yield "staleness", batch.staleness


def host_batch(batch: TokenBatch, i: int, host: Mapping[Any, Host]) -> HostBatch:
    """The micro-batch at position `i`, put together from what has arrived under ``(i, name)``."""
    staleness: Host | None = host.get((i, "staleness"))
    if isinstance(batch.staleness, int):
        staleness = np.full(batch.mask.shape[0], batch.staleness, dtype=np.float32)
    return HostBatch(
        mask=host[i, "mask"],
        columns={key: host[i, key] for key in FLOAT_COLUMNS if (i, key) in host},
        left_out={reason: host[i, f"left_out.{reason}"] for reason in batch.left_out},
        sequence=None if batch.sequence is None else _sequence(i, host),
        staleness=staleness,
    )


def _sequence(i: int, host: Mapping[Any, Host]) -> NDArray[np.int64]:
    high, middle, low = (host[i, f"sequence.{part}"].astype(np.int64) for part in ("high", "middle", "low"))
    whole: NDArray[np.int64] = (high << 42) | (middle << 21) | low
    return whole
