"""Proportions between the layers' gradient norms of one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from seismograd.telemetry.records import Reading


def layer_proportions(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """rho_l = |g_l| over the geometric mean of the other layers' norms.

    Args:
        norms: (L,) one step's norms by layer.

    Returns:
        (L,); NaN for layers whose norm is 0 or not finite, which count for no other layer either, and everywhere where
        fewer than three layers are left.
    """
    usable = np.isfinite(norms) & (norms > 0)
    count = int(usable.sum())
    proportions = np.full_like(norms, np.nan)
    if count < 3:
        return proportions
    logs = np.log(norms[usable])
    proportions[usable] = np.exp(logs - (logs.sum() - logs) / (count - 1))
    return proportions


def proportion_readings(layers: Sequence[str], proportions: NDArray[np.float64]) -> list[Reading]:
    """The layers' proportions as readings, those that could not be measured left out."""
    return [
        Reading("layer_proportion", float(rho), {"layer": layer})
        for layer, rho in zip(layers, proportions, strict=True)
        if np.isfinite(rho)
    ]
