"""Weights & Biases: every reading under ``seismograd/``, on an axis of its own, and an alert on a spike.

Rows are logged without ``step=``: W&B drops rows whose step is behind the run's, and the trainer's own callback moves
that step. The axis is ``seismograd/step`` instead, defined for each key by its full name: of several patterns that
match a key W&B takes any, and HF's callback defines ``*``. Nor is ``train/global_step`` logged beside it: W&B copies
its last value into the trainer's rows that lack one, and ours come a moment late.

A plain loop often logs with ``step=`` itself, and each row of ours would move W&B's step past the loop's own. There a
row of ours joins the loop's pending one instead, and makes a row only where the loop has logged nothing since. W&B's
step never runs ahead of the training steps so; a loop that counts something slower with ``step=`` (epochs) should leave
``step=`` out.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.records import Event, Row, RunInfo
from seismograd.telemetry.visible import visible

AXIS = "seismograd/step"
_TABLE = "seismograd/incidents"
_TABLE_ROWS = 1_000  # W&B shows up to 10,000
_COLUMNS = (
    "rank", "micro_batch", "row", "position", "token_id", "text", "before", "after", "share", "influence", "grad_norm",
    "log_ratio", "sequence_log_ratio", "advantage", "loss_weight",
)  # fmt: skip


class WandbSink:
    """Logs to the process' W&B run.

    Args:
        start: start a run where nobody has by the first step (project from WANDB_PROJECT, else "seismograd"), and
            finish it at the end. Otherwise log only if somebody has, and leave that run open.
        join: put our values into the rows that a loop logs itself, see above.
    """

    name = "wandb"

    def __init__(self, start: bool = False, join: bool = False) -> None:
        self._start, self._join = start, join
        self._held: dict[str, float] = {}  # of a row that is no step's own, until the next that is
        self._pending_at: int | None = None  # W&B's step at our last row that nobody has committed yet
        self._started: Any = None
        self._run: Any = None
        self._defined: set[str] = set()
        self._info: RunInfo | None = None
        self._culprits: list[list[Any]] = []
        if start:
            # W&B ends its service when the process ends. What is registered first is called last: set up now, before
            # the run that this sink belongs to is, it still serves when that one closes. A failure is left to write().
            with suppress(Exception):
                _wandb().setup()

    def open(self, run: RunInfo) -> None:
        self._info = run

    def write(self, row: Row) -> None:
        # Not in open(): a trainer starts its own run only when training begins, and that one is to be used.
        run = self._current(start=self._start)
        if run is None:
            return
        # What the trainer logs is on its own run already, by its own callback; the axis is the step.
        left_out = ("step",) if run is self._started else ("step", "trainer_metric")
        values = {
            CATALOGUE[reading.name].wandb_key(reading.labels): reading.value
            for reading in row.readings
            if reading.name not in left_out
        }
        if values:
            self._define(run, values)
            if not self._join or run is self._started:
                run.log({**values, AXIS: row.step})
            elif any(reading.name == "step" for reading in row.readings):
                self._log_into_the_loop_s(run, row.step, {**self._held, **values, AXIS: row.step})
            else:
                self._held.update(values)

    def event(self, event: Event) -> None:
        run = self._current(start=False)
        if run is not None and event.kind == "incident" and event.data["culprits"]:
            self._incident(run, event)
        if run is not None and event.kind == "control":
            title = f"seismograd: {event.data['control']} is {event.data['after']}"
            run.alert(title=title, text=event.message, level="WARN")
        if run is None or event.kind != "spike" or event.data.get("repeat"):
            return
        level = "ERROR" if event.data.get("severity") == "critical" else "WARN"
        run.alert(title=f"seismograd: {event.data['signal']}", text=event.message, level=level)

    def _incident(self, run: Any, event: Event) -> None:
        """All culprits so far as one table, a row a token: W&B shows the last that was logged."""
        for culprit in event.data["culprits"]:
            row = [event.step, event.data["verdict"], *(culprit[key] for key in _COLUMNS)]
            self._culprits.append([visible(x) if isinstance(x, str) else x for x in row])
        del self._culprits[:-_TABLE_ROWS]
        table = _wandb().Table(columns=["step", "verdict", *_COLUMNS], data=[*self._culprits], allow_mixed_types=True)
        if not self._join or run is self._started:
            run.log({_TABLE: table, AXIS: event.step})
        else:
            run.log({_TABLE: table}, commit=False)

    def close(self) -> None:
        run = self._current(start=False)
        if run is not None and self._held:
            run.log(self._held, commit=False)
        if self._started is not None:
            self._started.finish()

    def _log_into_the_loop_s(self, run: Any, step: int, values: dict[str, Any]) -> None:
        """Leave the row open for the loop's own values.

        One of ours that the loop has not closed meanwhile is closed first, but only while W&B's step lies behind the
        training step: a loop that is ahead of us would lose its own next row. Then ours gives way.
        """
        if run.step == self._pending_at and run.step + 1 <= step - 1:
            run.log({}, commit=True)
        run.log(values, commit=False)
        self._pending_at, self._held = run.step, {}

    def _current(self, start: bool) -> Any:
        """The process' W&B run, or None. W&B is not imported unless a run is to be started, which is done once."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None and start and self._run is None:
            run = self._begin()
        if run is not None and run is not self._run:
            self._run = run
            self._defined.clear()
        return run

    def _define(self, run: Any, values: dict[str, Any]) -> None:
        if AXIS not in self._defined:
            run.define_metric(AXIS)
            self._defined.add(AXIS)
        for key in values:
            if key not in self._defined:
                run.define_metric(key, step_metric=AXIS)
                self._defined.add(key)

    def _begin(self) -> Any:
        wandb = _wandb()
        assert self._info is not None
        self._started = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "seismograd"), name=self._info.name, config=dict(self._info.config)
        )
        return self._started


def _wandb() -> Any:
    with suppress(ImportError):
        import wandb

        if hasattr(wandb, "init"):  # a folder that W&B left behind, ./wandb, is importable too
            return wandb
    raise ImportError("wandb is not installed: pip install 'seismograd[wandb]', or take it out of sinks=")
