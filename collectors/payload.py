"""What the training thread hands to the worker for one step, and to whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seismograd.collectors.table import TokenTable
from seismograd.collectors.transfer import Host
from seismograd.controls.layerclip import LayerScales
from seismograd.controls.switch import State
from seismograd.telemetry.incidents import Explained
from seismograd.telemetry.layers import Grouping
from seismograd.telemetry.records import ClipSpec, Event, Reading, Spike


@dataclass(frozen=True)
class Gradients:
    """One step's gradient norms before clipping.

    Args:
        grouping: names the series of `norms`.
        norms: one for each of ``grouping.series``.
        nonfinite: parameters whose norm is not finite.
    """

    grouping: Grouping
    norms: NDArray[np.float64]
    nonfinite: int

    @property
    def total(self) -> float:
        return float(self.norms[0])


@dataclass(frozen=True)
class Probed:
    """A probe's result, which may arrive with the transfer of a later step.

    Args:
        probe: its name.
        step: that it was measured at.
        values: as the probe left them on the device.
        read: makes readings of them, on the worker's thread.
    """

    probe: str
    step: int
    values: Host
    read: Callable[[Host], Sequence[Reading]]

    @property
    def size(self) -> int:
        return int(self.values.size)


@dataclass(frozen=True)
class StepPayload:
    """Everything that is known of a step when it ends.

    Args:
        step: optimizer step.
        ended: Unix seconds.
        seconds: wall-clock duration of the step.
        tokens: the step's tokens, or None where none were seen.
        clips: how the loss limits its ratios.
        gradients: or None where they could not be read.
        overflow_expected: the trainer scales its loss (fp16), and non-finite gradients are its routine.
        spikes: found in the step.
        hook_seconds: time spent in the training thread by part.
        probe_ages: steps since each probe ran.
        probe_spacings: steps from one run of each probe to the next.
        probed: results that arrived with this step's transfer.
        explained: the localisation of this step's spike, or None.
        controls: their states.
        scales: what LayerClip made of the gradients, or None where it is off.
    """

    step: int
    ended: float
    seconds: float
    tokens: TokenTable | None = None
    clips: tuple[ClipSpec, ...] = ()
    gradients: Gradients | None = None
    overflow_expected: bool = False
    spikes: tuple[Spike, ...] = ()
    hook_seconds: Mapping[str, float] = field(default_factory=dict)
    probe_ages: Mapping[str, int] = field(default_factory=dict)
    probe_spacings: Mapping[str, float] = field(default_factory=dict)
    probed: tuple[Probed, ...] = ()
    explained: Explained | None = None
    controls: Mapping[str, State] = field(default_factory=dict)
    scales: LayerScales | None = None

    @property
    def looks_at_ratios(self) -> bool:
        """Whether a control of ratios is not off."""
        return any(self.controls.get(name, State.OFF) is not State.OFF for name in ("tokenclip", "seqclip"))

    @property
    def size(self) -> int:
        """Readings that come of it: about 100 of the tokens and the run, the gradients' series and the probes'."""
        layers = 0 if self.scales is None else len(self.scales.units)
        probed = sum(found.size for found in self.probed)
        return 100 + layers + probed + (0 if self.gradients is None else len(self.gradients.norms))


@dataclass(frozen=True)
class LogPayload:
    """What the trainer logged itself after a step.

    Args:
        step: optimizer step that it names.
        values: by the trainer's own names, numbers and others.
    """

    step: int
    values: Mapping[str, Any]

    @property
    def size(self) -> int:
        return len(self.values)


class Outlet(Protocol):
    """The hub, as far as the training thread knows it. Neither method waits."""

    def put(self, item: Any) -> bool: ...

    def event(self, event: Event) -> None: ...
