"""A micro-batch's columns on their way through the transfer: tensors by name on the device, arrays on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from seismograd.collectors.table import FLOAT_COLUMNS, HostBatch
from seismograd.collectors.transfer import Host
from seismograd.telemetry.records import TokenBatch


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
        yield "sequence", batch.sequence
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
        sequence=host.get((i, "sequence")),
        staleness=staleness,
    )
