"""The clipped surrogate objective, as the policy's loss maximises it.

    mean_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)      Schulman et al. 2017, arXiv:1707.06347, eq. 7

By the bounds, the ratio and the level of each `ClipSpec` of kind "clip"; with a `delta` the unclipped ratio is held
below it (dual clip, Ye et al. 2020, arXiv:1912.09729, in the form of TRL's GRPOTrainer). The mean is over trained
tokens, whatever the loss's own normalisation is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seismograd.collectors.clipping import actual_log_ratio, at_level
from seismograd.collectors.table import Floats, TokenTable
from seismograd.telemetry.records import ClipSpec, Reading


def surrogate_readings(table: TokenTable, specs: Sequence[ClipSpec]) -> list[Reading]:
    """The objective of each spec, of the tokens whose ratio and advantage are known and finite."""
    readings = []
    for spec in specs:
        log_ratio = actual_log_ratio(table, spec)
        if spec.kind != "clip" or log_ratio is None or table.advantage is None:
            continue
        ok = table.trained & np.isfinite(log_ratio) & np.isfinite(table.advantage)
        if ok.any():
            terms = _terms(at_level(table, spec, log_ratio)[ok], table.advantage[ok], spec)
            readings.append(Reading("surrogate_objective", float(terms.mean()), {"ratio": spec.ratio}))
    return readings


def _terms(log_ratio: Floats, advantage: Floats, spec: ClipSpec) -> Floats:
    """(n,) min(r A, clip(r) A)."""
    with np.errstate(over="ignore", invalid="ignore"):  # exp of what losses clamp
        ratio = np.exp(log_ratio)
        clipped = np.clip(ratio, max(1 - spec.eps_low, 0.0), 1 + spec.eps_high)
        free = ratio if spec.delta is None else np.minimum(ratio, spec.delta)
        terms: Floats = np.minimum(free * advantage, clipped * advantage)
    return np.where(advantage == 0, 0.0, terms)
