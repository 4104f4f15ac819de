"""The shadow forward leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from seismograd.collectors.shadow import shadow_logp
from tests import tiny


class Noisy(nn.Module):
    """Dropout, batch norm and a module that is frozen in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.drop(self.norm(self.linear(x))))


@pytest.fixture
def model() -> Noisy:
    torch.manual_seed(0)
    return Noisy()


def test_everything_is_as_before(model: Noisy) -> None:
    x = torch.randn(4, 8)
    before = tiny.fingerprint(model)
    modes = [module.training for module in model.modules()]
    rng = torch.get_rng_state()
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    seen = shadow_logp(model, lambda: model(x), "bf16")
    assert not seen.requires_grad
    assert seen.dtype == torch.float32
    assert tiny.fingerprint(model) == before  # batch norm's statistics too
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(model.linear.weight.grad, torch.ones_like(model.linear.weight))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_everything_is_as_before_after_an_error(model: Noisy) -> None:
    modes = [module.training for module in model.modules()]
    rng = torch.get_rng_state()

    def broken() -> Tensor:
        torch.rand(3)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        shadow_logp(model, broken, "bf16")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_no_dropout_as_in_an_engine(model: Noisy) -> None:
    x = torch.randn(4, 8)
    a, b = (shadow_logp(model, lambda: model(x), "bf16") for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_is_the_engine_s(precision: str) -> None:
    net = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = net(x).float()
    assert torch.equal(shadow_logp(net, lambda: net(x), precision), expected)  # type: ignore[arg-type]
    assert not torch.equal(shadow_logp(net, lambda: net(x), precision), net(x))  # type: ignore[arg-type]


def test_weights_that_have_the_precision_are_not_cast_at_all() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).bfloat16()
    x = torch.randn(8, 16).bfloat16()
    assert torch.equal(shadow_logp(net, lambda: net(x), "bf16"), net(x).float())


def test_enclosing_autocast_keeps_its_gradients() -> None:
    """A weight cast without gradient by the shadow must not be found by the trainer's own autocast afterwards."""
    net = nn.Linear(16, 16)
    x = torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        shadow_logp(net, lambda: net(x), "bf16")
        net(x).float().sum().backward()
    assert net.weight.grad is not None
