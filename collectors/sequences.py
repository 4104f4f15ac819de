"""What the ratios come to by sequence: GSPO's ratio, and which sequences a clip at that level takes away.

    s_i = exp(1/|y_i| sum_t log r_t)      the geometric mean of a sequence's ratios

Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, eq. 7. Their clip is far narrower than a
token's, since a mean over a sequence moves far less: 3e-4 below and 4e-4 above (section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seismograd.collectors.clipping import actual_log_ratio, taken_away
from seismograd.collectors.ratio import stats
from seismograd.collectors.table import Floats, TokenTable
from seismograd.telemetry.records import ClipSpec, Reading

GSPO = ClipSpec(eps_low=3e-4, eps_high=4e-4, level="sequence_mean")


def sequence_readings(table: TokenTable, specs: Sequence[ClipSpec]) -> list[Reading]:
    """Statistics of log s, and the share of sequences that are clipped: by the run's own clip where that is one of
    sequences, and by GSPO's published one.
    """
    if not table.sequences_known:
        return []
    readings = []
    if table.rollout_logp is not None:
        log_ratio = table.logp - table.rollout_logp
        ok = table.trained & np.isfinite(log_ratio)
        sums, counts = table.sum_by_sequence(log_ratio, ok)
        if ok.any():
            readings += stats("sequence_mean_log_ratio", sums[counts > 0] / counts[counts > 0])
    for bounds, spec in (*(("own", s) for s in specs if s.level != "token"), ("gspo", GSPO)):
        actual = actual_log_ratio(table, spec)
        if actual is not None and spec.kind in ("clip", "mask") and (share := _taken(table, spec, actual)) is not None:
            readings.append(Reading("sequence_clip_fraction", share, {"bounds": bounds, "ratio": spec.ratio}))
    return readings


def _taken(table: TokenTable, spec: ClipSpec, actual: Floats) -> float | None:
    """The share of sequences that lose the gradient of a token; None where no sequence has a token to lose."""
    counted = table.trained & np.isfinite(actual)
    if spec.kind == "clip":
        if table.advantage is None:
            return None
        counted &= np.isfinite(table.advantage)
    taken = counted & taken_away(table, spec, actual)
    _, tokens = table.sum_by_sequence(actual, counted)
    _, lost = table.sum_by_sequence(actual, taken)
    return float((lost[tokens > 0] > 0).mean()) if counted.any() else None
