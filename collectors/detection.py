"""Detection: a step's spikes, found by all ranks as one, and their localisation while the gradients are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from seismograd.collectors.guard import Guard
from seismograd.collectors.meeting import Meeting
from seismograd.collectors.step import Step, measured_in, merged
from seismograd.telemetry.detector import Detector, Measured
from seismograd.telemetry.faults import Faults
from seismograd.telemetry.incidents import Explained
from seismograd.telemetry.ranks import Ranks
from seismograd.telemetry.records import Spike, TokenBatch


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


class Detection:
    """Finds a step's spikes and has them explained.

    Args:
        detector: judges the rules of kind "step".
        localiser: explains spikes; nobody does where None.
        meeting: the processes that share the step.
        faults: what keeps failing is switched off.
        guard: fences a block and books its time under a part.
    """

    def __init__(
        self,
        detector: Detector,
        localiser: Localiser | None,
        meeting: Meeting,
        faults: Faults,
        guard: Callable[[str], Guard],
    ) -> None:
        self._detector, self._localiser, self._meeting = detector, localiser, meeting
        self._faults, self._guard = faults, guard

    def judge(self, step: Step, scale: float, overflow_expected: bool) -> None:
        """Find the step's spikes, and explain them where they are to be.

        Args:
            step: once its tokens and gradients are known, and what LayerClip makes of them.
            scale: what the gradients are still multiplied by.
            overflow_expected: the loss is scaled, so that non-finite gradients are routine.
        """
        wanted = self._detect(step, overflow_expected)
        localiser = self._localiser
        if wanted and localiser is not None and self._faults.working("gradloc"):
            ranks = self._meeting.ranks  # anew: the others may have been lost meanwhile
            with self._guard("gradloc"):
                step.explained = localiser.explain(step.number, step.batches, step.spikes, ranks, scale)

    def _detect(self, step: Step, overflow_expected: bool) -> bool:
        """Judge the step; whether it is to be localised. Rank 0 judges what all have seen, and all do as it says.

        No fault of one rank keeps it from what the others wait for.
        """
        rank = self._meeting.ranks.rank
        localiser = self._localiser if self._faults.working("gradloc") else None
        able = localiser is not None and bool(step.batches)
        mine = _Seen({}, able, any(batch.mask.numel() for batch in step.batches))
        if self._faults.working("detect"):
            with self._guard("detect"):
                mine = replace(mine, measured=measured_in(step, overflow_expected))
        everybody = self._meeting.shared(mine)
        if rank == 0 and self._faults.working("detect"):
            with self._guard("detect"):
                measured = merged([seen.measured for seen in everybody])
                step.spikes = tuple(self._detector.judge(step.number, measured))
        able = all(seen.able for seen in everybody) and any(seen.tokens for seen in everybody)
        wanted = localiser is not None and able and localiser.wants(step.spikes)
        decided = (step.spikes, wanted, step.scales, step.probes_next)
        step.spikes, wanted, step.scales, step.probes_next = self._meeting.shared(decided)[0]
        return wanted
