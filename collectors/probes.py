"""The probes of one step: extra forwards in the rollout's precision, spaced by the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seismograd.collectors.budget import ProbeBudget
from seismograd.collectors.guard import Guard
from seismograd.collectors.payload import Deployed
from seismograd.collectors.shadow import Precision, shadow_logp
from seismograd.collectors.step import Step
from seismograd.collectors.stopwatch import Stopwatch
from seismograd.collectors.transfer import Host, Transfer
from seismograd.telemetry.faults import Faults
from seismograd.telemetry.records import TokenBatch


class Probes:
    """Runs what is due.

    Args:
        model: for the shadow forward.
        budget: spaces them.
        shadow: the rollout's precision.
        faults: a probe that keeps failing is switched off.
        guard: fences a block and books its time under a part.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: ProbeBudget,
        shadow: Precision,
        faults: Faults,
        guard: Callable[[str], Guard],
    ) -> None:
        self._model, self._budget, self._precision = model, budget, shadow
        self._faults, self._guard = faults, guard
        self._running: list[tuple[str, Stopwatch]] = []  # whose time is not booked yet
        self._pending: list[tuple[int, Tensor]] = []  # deployed probes whose result is still on the device

    def shadow(self, step: Step) -> None:
        """Before the weights move: the step's tokens in the rollout's precision."""
        if not self._due("shadow", step):
            return
        with self._booked("shadow", step), self._guard("probe_shadow") as guard:
            step.batches = [replace(batch, shadow_logp=self._logp(batch)) for batch in step.batches]
            step.shadowed = True
        if guard.failed:
            step.batches = [replace(batch, shadow_logp=None) for batch in step.batches]

    def deployed(self, step: Step) -> None:
        """After the weights have moved. Needs the shadow of this very step as its before; the result stays on the
        device until the next transfer.
        """
        if not (step.shadowed and self._due("deployed", step)):
            return
        with self._booked("deployed", step), self._guard("probe_deployed"):
            gains = [self._gain(batch) for batch in step.batches if batch.advantage is not None]
            if gains:
                total = torch.stack(gains).sum(dim=0)
                self._pending.append((step.number, total[0] / total[1].clamp(min=1.0)))

    def lay_in(self, transfer: Transfer) -> None:
        """What waits on the device goes with this transfer."""
        for number, value in self._pending:
            transfer.add(("deployed", number), value)

    def take_out(self, host: Mapping[Any, Host]) -> tuple[Deployed, ...]:
        """What has arrived; and the time of the probes that have finished is booked."""
        pending, self._pending = self._pending, []
        self._book()
        return tuple(Deployed(number, float(host["deployed", number])) for number, _ in pending)

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

    def _due(self, probe: str, step: Step) -> bool:
        return (
            self._faults.working(f"probe_{probe}")
            and bool(step.batches)
            and all(batch.replay is not None for batch in step.batches)
            and self._budget.due(probe, step.number)
        )

    def _booked(self, probe: str, step: Step) -> Stopwatch:
        """Times a run of a probe, for the budget; what it took is known after the next transfer."""
        self._budget.ran(probe, step.number)
        watch = Stopwatch(step.batches[0].mask.device)
        self._running.append((probe, watch))
        return watch

    def _book(self) -> None:
        running, self._running = self._running, []
        for probe, watch in running:
            seconds = watch.seconds()
            if seconds is None:
                self._running.append((probe, watch))
            else:
                self._budget.spent(probe, seconds)

    def _logp(self, batch: TokenBatch) -> Tensor:
        assert batch.replay is not None
        return shadow_logp(self._model, batch.replay, self._precision)

    @torch.no_grad()
    def _gain(self, batch: TokenBatch) -> Tensor:
        """(2,) sum of the trained tokens' (after - before) * sign(A), and their number."""
        assert batch.shadow_logp is not None
        assert batch.advantage is not None
        gain = (self._logp(batch) - batch.shadow_logp) * torch.sign(batch.advantage)
        counted = batch.mask & torch.isfinite(gain)
        return torch.stack([torch.where(counted, gain, 0.0).sum(), counted.sum()])
