"""A step's tokens on the host: one row a token of the completion, one array a column, all micro-batches together.

The signals of ratio.py and clipping.py are pure functions of this table, computed on the worker's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

FLOAT_COLUMNS = ("logp", "rollout_logp", "old_logp", "shadow_logp", "loss_weight", "advantage")


@dataclass(frozen=True)
class HostBatch:
    """One micro-batch after the transfer.

    Args:
        mask: (B, T-1), nonzero where a token is trained.
        columns: those of `FLOAT_COLUMNS` that the micro-batch has, (B, T-1) or (B, 1) each.
        left_out: (B, T-1) or (B, 1) by reason, nonzero where the loss leaves a token out.
        staleness: (B,) optimizer steps since the rollout's weights, or None.
        sequence: (B, T-1) each token's sequence in the micro-batch, -1 where unknown; None where each row is one.
    """

    mask: NDArray[np.float32]
    columns: Mapping[str, NDArray[np.float32]]
    left_out: Mapping[str, NDArray[np.float32]]
    staleness: NDArray[np.float32] | None
    sequence: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class TokenTable:
    """N tokens of S sequences. Columns that a micro-batch lacks are NaN there; a column that none has is None.

    Args:
        trained: (N,) false for tokens of the completion that are masked out (tool output).
        sequence: (N,) index of each token's sequence, 0 to S-1; -1 where unknown.
        sequences: S.
        logp, rollout_logp, old_logp, shadow_logp: (N,) nats.
        loss_weight: (N,) dL/dlogp.
        advantage: (N,).
        left_out: (N,) by reason.
        staleness: (N,) optimizer steps, NaN where unknown.
        engine: whether a rollout engine gave `rollout_logp`.
        lacking: (N,) by column: tokens whose micro-batch does not have that column; only where some have it.
    """

    trained: Flags
    sequence: NDArray[np.int64]
    sequences: int
    logp: Floats
    rollout_logp: Floats | None
    old_logp: Floats | None
    shadow_logp: Floats | None
    loss_weight: Floats | None
    advantage: Floats | None
    left_out: Mapping[str, Flags]
    staleness: Floats
    engine: bool
    lacking: Mapping[str, Flags]

    @classmethod
    def of(cls, batches: Sequence[HostBatch], engine: bool) -> TokenTable:
        """The completions' tokens of all micro-batches, in their order."""
        rows, columns = [], []
        for batch in batches:
            kept = batch.mask != 0
            if "tool" in batch.left_out:
                kept = kept | (np.broadcast_to(batch.left_out["tool"], kept.shape) != 0)
            row, column = np.nonzero(kept)
            rows.append(row)
            columns.append(column)

        def gather(arrays: Sequence[NDArray[np.float32] | None]) -> Floats | None:
            if all(array is None for array in arrays):
                return None
            parts = [
                np.full(len(row), np.nan)
                if array is None
                else np.broadcast_to(array, batch.mask.shape)[row, column].astype(np.float64)
                for array, batch, row, column in zip(arrays, batches, rows, columns, strict=True)
            ]
            return np.concatenate(parts)

        named = {key: gather([batch.columns.get(key) for batch in batches]) for key in FLOAT_COLUMNS}
        trained = gather([batch.mask for batch in batches])
        logp = named.pop("logp")
        staleness = gather([None if b.staleness is None else b.staleness[:, None] for b in batches])
        assert trained is not None
        assert logp is not None
        reasons = dict.fromkeys(reason for batch in batches for reason in batch.left_out)
        left_out = {}
        for reason in reasons:
            flags = gather([batch.left_out.get(reason) for batch in batches])
            assert flags is not None
            left_out[reason] = np.nan_to_num(flags) != 0
        lacking = {}
        for key in FLOAT_COLUMNS:
            lacks = [key not in batch.columns for batch in batches]
            if any(lacks) and not all(lacks):
                lacking[key] = np.repeat(np.array(lacks), [len(row) for row in rows])
        sequence, sequences = _sequences(batches, rows, columns)
        return cls(
            trained=trained != 0,
            sequence=sequence,
            sequences=sequences,
            logp=logp,
            left_out=left_out,
            staleness=np.full(len(logp), np.nan) if staleness is None else staleness,
            engine=engine,
            lacking=lacking,
            **named,
        )

    def sum_by_sequence(self, values: Floats, chosen: Flags) -> tuple[Floats, NDArray[np.int64]]:
        """(S,) sums of the chosen tokens' values, and (S,) how many there are; tokens of no known sequence left out."""
        chosen = chosen & (self.sequence >= 0)
        sums: Floats = np.bincount(self.sequence[chosen], values[chosen], minlength=self.sequences).astype(np.float64)
        return sums, np.bincount(self.sequence[chosen], minlength=self.sequences).astype(np.int64)

    @property
    def sequences_known(self) -> bool:
        """Whether every token's sequence is known, so that what is summed or averaged by sequence has a meaning."""
        return bool((self.sequence >= 0).all())


def _sequences(
    batches: Sequence[HostBatch], rows: Sequence[NDArray[np.int64]], columns: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], int]:
    """Each kept token's sequence, counted through all micro-batches, and how many sequences there are."""
    found, start = [], 0
    for batch, row, column in zip(batches, rows, columns, strict=True):
        if batch.sequence is None:
            found.append(row + start)
            start += batch.mask.shape[0]
        else:
            own = batch.sequence[row, column].copy()
            names, dense = np.unique(own[own >= 0], return_inverse=True)
            own[own >= 0] = dense + start
            found.append(own)
            start += len(names)
    return np.concatenate(found), start
