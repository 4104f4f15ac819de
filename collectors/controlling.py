"""What the controls do in a step: those of the loss act in its forwards, LayerClip acts on its gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seismograd.collectors.guard import Guard
from seismograd.collectors.meeting import Meeting
from seismograd.collectors.payload import Outlet
from seismograd.collectors.step import Step
from seismograd.controls.layerclip import LayerScales, apply
from seismograd.controls.policy import Policy
from seismograd.controls.switch import Change, State
from seismograd.telemetry.faults import Faults, warn
from seismograd.telemetry.incidents import Explained
from seismograd.telemetry.layers import Grouping
from seismograd.telemetry.norms import Norms, take_norms
from seismograd.telemetry.records import Event, Spike

OF_THE_LOSS = ("tokenclip", "seqclip", "cleanratio")
"""Controls that act in the loss."""


class Protector(Protocol):
    """Says what the controls do. Changes nothing itself."""

    policy: Policy

    def on(self, control: str) -> bool:
        """Whether it acts."""

    @property
    def states(self) -> Mapping[str, State]:
        """By control."""

    def judge(self, grouping: Grouping, norms: NDArray[np.float64]) -> LayerScales | None:
        """What LayerClip makes of a step's gradients, or None where it is off."""

    def decide(
        self,
        step: int,
        spikes: Sequence[Spike],
        explained: Explained | None,
        scales: LayerScales | None,
        clipping: bool,
    ) -> list[Change]:
        """What the step switches on or hands back; LayerClip only where the clip follows."""

    def told(
        self, explained: Explained, scales: LayerScales | None, changes: Sequence[Change], acts: bool
    ) -> Explained:
        """The incident with what the controls did."""


class Controls:
    """Does what the protector says. The adapter asks what acts in its loss, the monitor says when a step is judged.

    Args:
        protector: there are no controls where None.
        present: gives the step in progress, or None.
        meeting: the processes that share the step.
        hub: takes events.
        faults: a control that keeps failing is switched off.
        guard: fences a block and books its time under a part.

    Attributes:
        skips: whether a step can be skipped: the adapter calls `withhold` before its optimizer steps, and says so here.
    """

    def __init__(
        self,
        protector: Protector | None,
        present: Callable[[], Step | None],
        meeting: Meeting,
        hub: Outlet,
        faults: Faults,
        guard: Callable[[str], Guard],
    ) -> None:
        self._protector, self._present, self._meeting = protector, present, meeting
        self._hub, self._faults, self._guard = hub, faults, guard
        self._idle: set[str] = set()
        self._said: set[str] = set()
        self._taken: list[tuple[Tensor, Tensor | None]] = []
        self.skips = False

    @property
    def policy(self) -> Policy:
        """Their settings."""
        return Policy.of("off") if self._protector is None else self._protector.policy

    @property
    def states(self) -> dict[str, State]:
        """What they really do: one that has failed or has nothing to act on only looks on."""
        if self._protector is None:
            return {}
        parts = {"layerclip": ("layerclip", "layerclip_apply")}
        return {
            name: State.OBSERVING
            if state > State.OBSERVING
            and (name in self._idle or not all(self._faults.working(p) for p in parts.get(name, (name,))))
            else state
            for name, state in self._protector.states.items()
        }

    # -- in the loss ----------------------------------------------------------------------------------------------

    @property
    def acting(self) -> frozenset[str]:
        """Controls of the loss that act in the step in progress."""
        protector, step = self._protector, self._present()
        if protector is None or step is None or step.prepared:
            return frozenset()
        return frozenset(name for name in OF_THE_LOSS if protector.on(name) and self._faults.working(name))

    def idle(self, controls: Collection[str]) -> None:
        """These are on, and have nothing that they could act on."""
        self._idle.update(controls)

    # -- once the gradients are there -----------------------------------------------------------------------------

    def judge(self, step: Step) -> None:
        """What LayerClip makes of the step's gradients, once they have been read."""
        if self._protector is not None and step.gradients is not None and self._faults.working("layerclip"):
            with self._guard("layerclip"):
                step.scales = self._protector.judge(step.gradients.grouping, step.gradients.norms)

    def decide(self, step: Step, clipping: bool, overflow_expected: bool) -> None:
        """Let the controls decide, and say what has changed and what acts. LayerClip acts on all ranks or on none.

        Args:
            step: judged and explained.
            clipping: the clip follows, in which LayerClip can act.
            overflow_expected: the loss is scaled, so that non-finite gradients are routine.
        """
        step.clipped = clipping
        protector, rank = self._protector, self._meeting.ranks.rank
        if protector is None:
            return
        changes: list[Change] = []
        wanted = able = False
        with self._guard("controls"):
            changes = protector.decide(step.number, step.spikes, step.explained, step.scales, clipping)
            overflow = overflow_expected and step.scales is not None and not step.scales.finite
            wanted = protector.on("layerclip") and clipping and not overflow
            able = self._faults.working("layerclip") and self._faults.working("layerclip_apply")
        if step.scales is not None and step.scales.acts:  # they are rank 0's: all ranks come here, or none
            everybody = self._meeting.shared((wanted, able, self.skips or step.scales.finite))
            if everybody[0][0]:
                lacks = _lacks([each[1] for each in everybody], [each[2] for each in everybody])
                if lacks is None:
                    step.applied = step.scales
                else:
                    self._say_once(lacks, rank)
        with self._guard("controls"):
            if step.explained is not None:
                step.explained = protector.told(step.explained, step.scales, changes, step.applied is not None)
            for change in changes:
                self._hub.event(Event("control", change.message, step.number, data=change.data))
                if rank == 0:
                    warn(change.message)
            if step.applied is not None:
                message = f"step {step.number}: layerclip {step.applied.sentence}"
                self._hub.event(Event("action", message, step.number, data={"control": "layerclip"}))

    def _say_once(self, message: str, rank: int) -> None:
        if message not in self._said:
            self._said.add(message)
            self._hub.event(Event("degraded", message))
            if rank == 0:
                warn(message)

    # -- before the weights move ----------------------------------------------------------------------------------

    @property
    def looks_on(self) -> bool:
        """Whether layers of the step in progress are out of proportion, and LayerClip could not act though it may."""
        step = self._present()
        if self._protector is None or step is None or step.scales is None or not step.scales.acts:
            return False
        if step.applied is not None or step.clipped:
            return False
        return self.states["layerclip"] in (State.ARMED, State.ON)

    def clip_layers(self, norms: Norms) -> Norms | None:
        """The norms once LayerClip has acted: the same where it does not, None where they have to be read anew."""
        step = self._present()
        if step is None or step.applied is None or not step.applied.finite or step.acted:
            return norms
        step.acted = True
        with self._guard("layerclip_apply"):
            apply(step.applied, norms.parameters)
            return None if norms.sharded else take_norms(norms.parameters)
        return None

    def withhold(self, parameters: Sequence[Tensor]) -> None:
        """Before the optimizer steps: take the gradients of a step away that is to be skipped, until `give_back`.

        So the optimizer leaves weights and moments as they are, and nobody else misses a gradient.
        """
        step = self._present()
        if step is not None and step.applied is not None and not step.applied.finite:
            with self._guard("layerclip_skip"):
                self._taken = [(p, p.grad) for p in parameters if p.grad is not None]
                for p, _ in self._taken:
                    p.grad = None

    def give_back(self) -> None:
        """After the optimizer has stepped."""
        with self._guard("layerclip_skip"):
            for p, gradient in self._taken:
                if p.grad is None:
                    p.grad = gradient
            self._taken = []


def _lacks(able: Sequence[bool], possible: Sequence[bool]) -> str | None:
    """Why LayerClip does not act though it is on, where that is so.

    Args:
        able: whether it works, by rank.
        possible: whether what it would do can be done, by rank.
    """
    if not all(able):
        return "LayerClip is on and cannot act: it has failed on one of the ranks"
    if not all(possible):
        return (
            "LayerClip is on and cannot skip a step whose gradient is not finite, as it does not know the optimizer: "
            "give watch(optimizer=...) the loop's torch.optim.Optimizer"
        )
    return None
