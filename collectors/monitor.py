"""One step, in the training thread: what an adapter calls, in this order, and what happens then.

    begin_step(step)
    add(batch) ...................... after each micro-batch's forward; caught(i, dL/dlogp) during its backward
    clip(parameters, max_norm) ...... shadow probe, norms, the one transfer, detection, localisation, LayerClip where it
                                      is on, then the clip
    end_step() ...................... deployed probe, hand-over to the worker

Everything here is fenced: a fault costs the signal, never the step. What the trainer would have done itself (the clip)
is done even if all of ours fails.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seismograd.collectors.budget import ProbeBudget
from seismograd.collectors.columns import device_columns, host_batch
from seismograd.collectors.guard import Guard
from seismograd.collectors.payload import Gradients, LogPayload, StepPayload
from seismograd.collectors.probes import Probes
from seismograd.collectors.shadow import Precision
from seismograd.collectors.step import Step, measured_in, merged
from seismograd.collectors.table import TokenTable
from seismograd.collectors.transfer import Host, Transfer
from seismograd.controls.layerclip import LayerScales, apply
from seismograd.controls.policy import Policy
from seismograd.controls.switch import Change, State
from seismograd.telemetry.detector import Detector, Measured
from seismograd.telemetry.faults import Faults, warn
from seismograd.telemetry.incidents import Explained
from seismograd.telemetry.layers import Grouping, ModelMap
from seismograd.telemetry.norms import Norms, take_norms
from seismograd.telemetry.ranks import Alone, Ranks
from seismograd.telemetry.records import ClipSpec, Event, Spike, TokenBatch

T = TypeVar("T")

OF_THE_LOSS = ("tokenclip", "seqclip", "cleanratio")
"""Controls that act in the loss."""


class Outlet(Protocol):
    """The hub, as far as the training thread knows it. Neither method waits."""

    def put(self, item: Any) -> bool: ...

    def event(self, event: Event) -> None: ...


class Localiser(Protocol):
    """Explains a spike while the step's gradients are still there. Leaves everything as it was."""

    def wants(self, spikes: Sequence[Spike]) -> bool:
        """Whether the step's spikes are to be explained."""

    def explain(
        self, step: int, batches: Sequence[TokenBatch], spikes: Sequence[Spike], ranks: Ranks, scale: float
    ) -> Explained:
        """The incident, from all of the step's micro-batches of all ranks, all of which call it.

        Args:
            step: its number.
            batches: of this rank.
            spikes: found in it.
            ranks: those that share it.
            scale: what the gradients are still multiplied by.
        """


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


class StepMonitor:
    """See the module's docstring. All methods are the training thread's.

    Args:
        model: the trained model, for its parameters' names and the shadow forward.
        budget: spaces the probes.
        shadow: the rollout's precision.
        detector: judges the rules of kind "step".
        hub: takes payloads and events.
        faults: fences every part.
        localiser: explains spikes; nobody does where None.
        protector: the controls; there are none where None.
        meet: the processes that share the step, asked for when the first step begins; all of them call it then.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: ProbeBudget,
        shadow: Precision,
        detector: Detector,
        hub: Outlet,
        faults: Faults,
        localiser: Localiser | None = None,
        protector: Protector | None = None,
        meet: Callable[[], Ranks] = Alone,
    ) -> None:
        self.clips: tuple[ClipSpec, ...] = ()
        """How the loss limits its ratios; set by the adapter."""
        self.overflow_expected = False
        """The loss is scaled, so that non-finite gradients are routine; set by the adapter."""
        self.shadow = shadow
        self._detector, self._hub, self._faults = detector, hub, faults
        self._localiser, self._protector = localiser, protector
        self._map = ModelMap(model)
        self._probes = Probes(model, budget, shadow, faults, self.guard)
        self._meet = meet
        self._ranks: Ranks | None = None
        self._step: Step | None = None
        self._seconds: dict[str, float] = {}
        self._taken: list[tuple[Tensor, Tensor | None]] = []
        self._idle: set[str] = set()
        self._said: set[str] = set()

    @property
    def spikes(self) -> tuple[Spike, ...]:
        """Spikes found so far in the present step."""
        return () if self._step is None else self._step.spikes

    def guard(self, part: str) -> Guard:
        """``with monitor.guard("norms"):`` fences the block and books its time under the part."""
        return Guard(self._faults.fence(part), self._seconds, part)

    def begin_step(self, step: int) -> None:
        """A step begins; what an unfinished one left is dropped."""
        if self._ranks is None:
            with self.guard("ranks"):
                self._ranks = self._meet()
        self._step = Step(step, time.perf_counter())

    def abandon(self) -> None:
        """The step in progress will not end: let go of what it held."""
        self._step = None

    @property
    def collecting(self) -> bool:
        """Whether a step is in progress and has not been clipped: the time for `add` and `caught`."""
        return self._step is not None and not self._step.prepared

    @property
    def in_step(self) -> bool:
        """Whether a step is in progress."""
        return self._step is not None

    @property
    def uncaught(self) -> int:
        """Micro-batches of the step in progress whose dL/dlogp no backward has brought."""
        return 0 if self._step is None else sum(batch.loss_weight is None for batch in self._step.batches)

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the step in progress, once it has been read."""
        return None if self._step is None or self._step.gradients is None else self._step.gradients.total

    @property
    def acting(self) -> frozenset[str]:
        """Controls of the loss that act in the step in progress."""
        protector = self._protector
        if protector is None or not self.collecting:
            return frozenset()
        return frozenset(name for name in OF_THE_LOSS if protector.on(name) and self._faults.working(name))

    def idle(self, controls: Collection[str]) -> None:
        """These are on, and have nothing that they could act on."""
        self._idle.update(controls)

    def _states(self) -> dict[str, State]:
        """What the controls really do: one that has failed or has nothing to act on only looks on."""
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

    @property
    def policy(self) -> Policy:
        """The controls' settings."""
        return Policy.of("off") if self._protector is None else self._protector.policy

    @property
    def looks_on(self) -> bool:
        """Whether layers of the step in progress are out of proportion, and LayerClip could not act though it may."""
        step, protector = self._step, self._protector
        if step is None or protector is None or step.scales is None or not step.scales.acts or step.applied is not None:
            return False
        return not step.clipped and self._states()["layerclip"] in (State.ARMED, State.ON)

    def add(self, batch: TokenBatch) -> int | None:
        """Keep a micro-batch until the step ends; its position, for `caught`, or None where no step collects."""
        if self._step is None or self._step.prepared:
            return None
        self._step.batches.append(batch)
        return len(self._step.batches) - 1

    def caught_other(self, position: int, name: str, weight: Tensor) -> None:
        """The backward brought dL/d(output) of an output beside logp; see ``TokenBatch.others``."""
        if not self.collecting:
            return
        assert self._step is not None
        batch = self._step.batches[position]
        total = batch.others[name] + weight if name in batch.others else weight
        self._step.batches[position] = replace(batch, others={**batch.others, name: total})

    def caught(self, position: int, loss_weight: Tensor) -> None:
        """The backward brought dL/dlogp (B, T-1) of the micro-batch at `position`.

        A second backward adds up, as .grad does. torch.autograd.grad through logp cannot be told from one.
        """
        if self._step is None or self._step.prepared:
            return
        batch = self._step.batches[position]
        total = loss_weight if batch.loss_weight is None else batch.loss_weight + loss_weight
        self._step.batches[position] = replace(batch, loss_weight=total)

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Detect, then clip as ``torch.nn.utils.clip_grad_norm_`` does, to the bit. LayerClip acts before it.

        Returns:
            The global norm before any clipping, a scalar tensor.
        """
        norms: Norms | None = None
        with self._faults.fence("step"):
            # A bound of infinity only reads the norms, and nothing is to be clipped by layer either.
            norms = self._prepare(parameters, clipping=True, bounded=math.isfinite(max_norm))
        if norms is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        clipped = self._layers_clipped(norms)
        if clipped is None or norms.sharded:
            whole = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            return whole if clipped is norms else norms.total
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, clipped.total)
        return norms.total

    def _layers_clipped(self, norms: Norms) -> Norms | None:
        """The norms once LayerClip has acted: the same where it does not, None where they have to be read anew."""
        step = self._step
        if step is None or step.applied is None or not step.applied.finite or step.acted:
            return norms
        step.acted = True
        with self.guard("layerclip_apply"):
            apply(step.applied, norms.parameters)
            return None if norms.sharded else take_norms(norms.parameters)
        return None

    def withhold(self, parameters: Sequence[Tensor]) -> None:
        """Before the optimizer steps: take the gradients of a step away that is to be skipped, until `give_back`.

        So the optimizer leaves weights and moments as they are, and nobody else misses a gradient.
        """
        step = self._step
        if step is not None and step.applied is not None and not step.applied.finite:
            with self.guard("layerclip_skip"):
                self._taken = [(p, p.grad) for p in parameters if p.grad is not None]
                for p, _ in self._taken:
                    p.grad = None

    def give_back(self) -> None:
        """After the optimizer has stepped."""
        with self.guard("layerclip_skip"):
            for p, gradient in self._taken:
                if p.grad is None:
                    p.grad = gradient
            self._taken = []

    def before_optimizer(self, parameters: Sequence[Tensor], scale: Tensor | None = None) -> None:
        """The last moment before the weights move; a step that has clipped has been judged already.

        Args:
            parameters: those that are trained.
            scale: what the gradients are still multiplied by, a scalar tensor, or None.
        """
        with self._faults.fence("step"):
            if self._step is not None and not self._step.prepared:
                self._prepare(parameters, scale=scale)

    def end_step(self) -> None:
        """The optimizer has stepped: probe what was deployed, and hand the step over."""
        step, self._step = self._step, None
        if step is not None:
            with self._faults.fence("step"):
                self._end(step)

    def _prepare(
        self,
        parameters: Sequence[Tensor],
        clipping: bool = False,
        scale: Tensor | None = None,
        bounded: bool = False,
    ) -> Norms | None:
        """Probe, read the norms, transfer and judge, once a step, before the optimizer step.

        Args:
            parameters: those that are trained.
            clipping: the caller clips with the norms, so that reading them is not a cost of ours.
            scale: see `before_optimizer`.
            bounded: and does so with a finite bound, so that LayerClip may act.
        """
        step = self._step
        first = step is not None and not step.prepared
        if step is not None and first:
            step.prepared = True
            self._probes.shadow(step)
        norms: Norms | None = None
        if self._faults.working("norms"):
            with self._faults.fence("norms") if clipping else self.guard("norms"):
                norms = take_norms(parameters, 1 if self._ranks is None else self._ranks.size)
                if norms is not None and scale is not None:
                    norms = norms.unscaled(scale)
        if step is not None and first:
            self._judge(step, norms, 1.0 if scale is None else float(scale), bounded)
        return norms

    def _end(self, step: Step) -> None:
        if not step.prepared:  # the loop neither clipped nor gave us its optimizer: there are tokens only
            self._judge(step, None)
        self._probes.deployed(step)
        seconds = time.perf_counter() - step.began
        mine, self._seconds = self._seconds, {}  # before the guard, whose own time is booked on the next step
        with self.guard("handover"):
            self._probes.trained(seconds)
            self._hub.put(
                StepPayload(
                    step=step.number,
                    ended=time.time(),
                    seconds=seconds,
                    tokens=step.tokens,
                    clips=self.clips,
                    gradients=step.gradients,
                    overflow_expected=self.overflow_expected,
                    spikes=step.spikes,
                    hook_seconds=mine,
                    probe_ages=self._probes.ages(step.number),
                    deployed=step.deployed,
                    explained=step.explained,
                    controls=self._states(),
                    scales=step.scales,
                )
            )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand over what the trainer logs; the worker leaves out what is not a number."""
        if values:
            with self.guard("handover"):
                self._hub.put(LogPayload(step, dict(values)))

    def finish(self) -> None:
        """Training ends: hand over what waits for a further step's transfer."""
        self._step = None
        if self._probes.waiting:
            with self.guard("handover"):
                transfer = Transfer()
                self._probes.lay_in(transfer)
                for found in self._probes.take_out(transfer.fetch()):
                    self._hub.put(found)

    # -- the transfer ---------------------------------------------------------------------------------------------

    def _fetch(self, step: Step, norms: Norms | None) -> None:
        """One device-to-host copy, then the step's tables on the host."""
        transfer = Transfer()
        if norms is not None:
            transfer.add("norms", norms.per_parameter)
            transfer.add("total", norms.total)
        for i, batch in enumerate(step.batches):
            for key, tensor in device_columns(batch):
                transfer.add((i, key), tensor)
        self._probes.lay_in(transfer)
        host = transfer.fetch()
        if norms is not None:
            step.gradients = self._gradients(norms, host["norms"], float(host["total"]))
        if step.batches:
            batches = [host_batch(batch, i, host) for i, batch in enumerate(step.batches)]
            step.tokens = TokenTable.of(batches, engine=all(batch.engine for batch in step.batches))
        step.deployed = self._probes.take_out(host)

    def _gradients(self, norms: Norms, per_parameter: Host, total: float) -> Gradients:
        grouping = self._map.grouping(norms.parameters)
        wide = per_parameter.astype(np.float64)
        return Gradients(grouping, grouping.norms(wide, total), int((~np.isfinite(wide)).sum()))

    # -- detection ------------------------------------------------------------------------------------------------

    def _judge(self, step: Step, norms: Norms | None, scale: float = 1.0, clipping: bool = False) -> None:
        with self.guard("transfer"):
            self._fetch(step, norms)
        if self._protector is not None and step.gradients is not None and self._faults.working("layerclip"):
            with self.guard("layerclip"):
                step.scales = self._protector.judge(step.gradients.grouping, step.gradients.norms)
        wanted = self._detect(step, self._ranks or Alone())
        ranks = self._ranks or Alone()  # anew: the others may have been lost meanwhile
        localiser = self._localiser
        if wanted and localiser is not None and self._faults.working("gradloc"):
            with self.guard("gradloc"):
                step.explained = localiser.explain(step.number, step.batches, step.spikes, ranks, scale)
        self._protect(step, self._ranks or Alone(), clipping)

    def _protect(self, step: Step, ranks: Ranks, clipping: bool) -> None:
        """Let the controls decide, and say what has changed and what acts. LayerClip acts on all ranks or on none.

        Args:
            step: judged and explained.
            ranks: those that share it.
            clipping: the clip follows, in which LayerClip can act.
        """
        step.clipped = clipping
        protector = self._protector
        if protector is None:
            return
        changes: list[Change] = []
        wanted = able = False
        with self.guard("controls"):
            changes = protector.decide(step.number, step.spikes, step.explained, step.scales, clipping)
            overflow = self.overflow_expected and step.scales is not None and not step.scales.finite
            wanted = protector.on("layerclip") and clipping and not overflow
            able = self._faults.working("layerclip") and self._faults.working("layerclip_apply")
        if step.scales is not None and step.scales.acts:  # they are rank 0's: all ranks come here, or none
            everybody = self._shared(ranks, (wanted, able))
            if everybody[0][0] and all(each for _, each in everybody):
                step.applied = step.scales
            elif everybody[0][0]:
                self._say_once("LayerClip is on and cannot act: it has failed on one of the ranks", ranks)
        with self.guard("controls"):
            if step.explained is not None:
                step.explained = protector.told(step.explained, step.scales, changes, step.applied is not None)
            for change in changes:
                self._hub.event(Event("control", change.message, step.number, data=change.data))
                if ranks.rank == 0:
                    warn(change.message)
            if step.applied is not None:
                message = f"step {step.number}: layerclip {step.applied.sentence}"
                self._hub.event(Event("action", message, step.number, data={"control": "layerclip"}))

    def _say_once(self, message: str, ranks: Ranks) -> None:
        if message not in self._said:
            self._said.add(message)
            self._hub.event(Event("degraded", message))
            if ranks.rank == 0:
                warn(message)

    def _detect(self, step: Step, ranks: Ranks) -> bool:
        """Judge the step; whether it is to be localised. Rank 0 judges what all have seen, and all do as it says.

        No fault of one rank keeps it from what the others wait for.
        """
        localiser = self._localiser if self._faults.working("gradloc") else None
        able = localiser is not None and bool(step.batches)
        mine = _Seen({}, able, any(batch.mask.numel() for batch in step.batches))
        if self._faults.working("detect"):
            with self.guard("detect"):
                mine = replace(mine, measured=measured_in(step, self.overflow_expected))
        everybody = self._shared(ranks, mine)
        if ranks.rank == 0 and self._faults.working("detect"):
            with self.guard("detect"):
                measured = merged([seen.measured for seen in everybody])
                step.spikes = tuple(self._detector.judge(step.number, measured))
        able = all(seen.able for seen in everybody) and any(seen.tokens for seen in everybody)
        wanted = localiser is not None and able and localiser.wants(step.spikes)
        step.spikes, wanted, step.scales = self._shared(ranks, (step.spikes, wanted, step.scales))[0]
        return wanted

    def _shared(self, ranks: Ranks, item: T) -> list[T]:
        """Everybody's; one's own where the others cannot be reached, from then on."""
        if self._ranks is None or isinstance(self._ranks, Alone):
            return [item]
        with self.guard("ranks"):
            return ranks.gather(item)
        self._ranks = Alone()
        return [item]


@dataclass(frozen=True)
class _Seen:
    """What one rank brings to the detection.

    Args:
        measured: what its rules look at.
        able: whether it can localise.
        tokens: whether its share of the step has any.
    """

    measured: Mapping[str, Measured]
    able: bool
    tokens: bool
