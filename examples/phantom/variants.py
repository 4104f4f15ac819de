"""The runs that are compared: who computes in which precision, and what the loss makes of the ratio."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from seismograd import ClipSpec
from seismograd.controls import (
    WIDE,
    clean_log_ratio,
    clipped_loss,
    reinforce_loss,
    unit_ratio_loss,
)

Loss = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""(logp, old_logp, advantage, shadow_logp or None, eps), each (B, C) or (B, 1), to the loss of each token (B, C)."""


def _clipped(logp: Tensor, old_logp: Tensor, advantage: Tensor, shadow_logp: Tensor | None, eps: float) -> Tensor:
    return clipped_loss(logp - old_logp, advantage, eps, eps)


def _clean(logp: Tensor, old_logp: Tensor, advantage: Tensor, shadow_logp: Tensor | None, eps: float) -> Tensor:
    assert shadow_logp is not None
    return clipped_loss(clean_log_ratio(logp, old_logp, shadow_logp), advantage, eps, eps)


def _unit(logp: Tensor, old_logp: Tensor, advantage: Tensor, shadow_logp: Tensor | None, eps: float) -> Tensor:
    return unit_ratio_loss(logp, advantage)


def _wide(logp: Tensor, old_logp: Tensor, advantage: Tensor, shadow_logp: Tensor | None, eps: float) -> Tensor:
    return clipped_loss(logp - old_logp, advantage, *WIDE)


def _detach(logp: Tensor, old_logp: Tensor, advantage: Tensor, shadow_logp: Tensor | None, eps: float) -> Tensor:
    return reinforce_loss(logp, logp - old_logp, advantage)


@dataclass(frozen=True)
class Variant:
    """One of the compared runs.

    Args:
        key: short name.
        what: in plain words.
        training: precision of the trainer's forward; the weights are float32 always.
        rollout: precision of the engine, and so of the shadow.
        loss: of each token.
        clean: the loss wants the shadow's log-probs.
        bounds: (eps_low, eps_high) where the width of the experiment is not meant; infinity is no bound.
        scale: loss scale.
    """

    key: str
    what: str
    training: Literal["fp32", "bf16", "fp16"]
    loss: Loss
    rollout: Literal["bf16", "fp16"] = "bf16"
    clean: bool = False
    bounds: tuple[float, float] | None = None
    scale: float = 1.0

    def clip(self, eps: float) -> ClipSpec:
        """What the loop tells seismograd about its loss."""
        low, high = (eps, eps) if self.bounds is None else self.bounds
        return ClipSpec(eps_low=low, eps_high=high)

    @property
    def clips_at_eps(self) -> bool:
        """Whether the width of the experiment makes a difference to it."""
        return self.bounds is None


NO_BOUND = (math.inf, math.inf)

A = Variant("A", "BF16 autocast in training too", "bf16", _clipped)
B = Variant("B", "FP32 training", "fp32", _clipped)
F = Variant("F", "FP32 training, ratio = 1", "fp32", _unit, bounds=NO_BOUND)
G = Variant("G", "FP32 training, clean ratio", "fp32", _clean, clean=True)
WIDE_EPS = Variant("wide", "FP32 training, clip of a factor of 5", "fp32", _wide, bounds=WIDE)
DETACH = Variant("detach", "FP32 training, detached weight, no clip", "fp32", _detach, bounds=NO_BOUND)
FP16 = Variant("FP16", "FP16 on both sides", "fp16", _clipped, rollout="fp16", scale=1024.0)
