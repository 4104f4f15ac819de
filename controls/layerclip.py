"""LayerClip: clips the layers that are out of proportion, before the global clip takes the whole step down for them.

    |g_l| <= threshold_l                   the layer is left alone
    |g_l| >  threshold_l                   g_l *= level_l / |g_l|

level_l is what is usual for the layer in this step, threshold_l a factor above it (`seismograd.controls.usual`: by the
other layers of the step, or by the layer's own history). A layer beyond its threshold is brought back to its level, not
to the threshold: several layers at three times their usual size would still make the global clip shrink the healthy
ones.

The name was published without a formula beyond "a threshold a layer from that layer's history"; the formula is ours.
Its neighbours: AdaGC clips each tensor at 1.05 times an EMA of its own norms (arXiv:2502.11034), ZClip the global norm
at a z-score of its history (arXiv:2504.02507).

In expectation a clipped step moves the healthy layers as the loss asks, and the sick ones in their own direction by no
more than they usually move: the direction of the whole is no longer the gradient's.

    clip = LayerClip(model)
    loss.backward()
    clip.clip_()                                               # before the global clip
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from seismograd.controls.usual import History, Peers, PeersSettings, Reference
from seismograd.telemetry.baselines import Envelope, Values
from seismograd.telemetry.layers import ALL, Grouping, ModelMap
from seismograd.telemetry.norms import take_norms

References = Literal["peers", "history"]
REFERENCES: tuple[References, ...] = ("peers", "history")

_NAMED = 4  # layers that a sentence names


@dataclass(frozen=True)
class LayerScales:
    """What LayerClip makes of one step's gradients.

    Args:
        units: names of the layers ("3", "embedding"), or of their module groups ("3/mlp").
        norms: (U,) before.
        thresholds: (U,) beyond which a unit is clipped; NaN while it warms up.
        scales: (U,) what the unit's gradient is to be multiplied by; 1 leaves it as it is.
        finite: whether all norms are; a step in which one is not is to be skipped.
        parameter: (P,) the unit of each parameter that has a gradient.
    """

    units: tuple[str, ...]
    norms: Values
    thresholds: Values
    scales: Values
    finite: bool
    parameter: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def clipped(self) -> tuple[str, ...]:
        """The units beyond their threshold."""
        return tuple(unit for unit, scale in zip(self.units, self.scales, strict=True) if scale < 1)

    @property
    def acts(self) -> bool:
        """Whether applying it would change anything."""
        return not self.finite or bool((self.scales < 1).any())

    @property
    def sentence(self) -> str:
        """What it does, in words: the worst layers and how far beyond their level they are."""
        if not self.finite:
            return "skips the step: its gradient is not finite"
        worst = sorted(zip(self.scales, self.units, strict=True))[: len(self.clipped)]
        named = ", ".join(f"{unit} (x{1 / scale:.3g})" for scale, unit in worst[:_NAMED])
        return f"clips {named}" + (f" and {len(worst) - _NAMED} more" if len(worst) > _NAMED else "")

    @property
    def norm(self) -> float:
        """|G| with the scales applied."""
        return math.sqrt(float(np.square(self.norms * self.scales).sum()))


class LayerClip:
    """See the module's docstring. Not shared between threads.

    Args:
        model: names the parameters, by which they are placed in layers (`seismograd.telemetry.layers`). A parameter
            that two modules share counts once, where ``named_parameters()`` has it; one without a gradient not at all.
        reference: "peers", by the other layers of the step, or "history", by the layer's own norms.
        factor: threshold over level, above 1. Peers also wants six scaled MADs of the layer's log-proportion, and twice
            its largest proportion of late: a layer reached 4.6 in 12,000 honest steps (tests/data), never by a leap.
        groups: clip each layer's module groups (attention, mlp, norm, ...) by themselves.
        warmup: observations of a unit before it may be clipped.
        window: steps that peers learns from.
        half_life: steps after which history's largest norm counts half.
        trim: upper part of the layers that may be sick without moving the peers' reference.

    Raises:
        ValueError: a setting that cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        reference: References = "peers",
        factor: float = 4.0,
        groups: bool = False,
        warmup: int = 16,
        window: int = 128,
        half_life: float = 500.0,
        trim: float = 0.4,
    ) -> None:
        if reference not in REFERENCES:
            raise ValueError(f"LayerClip(reference={reference!r}): give one of {', '.join(REFERENCES)}")
        numbers = {"factor": factor, "half_life": half_life, "trim": trim}
        for name, value in numbers.items():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ValueError(f"LayerClip({name}={value!r}): give a number")
        if not 1 < factor < math.inf:
            raise ValueError(f"LayerClip(factor={factor!r}): give a finite number above 1")
        if not isinstance(groups, bool):
            raise ValueError(f"LayerClip(groups={groups!r}): give True or False")
        if not (isinstance(warmup, int) and isinstance(window, int) and 2 <= warmup <= window):
            raise ValueError(
                f"LayerClip(warmup={warmup!r}, window={window!r}): give whole steps, 2 <= warmup <= window"
            )
        if not half_life > 0:
            raise ValueError(f"LayerClip(half_life={half_life!r}): give steps above 0")
        if not 0 <= trim < 1:
            raise ValueError(f"LayerClip(trim={trim!r}): give a part of the layers, 0 <= trim < 1")
        self.reference = reference
        self._map, self._model, self._groups = ModelMap(model), model, groups
        self._usual: Reference = (
            Peers(PeersSettings(factor, 6.0, window, warmup, trim))
            if reference == "peers"
            else History(Envelope(factor, half_life, warmup))
        )
        self._column: dict[str, int] = {}
        self._named: tuple[Grouping, _Units] | None = None

    def clip_(self, parameters: Sequence[Tensor] | None = None) -> LayerScales:
        """Scale the gradients in place and learn from them. One transfer from the device; none to it.

        A step with a norm that is not finite is skipped: its gradients are set to None, so that the optimizer leaves
        weights and moments as they are.

        Args:
            parameters: those that are trained; the model's where None. All ranks give the same ones; DTensors' norms
                are reduced over the ranks of their mesh, in one vector.

        Returns:
            What was done.
        """
        given = list(self._model.parameters() if parameters is None else parameters)
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        norms = take_norms(given, ranks)
        if norms is None:
            return LayerScales((), np.zeros(0), np.zeros(0), np.zeros(0), True, np.zeros(0, dtype=np.int64))
        grouping = self._map.grouping(norms.parameters)
        scales = self.judge(grouping, grouping.norms(norms.per_parameter.double().cpu().numpy(), 0.0))
        if scales.finite:
            apply(scales, norms.parameters)
        else:
            for p in norms.parameters:
                p.grad = None
        return scales

    def judge(self, grouping: Grouping, norms: Values) -> LayerScales:
        """What is to be done with one step's gradients, then learn from them. Changes no gradient.

        Args:
            grouping: of the parameters that have a gradient.
            norms: (S,) as `Grouping.norms` gives them.
        """
        units = self._units(grouping)
        row = np.full(len(self._column), np.nan)
        row[units.columns] = mine = norms[units.series]
        finite = bool(np.isfinite(mine).all())
        level, threshold = self._usual.judge(row)
        with np.errstate(invalid="ignore", divide="ignore"):
            beyond = np.isfinite(row) & (row > threshold)
            scales = np.where(beyond, level / row, 1.0)
            if finite:
                self._usual.learn(np.where(beyond, threshold, row), beyond)
        return LayerScales(units.names, mine, threshold[units.columns], scales[units.columns], finite, units.parameter)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {"reference": self.reference, "units": list(self._column), "usual": self._usual.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Take up where `state_dict` left off; where that cannot be read everything stays as it is.

        Returns:
            Units of this model that the state does not know; they warm up anew. Where the reference is another one all
            do.
        """
        known = list(state["units"])
        here = tuple(self._column) or self.units
        if state["reference"] != self.reference:
            return here
        kept = [unit for unit in known if unit in here]
        self._usual.load_state_dict(state["usual"], [known.index(unit) for unit in kept])
        self._column = {unit: i for i, unit in enumerate(kept)}
        self._named = None
        return tuple(unit for unit in here if unit not in known)

    @property
    def units(self) -> tuple[str, ...]:
        """The layers (or module groups) of the model that are trained."""
        grouping = self._map.grouping([p for p in self._model.parameters() if p.requires_grad])
        return _units(grouping, self._groups).names

    def _units(self, grouping: Grouping) -> _Units:
        if self._named is None or self._named[0] is not grouping:
            units = _units(grouping, self._groups)
            new = [name for name in units.names if name not in self._column]
            self._column.update({name: len(self._column) + i for i, name in enumerate(new)})
            self._usual.extend(len(new))
            units.columns = np.array([self._column[name] for name in units.names], dtype=np.int64)
            self._named = (grouping, units)
        return self._named[1]


@torch.no_grad()
def apply(scales: LayerScales, parameters: Sequence[Tensor]) -> None:
    """Scale the gradients as `scales` says. All of them in one call, so that it is done whole or not at all.

    Args:
        scales: from `LayerClip.judge` on these parameters' norms.
        parameters: (P,) those that have a gradient, in that order; one that is given twice is scaled once.
    """
    chosen = {
        id(p): (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad, float(scales.scales[unit]))
        for p, unit in zip(parameters, scales.parameter.tolist(), strict=True)
        if p.grad is not None and scales.scales[unit] < 1
    }
    if chosen:
        gradients, factors = zip(*chosen.values(), strict=True)
        torch._foreach_mul_(gradients, factors)


@dataclass
class _Units:
    """Args:
    names: of the units.
    series: (U,) index of each in the grouping's series.
    parameter: (P,) unit of each parameter.
    columns: (U,) where each is kept.
    """

    names: tuple[str, ...]
    series: np.ndarray[Any, np.dtype[np.int64]]
    parameter: np.ndarray[Any, np.dtype[np.int64]]
    columns: np.ndarray[Any, np.dtype[np.int64]]


def _units(grouping: Grouping, groups: bool) -> _Units:
    n = len(grouping.layers)
    first, of = (1 + n, grouping.member) if groups else (1, grouping.layer_of)
    chosen = grouping.series[1 + n :] if groups else grouping.series[1 : 1 + n]
    names = tuple(layer if group == ALL else f"{layer}/{group}" for layer, group in chosen)
    return _Units(names, np.arange(first, first + len(names)), of, np.zeros(0, dtype=np.int64))
