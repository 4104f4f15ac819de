"""The peers of LayerClip against cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks.peers import AdaGC, Clip, GlobalClip, ZClip


def net(tensors: int = 2) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(tensors)])


def step(clip: Clip, model: nn.ParameterList, *norms: float) -> list[float]:
    """A step whose gradients have these norms; the norms that are left."""
    for p, norm in zip(model, norms, strict=True):
        p.grad = torch.full((4,), norm / 2)
    before = [p.grad.clone() for p in model if p.grad is not None]
    scales = clip.clip_(model)
    for p, g, scale in zip(model, before, scales, strict=True):
        assert p.grad is not None
        assert torch.equal(torch.nan_to_num(p.grad), torch.nan_to_num(g * scale))  # what it says is what it did
    return [float(p.grad.norm()) for p in model if p.grad is not None]


def test_the_global_clip_is_torchs() -> None:
    model, other = net(), net()
    assert step(GlobalClip(1.0), model, 3.0, 4.0) == pytest.approx([0.6, 0.8], abs=1e-6)
    for p, norm in zip(other, (3.0, 4.0), strict=True):
        p.grad = torch.full((4,), norm / 2)
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    assert all(torch.allclose(p.grad, q.grad, rtol=1e-6) for p, q in zip(model, other, strict=True))
    assert step(GlobalClip(10.0), model, 3.0, 4.0) == [3.0, 4.0]
    assert GlobalClip().clip_(net()) == []  # no gradient at all


def test_zclip_by_hand() -> None:
    """Warm-up norms 1, 3: mean 2, variance 1. A norm of 12 has z = 10: to 2 + 2.5 * 2.5 / 10 * 1 = 2.625."""
    clip, model = ZClip(max_norm=100.0, warmup=2), net(1)
    assert step(clip, model, 1.0) == [1.0]
    assert step(clip, model, 3.0) == [3.0]
    assert step(clip, model, 12.0) == pytest.approx([2.625], rel=1e-5)
    # What entered is 2.625: mean 0.97 * 2 + 0.03 * 2.625; the variance is about the new mean, as in the authors' code.
    assert clip._mean == pytest.approx(2.01875, rel=1e-5)
    assert clip._variance == pytest.approx(0.97 + 0.03 * (2.625 - 2.01875) ** 2, rel=1e-5)
    assert step(clip, model, 4.0) == [4.0]  # z = 2.0


def test_zclip_further_out_is_further_down() -> None:
    left = []
    for norm in (4.6, 7.0, 1000.0):
        clip, model = ZClip(max_norm=100.0, warmup=2), net(1)
        step(clip, model, 1.0), step(clip, model, 3.0)
        left += step(clip, model, norm)
    assert left == pytest.approx([2 + 6.25 / 2.6, 2 + 6.25 / 5, 2 + 6.25 / 998], rel=1e-4)


def test_zclip_clips_globally_while_it_warms_up_and_learns_the_norms_before() -> None:
    clip, model = ZClip(max_norm=1.0, warmup=2), net(2)
    assert step(clip, model, 3.0, 4.0) == pytest.approx([0.6, 0.8], abs=1e-6)
    step(clip, model, 3.0, 4.0)
    assert clip._mean == pytest.approx(5.0)
    assert step(clip, model, 3.0, 4.0) == pytest.approx([3.0, 4.0])


def test_adagc_by_hand() -> None:
    """Two tensors. Warm-up: 0.3 and 0.4, then 3 and 4 (clipped to 0.6, 0.8): the smallest, 0.3 and 0.4, stay."""
    clip, model = AdaGC(max_norm=1.0, warmup=2), net(2)
    assert step(clip, model, 0.3, 0.4) == pytest.approx([0.3, 0.4])
    assert step(clip, model, 3.0, 4.0) == pytest.approx([0.6, 0.8], abs=1e-6)
    # The first is within 1.05 * 0.3, the second beyond 1.05 * 0.4.
    assert step(clip, model, 0.31, 40.0) == pytest.approx([0.31, 0.42], rel=1e-5)
    first, second = clip._usual.values()
    assert first == pytest.approx(0.98 * 0.3 + 0.02 * 0.31)
    assert second == pytest.approx(0.98 * 0.4 + 0.02 * 0.42, rel=1e-5)
    assert step(clip, model, 40.0, 0.1) == pytest.approx([1.05 * first, 0.1], rel=1e-5)


def test_adagc_starts_no_higher_than_max_norm() -> None:
    clip, model = AdaGC(max_norm=1.0, warmup=1), net(1)
    step(clip, model, 50.0)
    assert list(clip._usual.values()) == pytest.approx([1.0], abs=1e-5)


@pytest.mark.parametrize("clip", [GlobalClip(), ZClip(warmup=1), AdaGC(warmup=1)])
def test_what_is_not_finite_is_not_learnt(clip: Clip) -> None:
    model = net(2)
    step(clip, model, 0.5, 0.5), step(clip, model, 0.5, 0.5)
    step(clip, model, math.nan, 0.5), step(clip, model, math.inf, 0.5)
    assert step(clip, model, 0.5, 0.5) == pytest.approx([0.5, 0.5])
