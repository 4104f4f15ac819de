"""TokenClip: the importance ratio of a token that the rollout engine and the trainer disagree about.

    r_t = exp(logp_t - rollout_logp_t)

Both functions return the factor that the token's loss is weighed with, from its log-ratio.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def tis(log_ratio: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling: min(r_t, cap).

    Args:
        log_ratio: any shape, logp - rollout_logp in nats; NaN, where an engine could not score a token, counts as 0.
        cap: C; 2 is what Yao et al. 2025 (fengyao.notion.site/off-policy-rl) train with.

    Returns:
        The weights, the shape and dtype of `log_ratio`. The expected gradient is biased towards the rollout's policy
        where r_t > cap, and unbiased elsewhere.

    Raises:
        ValueError: a cap that is not above 0.
    """
    if not cap > 0:
        raise ValueError(f"tis(cap={cap!r}): give a number above 0")
    return torch.nan_to_num(log_ratio, nan=0.0).clamp(max=math.log(cap)).exp()


def icepop(log_ratio: Tensor, low: float = 0.5, high: float = 5.0) -> Tensor:
    """IcePop: r_t where it lies within [low, high], else 0: the token is left out.

    Args:
        log_ratio: any shape, logp - rollout_logp in nats; NaN counts as 0.
        low, high: bounds of the ratio; the defaults are those of IcePop (Ring-1T report, arXiv:2510.18855).

    Returns:
        The weights, the shape and dtype of `log_ratio`.

    Raises:
        ValueError: bounds that are not 0 <= low < high.
    """
    if not 0 <= low < high:
        raise ValueError(f"icepop(low={low!r}, high={high!r}): give 0 <= low < high")
    log_ratio = torch.nan_to_num(log_ratio, nan=0.0)
    inside = (log_ratio >= (math.log(low) if low > 0 else -math.inf)) & (log_ratio <= math.log(high))
    # Masked before the exp, so that nothing overflows.
    return torch.where(inside, log_ratio, 0.0).exp() * inside
