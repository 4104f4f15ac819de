"""The log-ratio between rollout and training, and its two parts: what the policy changed and what precision did.

    log r_t = logp_t - rollout_logp_t = alpha_t + beta_t
    alpha_t = shadow_logp_t - rollout_logp_t     the policy's change (plus the engines' own difference)
    beta_t  = logp_t - shadow_logp_t             the gap between the training forward and the rollout's precision

Where the trainer recomputed the rollout's log-probs itself, both sides have the training precision: then alpha is the
whole log-ratio, and beta is what a rollout engine of the shadow's precision would add. Means are over trained tokens
whose values are finite; the others are counted in nonfinite_total.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seismograd.collectors.table import Flags, Floats, TokenTable
from seismograd.telemetry.records import Reading

RARITY = (("common", -5.0, np.inf), ("uncommon", -20.0, -5.0), ("rare", -np.inf, -20.0))


def beta(table: TokenTable) -> Floats | None:
    """(N,) logp - shadow_logp, or None where the shadow probe did not run."""
    return None if table.shadow_logp is None else table.logp - table.shadow_logp


def alpha(table: TokenTable) -> Floats | None:
    """(N,) the policy's share of the log-ratio, or None where it is not known."""
    if table.rollout_logp is None:
        return None
    if not table.engine:
        return table.logp - table.rollout_logp
    return None if table.shadow_logp is None else table.shadow_logp - table.rollout_logp


def alpha_beta_readings(table: TokenTable) -> list[Reading]:
    """alpha, beta, their quotient, and beta by the token's rarity and against the advantage."""
    readings = []
    a, b = alpha(table), beta(table)
    a_mean = b_mean = None
    if a is not None and (ok := table.trained & np.isfinite(a)).any():
        a_mean = float(np.abs(a[ok]).mean())
        readings += [Reading("alpha_abs_mean", a_mean), Reading("alpha_mean", float(a[ok].mean()))]
        if table.engine and (fresh := ok & (table.staleness == 0)).any():
            readings.append(Reading("alpha_floor", float(np.abs(a[fresh]).mean())))
    if b is not None and (ok := table.trained & np.isfinite(b)).any():
        b_mean = float(np.abs(b[ok]).mean())
        readings += [
            Reading("beta_abs_mean", b_mean),
            Reading("beta_mean", float(b[ok].mean())),
            Reading("beta_std", float(b[ok].std())),
            Reading("beta_abs_max", float(np.abs(b[ok]).max())),
            *_by_rarity(table, b, ok),
            *_against_advantage(table, b, ok),
        ]
    # Without a gap of precision the quotient has no meaning: NaN, so that no sink goes on showing an earlier one.
    if table.engine and a_mean is not None and b_mean is not None:
        readings.append(Reading("snr", a_mean / b_mean if b_mean > 1e-12 else float("nan")))
    return readings


def log_ratio_readings(table: TokenTable) -> list[Reading]:
    """Extremes of the unclamped log-ratio, by token and summed by sequence, and the KL estimators."""
    if table.rollout_logp is None:
        return []
    log_ratio = table.logp - table.rollout_logp
    ok = table.trained & np.isfinite(log_ratio)
    if not ok.any():
        return []
    sums, counts = table.sum_by_sequence(log_ratio, ok)
    chosen = log_ratio[ok]
    with np.errstate(over="ignore"):
        k3 = float(np.mean(np.expm1(chosen) - chosen))
    return [
        *stats("log_ratio", chosen),
        *(stats("sequence_log_ratio", sums[counts > 0]) if table.sequences_known else ()),
        Reading("kl", float(-chosen.mean()), {"estimator": "k1"}),
        Reading("kl", k3, {"estimator": "k3"}),
    ]


def loss_weight_readings(table: TokenTable) -> list[Reading]:
    """How the loss weighs the step's tokens."""
    readings = [Reading("trained_tokens", float(table.trained.sum()))]
    if table.loss_weight is None:
        return readings
    weight = table.loss_weight[table.trained & np.isfinite(table.loss_weight)]
    if weight.size == 0:
        return readings
    readings += [
        Reading("loss_weight", float(np.abs(weight).max()), {"stat": "abs_max"}),
        Reading("loss_weight", float(np.sqrt(np.square(weight).sum())), {"stat": "l2"}),
        Reading("loss_weight", float(np.abs(weight).mean()), {"stat": "abs_mean"}),
    ]
    if table.sequences_known:
        readings.append(Reading("sequence_loss_weight", largest_sequence_pull(table)))
    return readings


def largest_sequence_pull(table: TokenTable) -> float:
    """max over sequences of |sum_t loss_weight_t * logp_t|, non-finite tokens left out."""
    assert table.loss_weight is not None
    pull = table.loss_weight * table.logp
    sums, _ = table.sum_by_sequence(pull, table.trained & np.isfinite(pull))
    return float(np.abs(sums).max())


def largest_log_ratio(table: TokenTable) -> float | None:
    """max over trained tokens of |log r|, or None where no ratio is known and finite."""
    if table.rollout_logp is None:
        return None
    log_ratio = np.abs(table.logp - table.rollout_logp)[table.trained]
    known = log_ratio[np.isfinite(log_ratio)]
    return float(known.max()) if known.size else None


def nonfinite_counts(table: TokenTable) -> dict[str, int]:
    """Trained tokens whose value is not finite, by column; columns that the step does not have are left out."""
    columns: Sequence[tuple[str, Floats | None]] = (
        ("logp", table.logp),
        ("rollout_logp", table.rollout_logp),
        ("shadow_logp", table.shadow_logp),
        ("loss_weight", table.loss_weight),
        ("advantage", table.advantage),
    )
    found = {}
    for name, values in columns:
        if values is not None:
            bad = table.trained & ~np.isfinite(values)
            found[name] = int((bad & ~table.lacking[name] if name in table.lacking else bad).sum())
    return found


def stats(name: str, values: Floats) -> list[Reading]:
    """Mean, standard deviation and extremes of (n,) values, n >= 1, under a metric with the label stat."""
    found = {
        "mean": values.mean(),
        "std": values.std(),
        "min": values.min(),
        "max": values.max(),
        "abs_max": np.abs(values).max(),
    }
    return [Reading(name, float(value), {"stat": stat}) for stat, value in found.items()]


def _by_rarity(table: TokenTable, b: Floats, ok: Flags) -> list[Reading]:
    logp = table.logp if table.rollout_logp is None else table.rollout_logp
    readings = []
    for rarity, low, high in RARITY:
        if (chosen := ok & (logp > low) & (logp <= high)).any():
            readings.append(Reading("beta_abs_mean_by_rarity", float(np.abs(b[chosen]).mean()), {"rarity": rarity}))
    return readings


def _against_advantage(table: TokenTable, b: Floats, ok: Flags) -> list[Reading]:
    if table.advantage is None:
        return []
    chosen = ok & np.isfinite(table.advantage)
    if chosen.sum() < 2 or table.advantage[chosen].std() == 0 or b[chosen].std() == 0:
        return []
    return [Reading("beta_advantage_correlation", float(np.corrcoef(b[chosen], table.advantage[chosen])[0, 1]))]
