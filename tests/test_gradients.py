"""The norms, and the clip that uses them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from seismograd.collectors.gradients import layer_proportions
from seismograd.telemetry.norms import take_norms


def parameters(dtypes: list[torch.dtype], scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, dtype in enumerate(dtypes * 7):
        p = nn.Parameter(torch.zeros(3 + i, 5, dtype=dtype))
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(dtype)
        made.append(p)
    return made


MIXES = [
    [torch.float32],
    [torch.bfloat16],
    [torch.float64],
    [torch.float32, torch.bfloat16],
    [torch.bfloat16, torch.float32, torch.float64, torch.float16],
]


@pytest.mark.parametrize("dtypes", MIXES, ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e9, math.inf])
def test_clip_has_the_bits_of_torch(dtypes: list[torch.dtype], max_norm: float) -> None:
    ours, theirs = parameters(dtypes), parameters(dtypes)
    for made in (ours, theirs):
        made.insert(3, nn.Parameter(torch.ones(2)))  # without a gradient
    norms = take_norms(ours)
    assert norms is not None
    torch.nn.utils.clip_grads_with_norm_(ours, max_norm, norms.total)
    total = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert norms.total.dtype == total.dtype
    assert torch.equal(norms.total, total)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtypes", MIXES, ids=str)
def test_each_norm_belongs_to_its_parameter(dtypes: list[torch.dtype]) -> None:
    made = parameters(dtypes)
    norms = take_norms(made)
    assert norms is not None
    assert {id(p) for p in norms.parameters} == {id(p) for p in made}
    for p, norm in zip(norms.parameters, norms.per_parameter, strict=True):
        assert float(norm) == pytest.approx(float(p.grad.double().norm()), rel=1e-2)  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_clip_as_torch_does(bad: float) -> None:
    ours, theirs = parameters([torch.float32]), parameters([torch.float32])
    for made in (ours, theirs):
        made[2].grad[0, 0] = bad  # type: ignore[index]
    norms = take_norms(ours)
    assert norms is not None
    torch.nn.utils.clip_grads_with_norm_(ours, 1.0, norms.total)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(torch.nan_to_num(a.grad), torch.nan_to_num(b.grad))  # type: ignore[arg-type]


def test_no_gradient_at_all() -> None:
    assert take_norms([nn.Parameter(torch.ones(2))]) is None
    assert take_norms([]) is None


def test_proportions() -> None:
    rho = layer_proportions(np.array([1.0, 1.0, 1.0, 100.0]))
    assert rho == pytest.approx([100 ** (-1 / 3)] * 3 + [100.0])
    assert layer_proportions(np.array([2.0, 4.0, 8.0]) * 1e-9) == pytest.approx([2 / 32**0.5, 1.0, 8 / 8**0.5])


def test_proportions_of_layers_without_a_gradient_are_absent() -> None:
    rho = layer_proportions(np.array([1.0, 0.0, 1.0, np.nan, 1.0]))
    assert np.isnan(rho[[1, 3]]).all()
    assert rho[[0, 2, 4]] == pytest.approx([1.0, 1.0, 1.0])
    assert np.isnan(layer_proportions(np.array([1.0, 2.0, 0.0]))).all()
