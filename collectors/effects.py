"""What the controls do, and what they would do: states, LayerClip's scales, and the tokens that they would touch."""

from __future__ import annotations

import numpy as np
import torch

from seismograd.collectors.payload import StepPayload
from seismograd.collectors.table import TokenTable
from seismograd.controls.seqclip import mis
from seismograd.controls.tokenclip import icepop, tis
from seismograd.telemetry.records import Reading


def control_readings(payload: StepPayload) -> list[Reading]:
    """The controls' states, and the scale of each layer: as applied, or as it would have been."""
    found = [Reading("control_state", float(state), {"control": name}) for name, state in payload.controls.items()]
    if payload.scales is not None:
        left = payload.scales.scales if payload.scales.finite else np.zeros(len(payload.scales.units))
        pairs = zip(payload.scales.units, left, strict=True)
        found += [Reading("layerclip_scale", float(scale), {"layer": unit}) for unit, scale in pairs]
    return found


def what_if_readings(table: TokenTable) -> list[Reading]:
    """The share of trained tokens whose weight each ratio control would change, at its default bounds.

    The ratio is that of the trained policy to the engine, exp(logp - rollout_logp). Without an engine's log-probs there
    is nothing that these controls compare with.
    """
    if not table.engine or table.rollout_logp is None or not table.trained.any():
        return []
    trained = torch.from_numpy(table.trained)
    log_ratio = torch.where(trained, torch.from_numpy(table.logp - table.rollout_logp).nan_to_num(nan=0.0), 0.0)
    tokens = {"tis": tis(log_ratio) != log_ratio.exp(), "icepop": icepop(log_ratio) == 0}
    found = {name: float(touched[trained].double().mean()) for name, touched in tokens.items()}
    if table.sequences_known:
        rows = torch.from_numpy(table.sequence)
        count = torch.zeros(table.sequences, dtype=torch.float64).index_add_(0, rows, trained.double())
        total = torch.zeros_like(count).index_add_(0, rows, log_ratio)
        for name, level in (("mis_sum", total), ("mis_mean", total / count.clamp(min=1))):
            out = mis(level.unsqueeze(1), torch.ones(len(level), 1), "sum").squeeze(1) == 0
            found[name] = float(out[rows][trained].double().mean())
    return [Reading("control_effect_fraction", share, {"control": name}) for name, share in found.items()]
