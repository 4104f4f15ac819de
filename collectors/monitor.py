"""One step, in the training thread: what an adapter calls, in this order, and what happens then.

    begin_step(step) ................ weights probe
    add(batch) ...................... after each micro-batch's forward; caught(i, dL/dlogp) during its backward
    clip(parameters, max_norm) ...... shadow and geometry probes, norms, the one transfer, detection, localisation,
                                      LayerClip where it is on, then the clip
    end_step() ...................... deployed and weights probes, hand-over to the worker

Everything here is fenced: a fault costs the signal, never the step. What the trainer would have done itself (the clip)
is done even if all of ours fails.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seismograd.collectors.columns import device_columns, host_batch
from seismograd.collectors.controlling import Controls, Protector
from seismograd.collectors.detection import Detection, Localiser
from seismograd.collectors.guard import Guard
from seismograd.collectors.meeting import Meeting
from seismograd.collectors.payload import Gradients, LogPayload, Outlet, StepPayload
from seismograd.collectors.probes import Probes, Setup
from seismograd.collectors.step import Step
from seismograd.collectors.table import TokenTable
from seismograd.collectors.transfer import Host, Transfer
from seismograd.telemetry.detector import Detector
from seismograd.telemetry.faults import Faults
from seismograd.telemetry.layers import ModelMap
from seismograd.telemetry.norms import Norms, take_norms
from seismograd.telemetry.ranks import Alone, Ranks
from seismograd.telemetry.records import ClipSpec, Spike, TokenBatch


class StepMonitor:
    """See the module's docstring. All methods are the training thread's.

    Args:
        model: the trained model, for its parameters' names and the probes.
        probes: what they are made with.
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
        probes: Setup,
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
        self.shadow = probes.precision
        self._hub, self._faults = hub, faults
        self._map = ModelMap(model)
        self._step: Step | None = None
        self._seconds: dict[str, float] = {}
        self._meeting = Meeting(meet, self.guard)
        self._probes = Probes(model, probes, faults, self.guard)
        self._detection = Detection(detector, localiser, self._meeting, faults, self.guard)
        self.controls = Controls(protector, lambda: self._step, self._meeting, hub, faults, self.guard)
        """What acts in the step; for the adapter."""

    @property
    def spikes(self) -> tuple[Spike, ...]:
        """Spikes found so far in the present step."""
        return () if self._step is None else self._step.spikes

    def guard(self, part: str) -> Guard:
        """``with monitor.guard("norms"):`` fences the block and books its time under the part."""
        return Guard(self._faults.fence(part), self._seconds, part)

    def begin_step(self, step: int) -> None:
        """A step begins; what an unfinished one left is dropped."""
        self._meeting.begin()
        self._step = Step(step, time.perf_counter())
        with self._faults.fence("step"):
            self._probes.begin(self._step, self._meeting)

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
        clipped = self.controls.clip_layers(norms)
        if clipped is None or norms.sharded:
            whole = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            return whole if clipped is norms else norms.total
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, clipped.total)
        return norms.total

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
            self._probes.before(step, self._meeting.ranks)
        norms: Norms | None = None
        if self._faults.working("norms"):
            with self._faults.fence("norms") if clipping else self.guard("norms"):
                norms = take_norms(parameters, self._meeting.ranks.size)
                if norms is not None and scale is not None:
                    norms = norms.unscaled(scale)
        if step is not None and first:
            self._judge(step, norms, 1.0 if scale is None else float(scale), bounded)
        return norms

    def _judge(self, step: Step, norms: Norms | None, scale: float = 1.0, clipping: bool = False) -> None:
        with self.guard("transfer"):
            self._fetch(step, norms)
        self.controls.judge(step)
        step.probes_next = self._probes.due(step.number + 1)
        self._detection.judge(step, scale, self.overflow_expected)
        self._probes.agree(step.probes_next)
        self.controls.decide(step, clipping, self.overflow_expected)

    def _end(self, step: Step) -> None:
        if not step.prepared:  # the loop neither clipped nor gave us its optimizer: there are tokens only
            self._judge(step, None)
        self._probes.after(step)
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
                    probe_spacings=self._probes.spacings(),
                    probed=step.probed,
                    explained=step.explained,
                    controls=self.controls.states,
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
        step.probed = self._probes.take_out(host)

    def _gradients(self, norms: Norms, per_parameter: Host, total: float) -> Gradients:
        grouping = self._map.grouping(norms.parameters)
        wide = per_parameter.astype(np.float64)
        return Gradients(grouping, grouping.norms(wide, total), int((~np.isfinite(wide)).sum()))
