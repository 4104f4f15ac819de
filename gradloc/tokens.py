"""A step's tokens in one flat table on the host, in the order in which every method of this room counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seismograd.telemetry.records import TokenBatch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Tokens:
    """N tokens of one rank: those that are trained, and those that have a weight in the loss all the same.

    Args:
        batch, row, column: (N,) where each token is; its position in input_ids is column + 1.
        sequence: (N,) index of its sequence, counted through all micro-batches; -1 where unknown.
        trained: (N,) whether the mask trains it.
        left_out: (N,) whether a mask of the loss's own leaves it out.
        weight: (N,) dL/dlogp, 0 where no backward has brought one.
        logp, rollout, shadow, advantage: (N,), NaN where unknown.
        log_ratio: (N,) logp less the rollout's (or the old policy's, where there is none), NaN where unknown.
    """

    batch: Ints
    row: Ints
    column: Ints
    sequence: Ints
    trained: Flags
    left_out: Flags
    weight: Floats
    logp: Floats
    rollout: Floats
    shadow: Floats
    advantage: Floats
    log_ratio: Floats

    @classmethod
    def of(cls, batches: Sequence[TokenBatch]) -> Tokens:
        """The tokens of all micro-batches, in their order."""
        parts = [_host(i, batch) for i, batch in enumerate(batches)]
        start = 0
        for part in parts:
            known = part["sequence"] >= 0
            names, dense = np.unique(part["sequence"][known], return_inverse=True)
            part["sequence"][known] = dense + start
            start += len(names)
        reference = [part["old"] if np.isnan(part["rollout"]).all() else part["rollout"] for part in parts]

        def floats(key: str) -> Floats:
            return np.concatenate([part[key] for part in parts]) if parts else np.empty(0)

        def ints(key: str) -> Ints:
            return floats(key).astype(np.int64)

        logp = floats("logp")
        return cls(
            batch=ints("batch"),
            row=ints("row"),
            column=ints("column"),
            sequence=ints("sequence"),
            trained=floats("trained").astype(bool),
            left_out=floats("left_out").astype(bool),
            weight=floats("weight"),
            logp=logp,
            rollout=floats("rollout"),
            shadow=floats("shadow"),
            advantage=floats("advantage"),
            log_ratio=logp - (np.concatenate(reference) if parts else np.empty(0)),
        )

    def __len__(self) -> int:
        return len(self.weight)

    def of_batch(self, i: int) -> Ints:
        """Indices of the tokens of micro-batch `i`."""
        return np.flatnonzero(self.batch == i)

    def pick(self, i: int, values: Tensor) -> Floats:
        """From (B, T-1) of micro-batch `i`, the values of its tokens, in their order."""
        chosen = self.of_batch(i)
        return values.detach().cpu().double().numpy()[self.row[chosen], self.column[chosen]]

    def weights(self, i: int, like: Tensor, chosen: Ints | None = None) -> Tensor:
        """(B, T-1) dL/dlogp of micro-batch `i`, on the device of `like`; 0 but for the chosen tokens (all if None)."""
        indices = self.of_batch(i) if chosen is None else chosen[self.batch[chosen] == i]
        spread = np.zeros(tuple(like.shape))
        spread[self.row[indices], self.column[indices]] = self.weight[indices]
        return torch.as_tensor(spread, dtype=torch.float32, device=like.device)


def _host(i: int, batch: TokenBatch) -> dict[str, Floats]:
    """One micro-batch's columns; those that it lacks are NaN."""
    shape = tuple(batch.logp.shape)

    def column(x: Tensor | None) -> Floats:
        if x is None:
            return np.full(shape, np.nan)
        return np.broadcast_to(x.detach().cpu().double().numpy(), shape)

    trained = column(batch.mask) != 0
    weight = np.zeros(shape) if batch.loss_weight is None else column(batch.loss_weight)
    left_out = np.zeros(shape)
    for flags in batch.left_out.values():
        left_out = left_out + (np.nan_to_num(column(flags)) != 0)
    row, col = np.nonzero(trained | (weight != 0))
    sequence = np.broadcast_to(np.arange(shape[0], dtype=np.float64)[:, None], shape)
    if batch.sequence is not None:
        sequence = column(batch.sequence)
    columns = {
        "sequence": sequence,
        "trained": trained,
        "left_out": left_out,
        "weight": weight,
        "logp": column(batch.logp),
        "rollout": column(batch.rollout_logp),
        "old": column(batch.old_logp),
        "shadow": column(batch.shadow_logp),
        "advantage": column(batch.advantage),
    }
    picked = {key: np.array(values[row, col], dtype=np.float64) for key, values in columns.items()}
    places = {"batch": np.full(len(row), i), "row": row, "column": col}
    return {**picked, **{key: np.asarray(x, dtype=np.float64) for key, x in places.items()}}
