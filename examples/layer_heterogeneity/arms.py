"""The ways to clip that are compared, and LayerClip as it switches itself on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.peers import AdaGC, Clip, GlobalClip, ZClip
from examples.layer_heterogeneity.training import COLLAPSED
from seismograd.controls import LayerClip
from seismograd.controls.layerclip import References, apply
from seismograd.telemetry.baselines import Baseline, State, Values
from seismograd.telemetry.layers import ModelMap
from seismograd.telemetry.norms import take_norms
from seismograd.telemetry.rules import RULES


class Auto:
    """LayerClip before the global clip: armed until a spike, then on until it has had nothing to do for a while.

    A spike is what the rule table calls one (grad_norm or layer_grad_norm beyond three times its envelope); it counts
    where a layer is beyond LayerClip's threshold too. The step that shows it is clipped already.

    Args:
        reference: of LayerClip.
        max_norm: of the global clip.
        hold: steps after the last clip until it is only armed again.
    """

    def __init__(self, model: nn.Module, reference: References, max_norm: float, hold: int = 100) -> None:
        self._map, self._clip = ModelMap(model), LayerClip(model, reference=reference)
        self._states: dict[str, State] = {}
        self._global, self._hold = GlobalClip(max_norm), hold
        self._left = 0

    def clip_(self, model: nn.Module) -> list[float]:
        """Scale the gradients in place.

        Returns:
            What LayerClip, not the global clip, multiplied each parameter's gradient by.
        """
        norms = take_norms(list(model.parameters()))
        if norms is None:
            return []
        grouping = self._map.grouping(norms.parameters)
        series = grouping.norms(norms.per_parameter.double().numpy(), float(norms.total))
        scales = self._clip.judge(grouping, series)
        layers = series[1 : 1 + len(grouping.layers)]
        spike = self._spike("grad_norm", series[:1]) | self._spike("layer_grad_norm", layers)
        if scales.acts and (spike or self._left):
            self._left = self._hold + 1
        on = self._left > 0
        self._left = max(self._left - 1, 0)
        if on:
            apply(scales, norms.parameters)
        self._global.clip_(model)
        return scales.scales[scales.parameter].tolist() if on else [1.0] * len(norms.parameters)

    def _spike(self, signal: str, values: Values) -> bool:
        if signal not in self._states:
            self._states[signal] = _baseline(signal).state(len(values))
        return bool(self._states[signal].judge(values).fired.any())


def _baseline(signal: str) -> Baseline:
    return next(rule.baseline for rule in RULES if rule.signal == signal)


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Args:
        name: in the tables.
        clip: makes its clip, from a model and the global clip's max_norm.
        collapsed: what the rare tokens' embeddings are multiplied by.
    """

    name: str
    clip: Callable[..., Clip]
    collapsed: float = COLLAPSED


HEALTHY, UNCLIPPED, GLOBAL = "no collapse, global clip", "no clip at all", "global clip"
PEERS, HISTORY = "LayerClip peers", "LayerClip history"
ARMS = (
    Arm(HEALTHY, lambda model, max_norm: GlobalClip(max_norm), collapsed=1.0),
    Arm(UNCLIPPED, lambda model, max_norm: GlobalClip(torch.inf)),
    Arm(GLOBAL, lambda model, max_norm: GlobalClip(max_norm)),
    Arm(PEERS, lambda model, max_norm: Auto(model, "peers", max_norm)),
    Arm(HISTORY, lambda model, max_norm: Auto(model, "history", max_norm)),
    Arm("ZClip", lambda model, max_norm: ZClip(max_norm)),
    Arm("AdaGC", lambda model, max_norm: AdaGC(max_norm)),
)
EARLY = (HEALTHY, GLOBAL, PEERS, HISTORY)
"""Those that are tried with collapsed tokens from the first step on, before anything has warmed up."""
