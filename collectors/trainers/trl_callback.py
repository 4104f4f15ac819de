"""The callback by which a trainer tells its adapter where it is, and by which a second `watch` finds the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from seismograd.collectors.trainers.trl import GRPOAdapter


class StepCallback(TrainerCallback):
    """Marks the steps for the adapter. Changes nothing: every method returns None."""

    def __init__(self, adapter: GRPOAdapter, run: Any) -> None:
        self._adapter, self.run = adapter, run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.training_begins(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.step_begins(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.before_optimizer()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.after_optimizer()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.step_ends()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._adapter.logged(state.global_step, logs or {})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._adapter.training_ends()


def watching_run(trainer: Any) -> Any | None:
    """The run that watches the trainer already, or None."""
    handler = getattr(trainer, "callback_handler", None)
    return next((c.run for c in getattr(handler, "callbacks", ()) if isinstance(c, StepCallback)), None)
