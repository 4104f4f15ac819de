"""Joins the controls to a run: what they make of a step, and which of them act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from seismograd.controls.layerclip import LayerClip, LayerScales
from seismograd.controls.policy import CONTROLS, Policy
from seismograd.controls.switch import Change, State, Switch
from seismograd.controls.usual import FEWEST
from seismograd.telemetry.baselines import Values
from seismograd.telemetry.incidents import Explained, Incident
from seismograd.telemetry.layers import Grouping
from seismograd.telemetry.records import Spike

_GRADIENTS = ("grad_norm", "layer_grad_norm", "layer_proportion")
_LAYERS = "Clip by layer (LayerClip), and look at the weights and activations of the layers that are out of proportion."


@dataclass(frozen=True)
class Asked:
    """A reason to switch a control on.

    Args:
        control: its name.
        reason: a clause.
    """

    control: str
    reason: str


class Protection:
    """The controls of one run. All methods are the training thread's.

    Args:
        model: the trained model.
        policy: the controls' settings.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self.policy, self._model = policy, model
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._switches, self._layerclip = self._fresh()

    def _fresh(self) -> tuple[dict[str, Switch], LayerClip]:
        switches = {
            name: Switch(name, (settings := getattr(self.policy, name)).mode, getattr(settings, "hold", 1))
            for name in CONTROLS
        }
        layer = self.policy.layerclip
        clip = LayerClip(
            self._model, reference=layer.reference, factor=layer.factor, groups=layer.groups, warmup=layer.warmup
        )
        return switches, clip

    @property
    def states(self) -> Mapping[str, State]:
        """By control."""
        return {name: switch.state for name, switch in self._switches.items()}

    def lacks(self) -> str | None:
        """Why LayerClip will never act on this model, where that is so."""
        few = len(self._layerclip.units) < FEWEST and self._layerclip.reference == "peers"
        if not few or self.policy.layerclip.mode in ("off", "observe"):
            return None
        return (
            f"LayerClip compares layers with each other, and this model trains {len(self._layerclip.units)}: it clips "
            "none. Set controls={'layerclip.reference': 'history'} to compare each with its own past"
        )

    def on(self, control: str) -> bool:
        """Whether it acts."""
        return self._switches[control].on

    def judge(self, grouping: Grouping, norms: Values) -> LayerScales | None:
        """What LayerClip makes of the step's gradients; None where it is off. Learns from them."""
        return None if self._switches["layerclip"].state is State.OFF else self._layerclip.judge(grouping, norms)

    def decide(
        self,
        step: int,
        spikes: Sequence[Spike],
        explained: Explained | None,
        scales: LayerScales | None,
        clipping: bool,
    ) -> list[Change]:
        """Switch controls on for what was found in the step, and hand back those whose time is over.

        Args:
            step: its number.
            spikes, explained, scales: what was found.
            clipping: whether the run clips where LayerClip can act.
        """
        incident = None if explained is None else explained.incident
        changes = []
        for asked in _asked(spikes, incident, scales):
            if clipping or asked.control != "layerclip":
                changes.append(self._switches[asked.control].ask(step, asked.reason))
        switch = self._switches["layerclip"]
        if switch.on and scales is not None and scales.acts:
            switch.renew(step)
        changes += [each.tick(step) for each in self._switches.values()]
        return [change for change in changes if change is not None]

    def told(
        self, explained: Explained, scales: LayerScales | None, changes: Sequence[Change], acts: bool
    ) -> Explained:
        """The incident with what LayerClip would have done or did, and what was switched on."""
        incident = explained.incident
        controls = dict(incident.controls)
        if scales is not None:
            controls["layerclip"] = {
                "scales": {unit: float(s) for unit, s in zip(scales.units, scales.scales, strict=True) if s < 1},
                "grad_norm": scales.norm if scales.finite else None,
                "acted": acts,
            }
        for change in changes:
            if change.after is State.ON:
                controls[change.control] = {**controls.get(change.control, {}), "switched_on": change.reason}
        if incident.verdict == "D" and scales is not None and scales.clipped:
            # No token stands out by itself, and some layers do beside the others: that is not the whole step's doing.
            evidence = (*incident.evidence, _out_of_proportion(scales))
            incident = replace(incident, verdict="B", evidence=evidence, advice=_LAYERS)
        return replace(explained, incident=replace(incident, controls=controls))

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "layerclip": self._layerclip.state_dict(),
            "switches": {name: switch.state_dict() for name, switch in self._switches.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Take up where `state_dict` left off; the layers that LayerClip has to learn anew.

        Where it cannot be read everything stays as it is.
        """
        switches, clip = self._fresh()
        anew = clip.load_state_dict(state["layerclip"])
        for name, saved in state["switches"].items():
            if name in switches:
                switches[name].load_state_dict(saved)
        self._switches, self._layerclip = switches, clip
        return anew


def _asked(spikes: Sequence[Spike], incident: Incident | None, scales: LayerScales | None) -> list[Asked]:
    """The reasons that one step gives."""
    found = []
    kind = None if incident is None or incident.verdict == "D" else incident.verdict
    spiked = next((spike for spike in spikes if spike.signal in _GRADIENTS), None)
    if spiked is not None and kind == "B":
        found.append(Asked("layerclip", f"verdict B at {spiked.key}, {_out_of_proportion(scales)}"))
    elif spiked is not None and kind is None and scales is not None and scales.clipped:
        found.append(Asked("layerclip", f"a spike of no other kind at {spiked.key}, {_out_of_proportion(scales)}"))
    if kind in ("A.1", "S"):
        found.append(Asked("tokenclip", f"verdict {kind}"))
    elif any(spike.signal == "log_ratio" for spike in spikes):
        found.append(Asked("tokenclip", "a token's log-ratio spiked"))
    if kind == "A.2":
        found.append(Asked("seqclip", "verdict A.2"))
    return found


def _out_of_proportion(scales: LayerScales | None) -> str:
    if scales is None or not scales.clipped:
        return "though no layer is beyond its threshold (or it still warms up)"
    return f"layers beyond what is usual: {scales.sentence.removeprefix('clips ')}"
