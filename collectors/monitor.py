"""One step, in the training thread: what an adapter calls, in this order, and what happens then.

    begin_step(step)
    add(batch) ...................... after each micro-batch's forward; caught(i, dL/dlogp) during its backward
    clip(parameters, max_norm) ...... shadow probe, norms, the one transfer, detection, then the clip
    end_step() ...................... deployed probe, hand-over to the worker

Everything here is fenced: a fault costs the signal, never the step. What the trainer would have done itself (the clip)
is done even if all of ours fails.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from seismograd.collectors.budget import ProbeBudget
from seismograd.collectors.columns import device_columns, host_batch
from seismograd.collectors.gradients import Norms, take_norms
from seismograd.collectors.guard import Guard
from seismograd.collectors.payload import Deployed, Gradients, LogPayload, StepPayload
from seismograd.collectors.ratio import largest_sequence_pull, nonfinite_counts
from seismograd.collectors.shadow import Precision, shadow_logp
from seismograd.collectors.stopwatch import Stopwatch
from seismograd.collectors.table import TokenTable
from seismograd.collectors.transfer import Host, Transfer
from seismograd.telemetry.detector import Detector, Measured
from seismograd.telemetry.faults import Faults
from seismograd.telemetry.layers import ModelMap
from seismograd.telemetry.records import ClipSpec, Event, Spike, TokenBatch


class Outlet(Protocol):
    """The hub, as far as the training thread knows it. Neither method waits."""

    def put(self, item: Any) -> bool: ...

    def event(self, event: Event) -> None: ...


@dataclass
class _Step:
    """The step in progress."""

    number: int
    began: float
    batches: list[TokenBatch] = field(default_factory=list)
    prepared: bool = False
    shadowed: bool = False
    tokens: TokenTable | None = None
    gradients: Gradients | None = None
    spikes: tuple[Spike, ...] = ()
    deployed: tuple[Deployed, ...] = ()


class StepMonitor:
    """See the module's docstring. All methods are the training thread's.

    Args:
        model: the trained model, for its parameters' names and the shadow forward.
        budget: spaces the probes.
        shadow: the rollout's precision.
        detector: judges the rules of kind "step".
        hub: takes payloads and events.
        faults: fences every part.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: ProbeBudget,
        shadow: Precision,
        detector: Detector,
        hub: Outlet,
        faults: Faults,
    ) -> None:
        self.clips: tuple[ClipSpec, ...] = ()
        """How the loss limits its ratios; set by the adapter."""
        self.overflow_expected = False
        """The loss is scaled, so that non-finite gradients are routine; set by the adapter."""
        self.shadow = shadow
        self._model, self._budget = model, budget
        self._detector, self._hub, self._faults = detector, hub, faults
        self._map = ModelMap(model)
        self._step: _Step | None = None
        self._seconds: dict[str, float] = {}
        self._running: list[tuple[str, Stopwatch]] = []  # probes whose time is not booked yet
        self._pending: list[tuple[int, Tensor]] = []  # deployed probes whose result is still on the device

    @property
    def spikes(self) -> tuple[Spike, ...]:
        """Spikes found so far in the present step."""
        return () if self._step is None else self._step.spikes

    def guard(self, part: str) -> Guard:
        """``with monitor.guard("norms"):`` fences the block and books its time under the part."""
        return Guard(self._faults.fence(part), self._seconds, part)

    def begin_step(self, step: int) -> None:
        """A step begins; what an unfinished one left is dropped."""
        self._step = _Step(step, time.perf_counter())

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
        """Detect, then clip as ``torch.nn.utils.clip_grad_norm_`` does, to the bit.

        Returns:
            The global norm before clipping, a scalar tensor.
        """
        norms: Norms | None = None
        with self._faults.fence("step"):
            norms = self._prepare(parameters, clipping=True)
        if norms is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norms.total)
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
        self, parameters: Sequence[Tensor], clipping: bool = False, scale: Tensor | None = None
    ) -> Norms | None:
        """Probe, read the norms, transfer and judge, once a step, before the optimizer step.

        Args:
            parameters: those that are trained.
            clipping: the caller clips with the norms, so that reading them is not a cost of ours.
            scale: see `before_optimizer`.
        """
        step = self._step
        first = step is not None and not step.prepared
        if step is not None and first:
            step.prepared = True
            self._probe_shadow(step)
        norms: Norms | None = None
        if self._faults.working("norms"):
            with self._faults.fence("norms") if clipping else self.guard("norms"):
                norms = take_norms(parameters)
                if norms is not None and scale is not None:
                    norms = norms.unscaled(scale)
        if step is not None and first:
            self._judge(step, norms)
        return norms

    def _end(self, step: _Step) -> None:
        if not step.prepared:  # the loop neither clipped nor gave us its optimizer: there are tokens only
            self._judge(step, None)
        self._probe_deployed(step)
        seconds = time.perf_counter() - step.began
        mine, self._seconds = self._seconds, {}  # before the guard, whose own time is booked on the next step
        with self.guard("handover"):
            self._budget.trained(seconds)
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
                    probe_ages=self._budget.ages(step.number),
                    deployed=step.deployed,
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
        if self._pending:
            with self.guard("handover"):
                transfer = Transfer()
                self._add_pending(transfer)
                for found in self._take_pending(transfer.fetch()):
                    self._hub.put(found)

    # -- probes ---------------------------------------------------------------------------------------------------

    def _probe_shadow(self, step: _Step) -> None:
        if not self._due("shadow", step):
            return
        with self._booked("shadow", step), self.guard("probe_shadow") as guard:
            step.batches = [replace(batch, shadow_logp=self._shadow_logp(batch)) for batch in step.batches]
            step.shadowed = True
        if guard.failed:
            step.batches = [replace(batch, shadow_logp=None) for batch in step.batches]

    def _probe_deployed(self, step: _Step) -> None:
        """Needs the shadow of this very step as its before; the result stays on the device until the next transfer."""
        if not (step.shadowed and self._due("deployed", step)):
            return
        with self._booked("deployed", step), self.guard("probe_deployed"):
            gains = [self._gain(batch) for batch in step.batches if batch.advantage is not None]
            if gains:
                total = torch.stack(gains).sum(dim=0)
                self._pending.append((step.number, total[0] / total[1].clamp(min=1.0)))

    def _booked(self, probe: str, step: _Step) -> Stopwatch:
        """Times a run of a probe, for the budget; what it took is known after the next transfer."""
        self._budget.ran(probe, step.number)
        watch = Stopwatch(step.batches[0].mask.device)
        self._running.append((probe, watch))
        return watch

    def _book(self) -> None:
        """Book the probes whose time is known."""
        running, self._running = self._running, []
        for probe, watch in running:
            seconds = watch.seconds()
            if seconds is None:
                self._running.append((probe, watch))
            else:
                self._budget.spent(probe, seconds)

    def _due(self, probe: str, step: _Step) -> bool:
        return (
            self._faults.working(f"probe_{probe}")
            and bool(step.batches)
            and all(batch.replay is not None for batch in step.batches)
            and self._budget.due(probe, step.number)
        )

    def _shadow_logp(self, batch: TokenBatch) -> Tensor:
        assert batch.replay is not None
        return shadow_logp(self._model, batch.replay, self.shadow)

    @torch.no_grad()
    def _gain(self, batch: TokenBatch) -> Tensor:
        """(2,) sum of the trained tokens' (after - before) * sign(A), and their number."""
        assert batch.shadow_logp is not None
        assert batch.advantage is not None
        gain = (self._shadow_logp(batch) - batch.shadow_logp) * torch.sign(batch.advantage)
        counted = batch.mask & torch.isfinite(gain)
        return torch.stack([torch.where(counted, gain, 0.0).sum(), counted.sum()])

    # -- the transfer ---------------------------------------------------------------------------------------------

    def _fetch(self, step: _Step, norms: Norms | None) -> None:
        """One device-to-host copy, then the step's tables on the host."""
        transfer = Transfer()
        if norms is not None:
            transfer.add("norms", norms.per_parameter)
            transfer.add("total", norms.total)
        for i, batch in enumerate(step.batches):
            for key, tensor in device_columns(batch):
                transfer.add((i, key), tensor)
        self._add_pending(transfer)
        host = transfer.fetch()
        self._book()
        if norms is not None:
            step.gradients = self._gradients(norms, host["norms"], float(host["total"]))
        if step.batches:
            batches = [host_batch(batch, i, host) for i, batch in enumerate(step.batches)]
            step.tokens = TokenTable.of(batches, engine=all(batch.engine for batch in step.batches))
        step.deployed = self._take_pending(host)

    def _add_pending(self, transfer: Transfer) -> None:
        for number, value in self._pending:
            transfer.add(("deployed", number), value)

    def _take_pending(self, host: Mapping[Any, Host]) -> tuple[Deployed, ...]:
        pending, self._pending = self._pending, []
        return tuple(Deployed(number, float(host["deployed", number])) for number, _ in pending)

    def _gradients(self, norms: Norms, per_parameter: Host, total: float) -> Gradients:
        grouping = self._map.grouping(norms.parameters)
        wide = per_parameter.astype(np.float64)
        return Gradients(grouping, grouping.norms(wide, total), int((~np.isfinite(wide)).sum()))

    # -- detection ------------------------------------------------------------------------------------------------

    def _judge(self, step: _Step, norms: Norms | None) -> None:
        with self.guard("transfer"):
            self._fetch(step, norms)
        if self._faults.working("detect"):
            with self.guard("detect"):
                step.spikes = tuple(self._detector.judge(step.number, self._measure(step)))

    def _measure(self, step: _Step) -> dict[str, Measured]:
        """What the rules of kind "step" look at."""
        found: dict[str, Measured] = {}
        nonfinite: dict[str, int] = {}
        if step.gradients is not None:
            series = step.gradients.grouping.series
            found["grad_norm"] = Measured([{"layer": a, "group": b} for a, b in series], step.gradients.norms)
            if not self.overflow_expected:
                nonfinite["gradient"] = step.gradients.nonfinite
        if step.tokens is not None:
            nonfinite |= nonfinite_counts(step.tokens)
            if self.overflow_expected:
                nonfinite.pop("loss_weight", None)
            weight = step.tokens.loss_weight
            if weight is not None and (ok := step.tokens.trained & np.isfinite(weight)).any():
                largest = np.array([np.abs(weight[ok]).max()])
                found["loss_weight"] = Measured([{"stat": "abs_max"}], largest)
                if step.tokens.sequences_known:
                    found["sequence_loss_weight"] = Measured([{}], np.array([largest_sequence_pull(step.tokens)]))
        if nonfinite:
            counts = np.array(list(nonfinite.values()), dtype=np.float64)
            found["nonfinite_total"] = Measured([{"where": where} for where in nonfinite], counts)
        return found
