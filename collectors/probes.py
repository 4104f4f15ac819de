"""Probes: what costs a forward, a backward or a pass over the weights, and is spaced by the budget.

    begin   a step begins ............ weights, before
    before  gradients are whole ...... shadow, geometry
    after   the weights have moved ... deployed, weights

A result stays on the device until a step's transfer takes it along: that of the same step, or of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seismograd.collectors.budget import PROBES, ProbeBudget
from seismograd.collectors.deployed import improvement, improvement_readings
from seismograd.collectors.geometry import Replays, geometry, geometry_readings
from seismograd.collectors.guard import Guard
from seismograd.collectors.meeting import Meeting
from seismograd.collectors.payload import Probed
from seismograd.collectors.shadow import DTYPES, Precision, shadow_logp
from seismograd.collectors.step import Step
from seismograd.collectors.stopwatch import Stopwatch
from seismograd.collectors.transfer import Host, Transfer
from seismograd.collectors.weights import Weights, newest_sync, weight_readings
from seismograd.telemetry.faults import Faults
from seismograd.telemetry.ranks import Ranks
from seismograd.telemetry.records import Reading, TokenBatch


@dataclass(frozen=True)
class Setup:
    """What probes are made with.

    Args:
        budget: spaces them.
        precision: the rollout's.
        replays: run a step's micro-batches again, for a backward of one's own; None where nobody can.
        parts: those that this process takes part in. One that runs on some ranks only holds no collectives.
        processes: that share a step's gradient.
    """

    budget: ProbeBudget
    precision: Precision = "bf16"
    replays: Replays | None = None
    parts: Collection[str] = PROBES
    processes: int = 1


class Probes:
    """Runs what is due.

    Args:
        model: the trained one.
        setup: see there.
        faults: a probe that keeps failing is switched off.
        guard: fences a block and books its time under a part.
    """

    def __init__(self, model: nn.Module, setup: Setup, faults: Faults, guard: Callable[[str], Guard]) -> None:
        self._model, self._setup, self._budget = model, setup, setup.budget
        self._faults, self._guard = faults, guard
        self._weights = Weights(model, DTYPES[setup.precision])
        self._plan: frozenset[str] = frozenset()
        self._next: frozenset[str] | None = None
        self._running: list[tuple[str, Stopwatch, bool]] = []  # whose time is not booked yet, and whether that ends it
        self._pending: list[_Pending] = []

    # -- what is due ----------------------------------------------------------------------------------------------

    def due(self, step: int) -> frozenset[str]:
        """What this process would run at a step: not what keeps failing, here or where its results are read."""
        with self._faults.fence("step"):
            due = self._budget.due(step)
            return frozenset(p for p in due if all(self._faults.working(f"{part}_{p}") for part in ("probe", "read")))
        return frozenset()

    def agree(self, plan: frozenset[str]) -> None:
        """What the step to come runs: rank 0's choice."""
        self._next = plan

    @property
    def plan(self) -> frozenset[str]:
        """What the present step runs, on all ranks: each does those of them that it takes part in."""
        return self._plan

    # -- the step -------------------------------------------------------------------------------------------------

    def begin(self, step: Step, meeting: Meeting) -> None:
        """The step begins; its weights are still those that the step before has left."""
        # Several ranks have agreed in the step before: to exchange it now would let each wait for all the others.
        if self._next is None or meeting.ranks.size == 1:
            self._next = meeting.shared(self.due(step.number))[0]
        self._plan = self._next
        if self._runs("weights"):
            with self._booked("weights", step, "first"), self._guard("probe_weights"):
                self._weights.before(step.number)

    def before(self, step: Step, ranks: Ranks) -> None:
        """Before the weights move, with gradients that nobody has clipped."""
        if self._runs("shadow") and step.batches and all(batch.replay is not None for batch in step.batches):
            self._shadow(step)
        if "geometry" in self._plan and "geometry" in self._setup.parts and ranks.size == self._setup.processes:
            self._geometry(step, ranks)

    def after(self, step: Step) -> None:
        """After the weights have moved. The deployed probe needs the shadow of this very step as its before."""
        judged = [batch for batch in step.batches if batch.advantage is not None]
        if step.shadowed and judged and self._runs("deployed"):
            with self._booked("deployed", step), self._guard("probe_deployed"):
                found = improvement(judged, [self._logp(batch) for batch in judged])
                self._result("deployed", step, found, improvement_readings)
        if self._runs("weights"):
            with self._booked("weights", step, "last"), self._guard("probe_weights"):
                shares = self._weights.after(step.number, newest_sync(step.number, step.tokens))
                if shares is not None and self._weights.sample is not None:
                    self._result("weights", step, shares, partial(weight_readings, self._weights.sample))

    def _shadow(self, step: Step) -> None:
        with self._booked("shadow", step), self._guard("probe_shadow") as guard:
            step.batches = [replace(batch, shadow_logp=self._logp(batch)) for batch in step.batches]
            step.shadowed = True
        if guard.failed:
            step.batches = [replace(batch, shadow_logp=None) for batch in step.batches]

    def _geometry(self, step: Step, ranks: Ranks) -> None:
        replays = self._setup.replays
        with self._guard("probe_geometry"):
            can = all(batch.replay is not None and batch.advantage is not None for batch in step.batches)
            able = can and replays is not None and self._faults.working("probe_geometry")
            # Settled by all ranks together, so that none waits for one that does not come.
            everybody = ranks.gather((able, bool(step.batches)))
            if replays is not None and all(a for a, _ in everybody) and any(tokens for _, tokens in everybody):
                with self._booked("geometry", step):
                    found = geometry(self._model, step.batches, replays, ranks)
                    self._result("geometry", step, found, geometry_readings)

    # -- results --------------------------------------------------------------------------------------------------

    def lay_in(self, transfer: Transfer) -> None:
        """What waits on the device goes with this transfer."""
        for pending in self._pending:
            transfer.add((pending.probe, pending.step), pending.values)

    def take_out(self, host: Mapping[Any, Host]) -> tuple[Probed, ...]:
        """What has arrived; and the time of the probes that have finished is booked."""
        pending, self._pending = self._pending, []
        self._book()
        return tuple(Probed(p.probe, p.step, host[p.probe, p.step], p.read) for p in pending)

    @property
    def waiting(self) -> bool:
        """Whether a result waits for a transfer."""
        return bool(self._pending)

    def trained(self, seconds: float) -> None:
        """Book one training step."""
        self._budget.trained(seconds)

    def ages(self, step: int) -> dict[str, int]:
        """Steps since each probe's last run."""
        return self._budget.ages(step)

    def spacings(self) -> dict[str, float]:
        """Steps from one run of each probe to the next, as they are chosen at present."""
        return self._budget.spacings()

    def _result(self, probe: str, step: Step, values: Tensor, read: Callable[[Host], Sequence[Reading]]) -> None:
        self._pending.append(_Pending(probe, step.number, values, read))

    def _runs(self, probe: str) -> bool:
        return probe in self._plan and probe in self._setup.parts and self._faults.working(f"probe_{probe}")

    def _booked(self, probe: str, step: Step, part: Literal["whole", "first", "last"] = "whole") -> Stopwatch:
        """Times a run of a probe, or a part of one, for the budget; what it took is known after the next transfer."""
        if part != "last":
            self._budget.ran(probe, step.number)
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        watch = Stopwatch(device)
        self._running.append((probe, watch, part != "first"))
        return watch

    def _book(self) -> None:
        running, self._running = self._running, []
        for probe, watch, ended in running:
            seconds = watch.seconds()
            if seconds is None:
                self._running.append((probe, watch, ended))
            else:
                self._budget.spent(probe, seconds, ended)

    def _logp(self, batch: TokenBatch) -> Tensor:
        return shadow_logp(self._model, batch.replayed, self._setup.precision)


@dataclass(frozen=True)
class _Pending:
    """A result that is still on the device; see `Probed`."""

    probe: str
    step: int
    values: Tensor
    read: Callable[[Host], Sequence[Reading]]
