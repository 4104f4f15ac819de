"""The step in progress: what the training thread knows of it so far, and what the rules look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from seismograd.collectors.payload import Gradients, Probed
from seismograd.collectors.ratio import largest_log_ratio, largest_sequence_pull, nonfinite_counts
from seismograd.collectors.table import TokenTable
from seismograd.controls.layerclip import LayerScales
from seismograd.telemetry.detector import Measured
from seismograd.telemetry.incidents import Explained
from seismograd.telemetry.records import Spike, TokenBatch


@dataclass
class Step:
    """Filled in by `StepMonitor` as the step goes.

    Args:
        number: optimizer step.
        began: time.perf_counter() at its begin.
        batches: its micro-batches so far.
        prepared: whether it has been probed, read and judged.
        shadowed: whether its batches have the shadow's log-probs.
        tokens, gradients, spikes, probed: once they are known.
        explained: the spike's localisation, where one ran.
        scales: what LayerClip makes of the gradients, where it is not off.
        applied: the same, where LayerClip acts.
        acted: it has been applied.
        clipped: whether the clip that we replace came before the optimizer.
        probes_next: that the step after it runs, by this rank's budget, then by rank 0's.
    """

    number: int
    began: float
    batches: list[TokenBatch] = field(default_factory=list)
    prepared: bool = False
    shadowed: bool = False
    tokens: TokenTable | None = None
    gradients: Gradients | None = None
    spikes: tuple[Spike, ...] = ()
    probed: tuple[Probed, ...] = ()
    explained: Explained | None = None
    scales: LayerScales | None = None
    applied: LayerScales | None = None
    acted: bool = False
    clipped: bool = False
    probes_next: frozenset[str] = frozenset()


def measured_in(step: Step, overflow_expected: bool) -> Mapping[str, Measured]:
    """What the rules of kind "step" look at.

    Args:
        step: once its tokens and gradients are known.
        overflow_expected: the loss is scaled, so that non-finite gradients are routine.
    """
    found: dict[str, Measured] = {}
    nonfinite: dict[str, int] = {}
    if step.gradients is not None:
        series = step.gradients.grouping.series
        found["grad_norm"] = Measured([{"layer": a, "group": b} for a, b in series], step.gradients.norms)
        if not overflow_expected:
            nonfinite["gradient"] = step.gradients.nonfinite
    if step.tokens is not None:
        nonfinite |= nonfinite_counts(step.tokens)
        if overflow_expected:
            nonfinite.pop("loss_weight", None)
        weight = step.tokens.loss_weight
        if weight is not None and (ok := step.tokens.trained & np.isfinite(weight)).any():
            largest = np.array([np.abs(weight[ok]).max()])
            found["loss_weight"] = Measured([{"stat": "abs_max"}], largest)
            if step.tokens.sequences_known:
                found["sequence_loss_weight"] = Measured([{}], np.array([largest_sequence_pull(step.tokens)]))
        ratio = largest_log_ratio(step.tokens)
        if ratio is not None:
            found["log_ratio"] = Measured([{"stat": "abs_max"}], np.array([ratio]))
    if nonfinite:
        counts = np.array(list(nonfinite.values()), dtype=np.float64)
        found["nonfinite_total"] = Measured([{"where": where} for where in nonfinite], counts)
    return found


def merged(everybody: Sequence[Mapping[str, Measured]]) -> dict[str, Measured]:
    """What all ranks have seen, as one: gradient norms are reduced already and rank 0's, counts add up, the rest is the
    largest of all ranks.
    """
    found = dict(everybody[0])
    for other in everybody[1:]:
        for metric, measured in other.items():
            if metric == "grad_norm":
                continue
            mine = found.get(metric)
            if mine is None:
                found[metric] = measured
            elif metric == "nonfinite_total":
                found[metric] = _added(mine, measured)
            else:
                found[metric] = Measured(mine.labels, np.fmax(mine.values, measured.values))
    return found


def _added(a: Measured, b: Measured) -> Measured:
    counts: dict[str, float] = {}
    for measured in (a, b):
        for labels, value in zip(measured.labels, measured.values, strict=True):
            # Gradients are reduced: every rank has seen the same ones.
            where = labels["where"]
            counts[where] = value if where == "gradient" else counts.get(where, 0.0) + value
    return Measured([{"where": where} for where in counts], np.array(list(counts.values()), dtype=np.float64))
