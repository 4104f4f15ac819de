"""SeqClip: whole sequences that drifted from the policy that generated them, though no single token stands out."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


def mis(
    log_ratio: Tensor, mask: Tensor, of: Literal["sum", "mean"] = "mean", low: float = 0.5, high: float = 2.0
) -> Tensor:
    """Masked importance sampling by sequence: 1 where the sequence's ratio lies within [low, high], else 0.

    After Liu et al. 2025, "When Speed Kills Stability" (yingru.notion.site), who mask by the sequence's ratio; the
    "mean" is its geometric form, which does not grow with the length. Left-out sequences bias the expected gradient
    towards those on which engine and trainer agree.

    Args:
        log_ratio: (B, T) logp - rollout_logp in nats; NaN counts as 0. A sequence that holds both +inf and -inf is
            left out.
        mask: (B, T), true where a token is trained.
        of: the sequence's ratio is exp of the "sum" of its log-ratios, or of their "mean".
        low, high: bounds of that ratio.

    Returns:
        (B, 1) of log_ratio's dtype. The gradient is that of the kept sequences alone.

    Raises:
        ValueError: bounds that are not 0 <= low < high, or another `of`.
    """
    if not 0 <= low < high:
        raise ValueError(f"mis(low={low!r}, high={high!r}): give 0 <= low < high")
    if of not in ("sum", "mean"):
        raise ValueError(f"mis(of={of!r}): give 'sum' or 'mean'")
    trained = mask.bool()
    # Infinite ones stay so: both +inf and -inf in a sequence make NaN, which lies within no bounds.
    known = torch.where(log_ratio.isnan(), 0.0, log_ratio)
    total = torch.where(trained, known, 0.0).sum(-1, keepdim=True)
    level = total if of == "sum" else total / trained.sum(-1, keepdim=True).clamp(min=1)
    kept = (level >= (math.log(low) if low > 0 else -math.inf)) & (level <= math.log(high))
    return kept.to(log_ratio.dtype)
