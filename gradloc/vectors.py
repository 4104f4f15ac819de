"""Gradients as vectors: a list of tensors, one a parameter, None where a parameter has none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from seismograd.gradloc.tokens import Floats

Gradient = list[Tensor | None]


_BLOCK = 2**22  # elements: what is computed in float64 is never a copy of a whole embedding


def norm_of(gradient: Iterable[Tensor | None]) -> float:
    """L2 norm over all parameters.

    Also where the squares overflow float32, or vanish in it.
    """
    grads = [g for g in gradient if g is not None]
    if not grads:
        return 0.0
    norm = _root(torch._foreach_norm(grads, 2.0))
    if not (math.isinf(norm) or norm == 0):
        return norm
    largest = max(float(g.abs().max()) for g in grads if g.numel())
    return largest * _root([(g / largest).norm() for g in grads]) if 0 < largest < math.inf else norm


def norms_of(gradient: Iterable[Tensor | None]) -> Floats:
    """(P,) L2 norm of each parameter's gradient, 0 where it has none, in the order of the parameters.

    One after the other, so that what is made while iterating need not be held.
    """
    return np.array([norm_of([g]) for g in gradient])


def root(norms: Floats) -> float:
    """The norm of the whole from those of its parts; finite where they are."""
    largest = float(norms.max(initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return float(np.sqrt(np.square(norms).sum())) if np.isnan(norms).any() else largest
    return largest * float(np.sqrt(np.square(norms / largest).sum()))


def along(gradient: Sequence[Tensor | None], whole: Sequence[Tensor], norm: float) -> float:
    """g . G / norm. Divided first, so that no product overflows."""
    found = 0.0
    for g, w in zip(gradient, whole, strict=True):
        if g is not None:
            for a, b in zip(torch.split(g.reshape(-1), _BLOCK), torch.split(w.reshape(-1), _BLOCK), strict=True):
                found += float((a * (b / norm)).sum(dtype=torch.float64))
    return found


def less(whole: Sequence[Tensor], part: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """G - g, one parameter after the other, so that it need not be held whole."""
    return (w if g is None else w - g.to(w.dtype) for w, g in zip(whole, part, strict=True))


def add_to(total: Gradient, parameter: int, gradient: Tensor) -> None:
    """total += g, of one parameter, in place."""
    held = total[parameter]
    total[parameter] = gradient.clone(memory_format=torch.contiguous_format) if held is None else held.add_(gradient)


def _root(norms: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([n.double().cpu() for n in norms])))
