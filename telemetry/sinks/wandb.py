"""Weights & Biases: every reading under ``seismograd/``, on an axis of its own, and an alert on a spike.

Rows are logged without ``step=``: W&B drops rows whose step is behind the run's, and the trainer's own callback moves
that step. The axis is ``seismograd/step`` instead.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.records import Event, Row, RunInfo

AXIS = "seismograd/step"


class WandbSink:
    """Logs to the process' W&B run.

    Args:
        start: start a run where nobody has by the first step (project from WANDB_PROJECT, else "seismograd"), and
            finish it at the end. Otherwise log only if somebody has, and leave that run open.
    """

    name = "wandb"

    def __init__(self, start: bool = False) -> None:
        self._start = start
        self._started: Any = None
        self._defined: Any = None
        self._info: RunInfo | None = None

    def open(self, run: RunInfo) -> None:
        self._info = run

    def write(self, row: Row) -> None:
        # Not in open(): a trainer starts its own run only when training begins, and that one is to be used.
        run = self._current(start=self._start)
        # What the trainer logs is on W&B already, by the trainer's own callback.
        values = {
            CATALOGUE[reading.name].wandb_key(reading.labels): reading.value
            for reading in row.readings
            if reading.name not in ("trainer_metric", "step")
        }
        if run is not None and values:
            run.log({**values, AXIS: row.step})

    def event(self, event: Event) -> None:
        run = self._current(start=False)
        if run is None or event.kind != "spike" or event.data.get("repeat"):
            return
        level = "ERROR" if event.data.get("severity") == "critical" else "WARN"
        run.alert(title=f"seismograd: {event.data['signal']}", text=event.message, level=level)

    def close(self) -> None:
        if self._started is not None:
            self._started.finish()

    def _current(self, start: bool) -> Any:
        """The process' W&B run, or None. W&B is not imported unless a run is to be started."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None and start:
            run = self._begin()
        if run is not None and run is not self._defined:
            run.define_metric("seismograd/*", step_metric=AXIS)
            self._defined = run
        return run

    def _begin(self) -> Any:
        try:
            import wandb
        except ImportError as e:
            raise ImportError(
                "wandb is not installed: pip install 'seismograd[wandb]', or take it out of sinks="
            ) from e
        assert self._info is not None
        self._started = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "seismograd"), name=self._info.name, config=dict(self._info.config)
        )
        return self._started
