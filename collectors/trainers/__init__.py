"""One adapter a trainer family. An adapter listens to its trainer, and puts everything back when it is detached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from seismograd.collectors.monitor import StepMonitor
from seismograd.telemetry.hub import Hub

PLAIN_LOOP = "watch(model=model, optimizer=optimizer), then `with run.step():` around each step"


class UnsupportedTrainer(TypeError):
    """`watch` was given a trainer that no adapter knows."""


class Adapter(Protocol):
    """What joins a trainer and a `StepMonitor`."""

    def attach(self, monitor: StepMonitor, hub: Hub) -> None:
        """Begin to listen."""

    def detach(self) -> None:
        """Stop, and leave the trainer exactly as it was."""


class RunState(Protocol):
    """What an adapter needs of its run."""

    def degraded(self, message: str) -> None:
        """Say loudly that something is not measured, and why."""

    def state_dict(self) -> dict[str, Any]:
        """Detection state and counters, JSON-serialisable."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off."""


def is_grpo_trainer(trainer: object) -> bool:
    """Whether it is TRL's GRPOTrainer or a subclass; TRL is not imported for the question."""
    return any(cls.__name__ == "GRPOTrainer" and cls.__module__.split(".")[0] == "trl" for cls in type(trainer).__mro__)


def unsupported(trainer: Any) -> UnsupportedTrainer:
    """The error for a trainer that no adapter knows: what is supported, and the way that always works."""
    if isinstance(trainer, nn.Module):
        return UnsupportedTrainer(f"watch() was given a model, not a trainer. Did you mean {PLAIN_LOOP}?")
    return UnsupportedTrainer(
        f"watch() does not know {type(trainer).__module__}.{type(trainer).__qualname__}. Supported: trl.GRPOTrainer "
        f"and its subclasses. Any other loop: {PLAIN_LOOP}."
    )
