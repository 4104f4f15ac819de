"""Deployed improvement: whether a step moved the policy the way that its advantages asked, as the engine sees it.

mean_t (shadow_logp_t after the step - before) * sign(A_t)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seismograd.collectors.transfer import Host
from seismograd.telemetry.records import Reading, TokenBatch


@torch.no_grad()
def improvement(batches: Sequence[TokenBatch], after: Sequence[Tensor]) -> Tensor:
    """The mean over trained tokens whose gain is finite, a scalar on the device.

    Args:
        batches: each with its advantage and its shadow from before the step.
        after: (B, T-1) of each, the shadow at the moved weights.
    """
    total = torch.stack([_gain(b, logp) for b, logp in zip(batches, after, strict=True)]).sum(dim=0)
    return total[0] / total[1].clamp(min=1.0)


def improvement_readings(value: Host) -> list[Reading]:
    """Of what `improvement` gave, on the host."""
    return [Reading("deployed_improvement", float(value))]


def _gain(batch: TokenBatch, after: Tensor) -> Tensor:
    """(2,) sum of the trained tokens' (after - before) * sign(A), and their number."""
    assert batch.shadow_logp is not None
    assert batch.advantage is not None
    gain = (after - batch.shadow_logp) * torch.sign(batch.advantage)
    counted = batch.mask & torch.isfinite(gain)
    return torch.stack([torch.where(counted, gain, 0.0).sum(), counted.sum()])
