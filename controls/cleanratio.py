"""Clean ratio: a clipped policy loss that does not take the gap of precision for a change of policy.

A ratio between a trainer and a rollout engine of another precision holds two things:

    log r_t = logp_t - rollout_logp_t = alpha_t + beta_t
    alpha_t = shadow_logp_t - rollout_logp_t     what the policy changed since the rollout
    beta_t  = logp_t - shadow_logp_t             the gap of precision at the present weights

where shadow_logp is a forward of the present weights in the rollout's precision. PPO's clip sees their sum, so a token
that the policy did not move loses its gradient where |beta_t| alone passes the clip: phantom clipping. The study that
named it found that learning comes back once any of the three is gone, beta in the ratio, the ratio, or a clip that
binds; each way out is a function here: the clip on exp(alpha_t) alone (`clean_log_ratio`), no ratio at all
(`unit_ratio_loss`), a detached weight without a clip (`reinforce_loss`), and a clip too wide for beta (`clipped_loss`
with `WIDE`). Source: Defeating the trainer-generator precision mismatch in TRL, Hugging Face 2026
(aminedirohf-trainer-generator-bf16-mismatch.hf.space). The losses are one value a token; mask and average them as
your loop does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# (eps_low, eps_high), a factor of 5 either way: 1.6 nats, ten times the published spread of beta (standard deviation
# 0.149). The width is ours: symmetric in log r, with the upper bound of IcePop's mask (arXiv:2510.18855).
WIDE = (0.8, 4.0)


def clean_old_logp(old_logp: Tensor, logp: Tensor, shadow_logp: Tensor) -> Tensor:
    """The reference that takes the gap of precision out of a ratio: old_logp + beta, beta = logp - shadow_logp.

    Given to an unchanged loss in place of `old_logp`, the ratio's value is exp(alpha) and its gradient, exp(alpha) *
    grad logp, is that of the training precision. Only what the policy changed is clipped; inside of the bounds each
    token's gradient is exp(-beta) times that of the ratio exp(alpha + beta). So in expectation the tokens are weighed
    as the present policy, run in the rollout's precision, would sample them.

    Args:
        old_logp: any shape, what the rollout engine gave, in nats.
        logp: the same shape, of the training forward; it gets no gradient through the result.
        shadow_logp: the same shape, of a forward of the same weights in the rollout's precision, without dropout.

    Returns:
        The shape of `old_logp`, detached. Where beta is not finite, since one of the forwards could not score the
        token, `old_logp` as it is.

    Raises:
        ValueError: shapes that differ: broadcasting would mix up tokens.
    """
    if not old_logp.shape == logp.shape == shadow_logp.shape:
        raise ValueError(
            f"clean_old_logp: old_logp {tuple(old_logp.shape)}, logp {tuple(logp.shape)} and shadow_logp "
            f"{tuple(shadow_logp.shape)} must be of one shape, one value a token"
        )
    beta = (logp - shadow_logp).detach()
    return old_logp.detach() + torch.where(torch.isfinite(beta), beta, 0.0)


def clean_log_ratio(logp: Tensor, old_logp: Tensor, shadow_logp: Tensor) -> Tensor:
    """alpha with the training precision's gradient: logp - (old_logp + beta).

    Args:
        logp: any shape, of the training forward, with grad.
        old_logp, shadow_logp: see `clean_old_logp`.

    Returns:
        The shape of `logp`: the value of shadow_logp - old_logp, the gradient of logp. Feed it to `clipped_loss`.

    Raises:
        ValueError: shapes that differ.
    """
    return logp - clean_old_logp(old_logp, logp, shadow_logp)


def clipped_loss(log_ratio: Tensor, advantage: Tensor, eps_low: float = 0.2, eps_high: float = 0.2) -> Tensor:
    """PPO's clipped policy loss: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), arXiv:1707.06347 (7).

    A token gets no gradient where r > 1 + eps_high and A > 0, or r < 1 - eps_low and A < 0; else -r A grad logp. With
    ``*WIDE`` as bounds only a ratio beyond a factor of 5 is stopped.

    Args:
        log_ratio: any shape, in nats, with grad: logp - old_logp, or `clean_log_ratio`.
        advantage: broadcast against it.
        eps_low, eps_high: 0.2 is PPO's. An eps_low of 1 or more and an eps_high of infinity are no bounds.

    Returns:
        The loss of each token, the shape of `log_ratio`.

    Raises:
        ValueError: bounds that are negative or not numbers.
    """
    if not (eps_low >= 0 and eps_high >= 0):
        raise ValueError(f"clipped_loss(eps_low={eps_low!r}, eps_high={eps_high!r}): give numbers of at least 0")
    ratio = log_ratio.exp()
    clipped = ratio.clamp(max(1 - eps_low, 0.0), 1 + eps_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def reinforce_loss(logp: Tensor, log_ratio: Tensor, advantage: Tensor, cap: float = math.inf) -> Tensor:
    """The detach variant: REINFORCE with a detached importance weight, -min(r, cap).detach() * A * logp.

    Its gradient, -r A grad logp, is what the clipped loss has inside of its bounds, and no token loses it. The expected
    gradient is the off-policy policy gradient, unbiased up to the cap; the gap of precision stays in the weight, as a
    factor exp(beta) on a token's gradient, and the variance grows with staleness.

    Args:
        logp: any shape, of the training forward, with grad.
        log_ratio: the same shape, in nats; its gradient is not used.
        advantage: broadcast against them.
        cap: largest weight; 2 makes it `tis`, infinity leaves the weight as it is.

    Returns:
        A value a token, the shape of `logp`; only its gradient has a meaning.

    Raises:
        ValueError: a cap that is not above 0.
    """
    if not cap > 0:
        raise ValueError(f"reinforce_loss(cap={cap!r}): give a number above 0")
    weight = log_ratio.detach().clamp(max=math.log(cap)).exp()
    return -weight * advantage * logp


def unit_ratio_loss(logp: Tensor, advantage: Tensor) -> Tensor:
    """The ratio set to 1: -exp(logp - logp.detach()) * A, whose gradient is plain REINFORCE, -A grad logp.

    Nothing is clipped and nothing is weighed: the expected gradient is the on-policy one at staleness 0 and biased
    towards the rollout's policy at any other.

    Args:
        logp: any shape, of the training forward, with grad.
        advantage: broadcast against it.

    Returns:
        The loss of each token, the shape of `logp`.
    """
    return -torch.exp(logp - logp.detach()) * advantage
