"""The clean ratio and the losses beside it: their values and, what matters, their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from seismograd.controls import (
    WIDE,
    clean_log_ratio,
    clean_old_logp,
    clipped_loss,
    reinforce_loss,
    unit_ratio_loss,
)


def tokens(n: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logp with grad, old_logp, shadow_logp, advantage), each (n,); alpha and beta of 0.1 to 0.3."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, generator=generator, dtype=torch.float64) * 5
    shadow = old + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)
    logp = (shadow + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)).requires_grad_()
    return logp, old, shadow, torch.randn(n, generator=generator, dtype=torch.float64)


def gradient(loss: Tensor, logp: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss.sum(), logp)
    return found


def test_clean_ratio_is_exp_alpha_with_the_gradient_of_the_training_precision() -> None:
    logp, old, shadow, _ = tokens()
    ratio = clean_log_ratio(logp, old, shadow).exp()
    torch.testing.assert_close(ratio.detach(), (shadow - old).exp())
    torch.testing.assert_close(gradient(ratio, logp), (shadow - old).exp())


def test_clean_reference_in_an_unchanged_loss_clips_by_alpha_alone() -> None:
    logp, old, shadow, advantage = tokens()
    reference = clean_old_logp(old, logp, shadow)
    assert not reference.requires_grad
    taken = gradient(clipped_loss(logp - reference, advantage), logp) == 0
    clean = (shadow - old).exp()
    expected = ((clean > 1.2) & (advantage > 0)) | ((clean < 0.8) & (advantage < 0))
    assert torch.equal(taken, expected)
    phantom = (gradient(clipped_loss(logp - old, advantage), logp) == 0) & ~expected
    assert phantom.sum() > 3, "the tokens have phantom clipping in them, so that there is something to take out"


def test_identical_precisions_leave_the_reference_as_it_is() -> None:
    logp, old, _, _ = tokens()
    assert torch.equal(clean_old_logp(old, logp, logp.detach()), old)


def test_tokens_that_a_forward_could_not_score_keep_their_reference() -> None:
    old = torch.tensor([-1.0, -2.0, -3.0])
    logp = torch.tensor([-1.5, math.nan, -3.5])
    shadow = torch.tensor([-1.25, -2.0, -math.inf])
    assert clean_old_logp(old, logp, shadow).tolist() == [-1.25, -2.0, -3.0]


def test_broadcasting_is_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        clean_old_logp(torch.zeros(4, 1), torch.zeros(4, 5), torch.zeros(4, 5))


@pytest.mark.parametrize("eps", [(0.2, 0.2), (0.1, 0.28), WIDE, (1.0, math.inf)])
def test_clipped_loss_has_the_gradient_of_its_formula(eps: tuple[float, float]) -> None:
    logp, old, _, advantage = tokens(seed=1)
    ratio = (logp - old).exp().detach()
    taken = ((ratio > 1 + eps[1]) & (advantage > 0)) | ((ratio < 1 - eps[0]) & (advantage < 0))
    expected = torch.where(taken, 0.0, -ratio * advantage)
    torch.testing.assert_close(gradient(clipped_loss(logp - old, advantage, *eps), logp), expected)
    value = -torch.minimum(ratio * advantage, ratio.clamp(1 - eps[0], 1 + eps[1]) * advantage)
    torch.testing.assert_close(clipped_loss(logp - old, advantage, *eps).detach(), value)


def test_wide_clip_takes_no_gradient_at_the_published_spread_and_the_usual_one_does() -> None:
    generator = torch.Generator().manual_seed(0)
    logp = torch.zeros(10_000, requires_grad=True)
    beta = 0.149 * torch.randn(10_000, generator=generator)
    advantage = torch.randn(10_000, generator=generator)
    assert (gradient(clipped_loss(logp + beta, advantage, *WIDE), logp) != 0).all()
    assert (gradient(clipped_loss(logp + beta, advantage), logp) == 0).float().mean() > 0.05


def test_reinforce_loss_loses_no_token_and_agrees_with_the_clipped_one_inside_its_bounds() -> None:
    logp, old, _, advantage = tokens()
    ratio = (logp - old).exp().detach()
    found = gradient(reinforce_loss(logp, logp - old, advantage), logp)
    torch.testing.assert_close(found, -ratio * advantage)
    clipped = gradient(clipped_loss(logp - old, advantage), logp)
    torch.testing.assert_close(torch.where(clipped == 0, clipped, found), clipped)
    capped = gradient(reinforce_loss(logp, logp - old, advantage, cap=1.1), logp)
    torch.testing.assert_close(capped, -ratio.clamp(max=1.1) * advantage)


def test_unit_ratio_loss_is_plain_reinforce() -> None:
    logp, _, _, advantage = tokens()
    loss = unit_ratio_loss(logp, advantage)
    torch.testing.assert_close(loss.detach(), -advantage)
    torch.testing.assert_close(gradient(loss, logp), -advantage)


@pytest.mark.parametrize("eps", [(-0.1, 0.2), (0.2, -0.1), (math.nan, 0.2)])
def test_bounds_that_cannot_be_are_refused(eps: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="give numbers of at least 0"):
        clipped_loss(torch.zeros(1), torch.zeros(1), *eps)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_cap_that_cannot_be_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        reinforce_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), cap)
