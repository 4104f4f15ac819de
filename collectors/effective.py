"""Effective sample size: how many equally weighted samples the importance ratios are worth.

    ESS = (sum_i w_i)^2 / sum_i w_i^2,    w_i = exp(log r_i)

Kish 1965, Survey Sampling, 11.7; for importance weights Kong 1992 (University of Chicago, technical report 348). Over
their number n it lies between 1/n, where one sample has all the weight, and 1. A token's weight is its ratio, a
sequence's the product of its tokens' ratios.
"""

from __future__ import annotations

import numpy as np

from seismograd.collectors.table import Floats, TokenTable
from seismograd.telemetry.records import Reading


def effective_sample_size(log_weights: Floats) -> float:
    """ESS of the weights whose logarithms are given.

    Args:
        log_weights: (n,) finite, n >= 1, in nats. Divided by the largest weight first, so that nothing overflows.

    Returns:
        Between 1 and n.
    """
    weights = np.exp(log_weights - log_weights.max())
    return float(np.square(weights.sum()) / np.square(weights).sum())


def effective_sample_readings(table: TokenTable) -> list[Reading]:
    """ESS over their number, of the trained tokens and of the sequences whose log-ratio is known and finite."""
    if table.rollout_logp is None:
        return []
    log_ratio = table.logp - table.rollout_logp
    ok = table.trained & np.isfinite(log_ratio)
    if not ok.any():
        return []
    levels = {"token": log_ratio[ok]}
    if table.sequences_known:
        sums, counts = table.sum_by_sequence(log_ratio, ok)
        levels["sequence"] = sums[counts > 0]
    return [
        Reading("effective_sample_size_ratio", effective_sample_size(values) / len(values), {"level": level})
        for level, values in levels.items()
    ]
