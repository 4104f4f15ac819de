"""Whether a replay is the forward that was recorded, by its log-probs: what is another forward is not believed."""

from __future__ import annotations

import math

import numpy as np

from seismograd.gradloc.replay import Replay
from seismograd.gradloc.tokens import Floats

# Nats, median: how far the replayed log-probs may lie from what training recorded.
_SAME, _SAME_ROUNDED = 0.01, 0.1


def nats_off(replayed: Floats, recorded: Floats, weight: Floats) -> float:
    """Median distance over the tokens whose recorded log-prob is finite, 0 where there are none; infinite where one
    that has a weight in the loss is not finite in the replay, since no finite gradient came from that.
    """
    known = np.isfinite(recorded)
    lost = known & ~np.isfinite(replayed)
    if (lost & (weight != 0)).any():
        return math.inf
    off = np.abs(replayed - recorded)[known & ~lost]
    return float(np.median(off)) if len(off) else 0.0


def most_off(replay: Replay) -> float:
    """Nats beyond which it is another forward."""
    return _SAME if replay.precise else _SAME_ROUNDED


def another_forward(off: float) -> str:
    """For `Attempt`, from `nats_off`."""
    if math.isinf(off):
        return "the replay is another forward: it is not finite where the step's was"
    return f"the replay is another forward: its log-probabilities are {off:.2g} nats off"
