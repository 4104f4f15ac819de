"""What LayerClip is compared with: the global clip, ZClip and AdaGC, after their papers. For benchmarks only.

    global   g *= min(1, max_norm / |G|)
    ZClip    z = (|G| - mean) / std;  z > 2.5: g *= (mean + 2.5^2 / z * std) / |G|    (arXiv:2504.02507)
    AdaGC    tensor by tensor, g_i *= min(1, 1.05 * ema_i / |g_i|)                     (arXiv:2502.11034)

Each is called in place of the global clip, `clip_(model)` between backward and optimizer step, and gives back what it
multiplied each gradient by. A gradient that is not finite is left as it is and not learnt from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from seismograd.telemetry.norms import Norms, take_norms


class Clip(Protocol):
    """One way to clip."""

    def clip_(self, model: nn.Module) -> list[float]:
        """Scale the model's gradients in place.

        Returns:
            The scale of each parameter that has a gradient, in the order of ``model.parameters()``.
        """


@dataclass
class GlobalClip:
    """All gradients together, as ``torch.nn.utils.clip_grad_norm_`` does it.

    Args:
        max_norm: of the whole gradient.
    """

    max_norm: float = 1.0

    def clip_(self, model: nn.Module) -> list[float]:
        norms = _norms(model)
        return [] if norms is None else _scale(norms, [_within(self.max_norm, _total(norms))] * len(norms.parameters))


@dataclass
class ZClip:
    """The global norm, against the running mean and variance of what was let through, once beyond a z-score.

    The reciprocal rule brings a norm further down the further out it lies: at z = 2.5 to mean + 2.5 std, at z -> inf to
    the mean. Mean and variance are those of the first `warmup` norms, then exponential averages; a clipped norm enters
    them clipped.

    Args:
        max_norm: of the global clip during the warm-up; afterwards there is none.
        alpha: weight of the past in the averages.
        z: standard deviations above the mean.
        warmup: steps.
    """

    max_norm: float = 1.0
    alpha: float = 0.97
    z: float = 2.5
    warmup: int = 25
    _first: list[float] = field(default_factory=list)
    _mean: float = math.nan
    _variance: float = math.nan

    def clip_(self, model: nn.Module) -> list[float]:
        norms = _norms(model)
        if norms is None:
            return []
        total = _total(norms)
        allowed = self._allowed(total)
        if math.isfinite(total):
            self._learn(min(total, allowed) if len(self._first) >= self.warmup else total)
        return _scale(norms, [_within(allowed, total)] * len(norms.parameters))

    def _allowed(self, total: float) -> float:
        if len(self._first) < self.warmup:
            return self.max_norm
        std = math.sqrt(self._variance)
        score = (total - self._mean) / (std + 1e-6)
        return self._mean + self.z * self.z / score * std if score > self.z else math.inf

    def _learn(self, norm: float) -> None:
        if len(self._first) < self.warmup:
            self._first.append(norm)
            self._mean = sum(self._first) / len(self._first)
            self._variance = sum((x - self._mean) ** 2 for x in self._first) / len(self._first)
            return
        self._mean = self.alpha * self._mean + (1 - self.alpha) * norm
        self._variance = self.alpha * self._variance + (1 - self.alpha) * (norm - self._mean) ** 2


@dataclass
class AdaGC:
    """Each tensor against the exponential average of its own clipped norms.

    For the first `warmup` steps the global clip acts, and a tensor's average is the smallest norm that it had, so that
    a wild beginning does not raise it.

    Args:
        max_norm: of the global clip during the warm-up; afterwards there is none.
        relative: factor above the average.
        beta: weight of the past in the average.
        warmup: steps.
    """

    max_norm: float = 1.0
    relative: float = 1.05
    beta: float = 0.98
    warmup: int = 100
    _usual: dict[Tensor, float] = field(default_factory=dict)
    _steps: int = 0

    def clip_(self, model: nn.Module) -> list[float]:
        norms = _norms(model)
        if norms is None:
            return []
        each = norms.per_parameter.double().tolist()
        warming = self._steps < self.warmup
        together = _within(self.max_norm, _total(norms))
        scales = []
        for p, norm in zip(norms.parameters, each, strict=True):
            usual = self._usual.get(p, self.max_norm)
            scale = together if warming else _within(self.relative * usual, norm)
            if math.isfinite(norm):
                now = scale * norm
                self._usual[p] = min(usual, now) if warming else self.beta * usual + (1 - self.beta) * now
            scales.append(scale)
        self._steps += 1
        return _scale(norms, scales)


def _norms(model: nn.Module) -> Norms | None:
    return take_norms(list(model.parameters()))


def _total(norms: Norms) -> float:
    return float(norms.total)


def _within(allowed: float, norm: float) -> float:
    return min(1.0, allowed / (norm + 1e-6)) if math.isfinite(norm) else 1.0


@torch.no_grad()
def _scale(norms: Norms, scales: Sequence[float]) -> list[float]:
    for p, scale in zip(norms.parameters, scales, strict=True):
        if scale < 1 and p.grad is not None:
            p.grad.mul_(scale)
    return list(scales)
