"""Which tokens lose their policy gradient, to what, and whether precision is to blame.

Clipped means that the policy gradient is really taken away. loss_weight == 0 would say so only where nothing else
passes through logp (with a KL term it never is 0), so the formula of each `ClipSpec` is applied to the trainer's own
inputs. Beside the actual ratio stands the clean one, without the gap of precision; every token falls in one of four
cells:

                      clean ratio clips    clean ratio passes
    actual clips      legitimate           phantom
    actual passes     hidden               open
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seismograd.collectors.ratio import beta
from seismograd.collectors.table import Flags, Floats, TokenTable
from seismograd.telemetry.records import ClipSpec, Reading


@dataclass(frozen=True)
class Cells:
    """Each token's cell, (N,) bool, one of the four true where the token is counted.

    Tokens without a finite ratio are counted in none.
    """

    legitimate: Flags
    phantom: Flags
    hidden: Flags
    open: Flags

    @classmethod
    def of(cls, actual: Flags, clean: Flags, counted: Flags) -> Cells:
        return cls(
            legitimate=counted & actual & clean,
            phantom=counted & actual & ~clean,
            hidden=counted & ~actual & clean,
            open=counted & ~actual & ~clean,
        )


def clip_readings(table: TokenTable, specs: Sequence[ClipSpec]) -> list[Reading]:
    """The four cells of each spec (where the clean ratio is known) and the tokens taken away by reason (always)."""
    readings: list[Reading] = []
    taken: dict[str, Flags] = {}
    for spec in specs:
        actual = actual_log_ratio(table, spec)
        if actual is None:
            continue
        reason = "clip" if spec.ratio == "ppo" else "importance"
        actual_taken = taken_away(table, spec, actual)
        taken[reason] = taken.get(reason, np.zeros_like(actual_taken)) | actual_taken
        clean = clean_log_ratio(table, spec, actual)
        if clean is None:
            continue
        counted = table.trained & np.isfinite(actual) & np.isfinite(clean)
        if counted.any():
            cells = Cells.of(actual_taken, taken_away(table, spec, clean), counted)
            region = Cells.of(outside(table, spec, actual), outside(table, spec, clean), counted)
            readings += _fractions("clip_fraction", cells, spec, counted)
            readings += _fractions("clip_region_fraction", region, spec, counted)
    return readings + taken_readings(table, taken)


def taken_readings(table: TokenTable, taken: dict[str, Flags]) -> list[Reading]:
    """gradient_taken_fraction by reason, of all completion tokens."""
    reasons = dict(taken)
    for reason, flags in table.left_out.items():
        reasons[reason] = reasons.get(reason, np.zeros_like(flags)) | flags
    if table.advantage is not None:
        reasons["zero_advantage"] = table.trained & (table.advantage == 0)
    return [
        Reading("gradient_taken_fraction", float(flags.mean()), {"reason": reason})
        for reason, flags in reasons.items()
        if flags.size
    ]


def actual_log_ratio(table: TokenTable, spec: ClipSpec) -> Floats | None:
    """(N,) the token's log-ratio that the loss limits, or None where its reference is not known."""
    if spec.level != "token" and not table.sequences_known:
        return None
    if spec.ratio == "ppo":
        reference = table.rollout_logp if table.old_logp is None else table.old_logp
        return None if reference is None else table.logp - reference
    if table.old_logp is None or table.rollout_logp is None:
        return None
    # An engine that could not score a token gives NaN; losses take its ratio as 1 (TRL: nan_to_num of the difference).
    return np.nan_to_num(table.old_logp - table.rollout_logp, nan=0.0, posinf=np.inf, neginf=-np.inf)


def clean_log_ratio(table: TokenTable, spec: ClipSpec, actual: Floats) -> Floats | None:
    """(N,) the log-ratio without the gap of precision, or None where the gap has not been measured.

    A PPO ratio between two forwards of the training precision has no gap in it. An importance ratio has the gap of the
    weights that `old_logp` was computed with; the one measured at the present weights stands for it.
    """
    if spec.ratio == "ppo" and not _reference_is_engine(table):
        return actual
    gap = beta(table)
    return None if gap is None else actual - gap


def outside(table: TokenTable, spec: ClipSpec, log_ratio: Floats) -> Flags:
    """(N,) whether the token's ratio, at the spec's level, lies outside the bounds."""
    low, high = _bounds(table, spec, log_ratio)
    return low | high


def taken_away(table: TokenTable, spec: ClipSpec, log_ratio: Floats) -> Flags:
    """(N,) whether the token's policy gradient is taken away at this log-ratio.

    clip: min(r A, clip(r) A) is constant in r where r > 1 + eps_high and A > 0, or r < 1 - eps_low and A < 0; with
    delta also where r > delta and A < 0. mask: outside the bounds. cap and truncate only limit a weight: nowhere.
    """
    low, high = _bounds(table, spec, log_ratio)
    if spec.kind == "mask":
        return table.trained & (low | high)
    if spec.kind != "clip" or table.advantage is None:
        return np.zeros(len(log_ratio), dtype=bool)
    up, down = table.advantage > 0, table.advantage < 0
    taken = (high & up) | (low & down)
    if spec.delta is not None:
        taken |= (at_level(table, spec, log_ratio) > np.log(spec.delta)) & down
    return table.trained & taken


def _bounds(table: TokenTable, spec: ClipSpec, log_ratio: Floats) -> tuple[Flags, Flags]:
    """(below the lower bound, above the upper bound), compared on the log scale, where nothing overflows."""
    level = at_level(table, spec, log_ratio)
    low = np.log(1 - spec.eps_low) if spec.eps_low < 1 else -np.inf
    high = np.log1p(spec.eps_high)
    return level < low, level > high


def at_level(table: TokenTable, spec: ClipSpec, log_ratio: Floats) -> Floats:
    """(N,) the log-ratio that decides for each token: its own, or its sequence's mean or sum."""
    if spec.level == "token":
        return log_ratio
    sums, counts = table.sum_by_sequence(np.nan_to_num(log_ratio), table.trained)
    whole = sums / np.maximum(counts, 1) if spec.level == "sequence_mean" else sums
    return whole[table.sequence]


def _reference_is_engine(table: TokenTable) -> bool:
    if not table.engine or table.rollout_logp is None:
        return False
    if table.old_logp is None:
        return True
    known = table.trained & np.isfinite(table.rollout_logp)
    return bool(known.any()) and bool(np.array_equal(table.old_logp[known], table.rollout_logp[known]))


def _fractions(name: str, cells: Cells, spec: ClipSpec, counted: Flags) -> list[Reading]:
    total = counted.sum()
    return [
        Reading(name, float(getattr(cells, cell).sum() / total), {"cell": cell, "ratio": spec.ratio})
        for cell in ("legitimate", "phantom", "hidden", "open")
    ]
