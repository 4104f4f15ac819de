"""seismograd: monitoring for the RL post-training of language models, by one hook.

    from seismograd import watch
    watch(trainer)

Table of contents: `watch` and the `Run` that it returns; `Config`, all settings; `ClipSpec`, how a loss limits its
ratio; `RunStore`, reads a run's folder; `Sink`, `Row`, `Event` and `Reading`, for a sink of one's own; `CATALOGUE`,
every metric.
"""

from seismograd.collectors.trainers import UnsupportedTrainer
from seismograd.config import Config
from seismograd.run import Run
from seismograd.settings import ConfigError
from seismograd.telemetry.catalogue import CATALOGUE, MetricSpec
from seismograd.telemetry.records import ClipSpec, Event, Reading, Row, RunInfo, Spike, TokenBatch
from seismograd.telemetry.sinks import Sink
from seismograd.telemetry.store import RunStore, StoreError
from seismograd.watch import watch

__version__ = "0.1.0"

__all__ = [
    "CATALOGUE",
    "ClipSpec",
    "Config",
    "ConfigError",
    "Event",
    "MetricSpec",
    "Reading",
    "Row",
    "Run",
    "RunInfo",
    "RunStore",
    "Sink",
    "Spike",
    "StoreError",
    "TokenBatch",
    "UnsupportedTrainer",
    "__version__",
    "watch",
]
