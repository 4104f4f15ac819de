"""What each control would have done to the culprits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seismograd.controls.tokenclip import icepop, tis
from seismograd.telemetry.incidents import Culprit

_TOKEN_CONTROLS: Mapping[str, Callable[[Tensor], Tensor]] = {"tis": tis, "icepop": icepop}


def controls_on(culprits: Sequence[Culprit], norm: float) -> dict[str, dict[str, Any]]:
    """By control: the weight that it leaves each culprit's ratio, and |G| with it acting on the worst culprit alone."""
    ratios = [c.log_ratio for c in culprits]
    if not culprits or any(r is None for r in ratios):
        return {}
    log_ratio = torch.tensor([r or 0.0 for r in ratios], dtype=torch.float64)
    found: dict[str, dict[str, Any]] = {}
    for name, control in _TOKEN_CONTROLS.items():
        left = control(log_ratio)
        # The loss holds the token with its whole ratio; the control replaces it.
        kept = [_kept(float(w), float(r)) for w, r in zip(left, log_ratio, strict=True)]
        found[name] = {"weights": [float(w) for w in left], "grad_norm": _norm(culprits[0], norm, kept[0])}
    sums = [c.sequence_log_ratio for c in culprits]
    if all(s is not None for s in sums):
        inside = [math.log(0.5) <= (s or 0.0) <= math.log(2.0) for s in sums]
        found["mis"] = {
            "weights": [float(x) for x in inside],
            "grad_norm": None if inside[0] else _norm(culprits[0], norm, 0.0),
        }
    return found


def _kept(weight: float, log_ratio: float) -> float:
    """The part of the ratio that the control leaves; all of one that is 0 anyway."""
    ratio = math.exp(min(log_ratio, 700.0))
    return weight / ratio if ratio > 0 else 1.0


def _norm(culprit: Culprit, norm: float, kept: float) -> float | None:
    """|G - (1 - kept) g| from |G - g|, |g| and g . G; None where g was not verified.

    From what is left without the token, not from the whole: where the token is nearly all of G, rounding would be all
    that is left of the difference.
    """
    if culprit.grad_norm is None or culprit.influence is None or not math.isfinite(norm) or norm <= 0:
        return None
    own = culprit.grad_norm
    rest = norm * (1 - culprit.influence)
    along = norm * (culprit.share * norm) - own**2 if own < 1e150 else 0.0  # (G - g) . g
    return math.sqrt(max(0.0, rest**2 + 2 * kept * along + (kept * own) ** 2))
