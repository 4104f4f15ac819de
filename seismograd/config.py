"""Every setting of a run: typed, checked at construction, each also by environment.

A setting that is passed to `watch` wins over the environment, which wins over the default.

    setting      environment             example
    runs         SEISMOGRAD_RUNS         /scratch/runs
    name         SEISMOGRAD_NAME         qwen-math-3
    sinks        SEISMOGRAD_SINKS        auto            (names, separated by commas; "none" for no sink but the store)
    prometheus   SEISMOGRAD_PROMETHEUS   9464            (or 0.0.0.0:9464; empty for none)
    budget       SEISMOGRAD_BUDGET       0.01
    probes       SEISMOGRAD_PROBES       shadow=1,deployed=auto
    shadow       SEISMOGRAD_SHADOW       bf16
    clip         SEISMOGRAD_CLIP         0.2,0.28        (eps_low,eps_high; plain loops only)
    gradloc      SEISMOGRAD_GRADLOC      auto            (or off, or every)
    text         SEISMOGRAD_TEXT         none            (or full)
    save_batches SEISMOGRAD_SAVE_BATCHES 64              (megabytes)
    thresholds   SEISMOGRAD_THRESHOLDS   share=0.2,weight=20  (those not named keep their defaults)
    controls     SEISMOGRAD_CONTROLS     layerclip=auto,tokenclip=on,tokenclip.method=icepop  (or a mode for all)
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from seismograd.collectors.budget import Spacing
from seismograd.controls.policy import Policy
from seismograd.gradloc.verdict import Thresholds
from seismograd.settings import CHECKS, from_environment, normal, refusal
from seismograd.telemetry.records import ClipSpec
from seismograd.telemetry.sinks import Sink


@dataclass(frozen=True)
class Config:
    """The settings of one run.

    Args:
        runs: folder that holds the runs' folders.
        name: of the run and its folder; a time stamp where None. A name that is taken gets a number.
        sinks: beside the run store, which is always on. "auto" logs to a W&B run if the trainer has started one,
            "wandb" starts one otherwise; objects are sinks of one's own (see `seismograd.telemetry.sinks.Sink`).
        prometheus: port for /metrics on loopback, 0 for a free one, "ADDRESS:PORT" for another interface, None for
            none.
        budget: share of step time that all probes on "auto" may take together.
        probes: by probe ("shadow", "deployed", "geometry", "weights"): "auto" for spacing by the budget, or every k-th
            step, or 0 for never; docs/probes.md.
        shadow: the rollout engine's precision, "bf16" or "fp16".
        clip: how a plain loop's loss limits its ratio: one or several `ClipSpec`, an eps for both sides, or (eps_low,
            eps_high). A trainer's is read from its own settings.
        gradloc: "auto" localises a spike in the step that it is found in, "every" does so on every step (to try it
            out), "off" never.
        text: "full" puts texts and ids of the guilty tokens into incidents, "none" leaves both out of all files and
            sinks.
        save_batches: megabytes of a spike's micro-batches that may be kept beside its incident, for ``seismograd
            replay``; 0 for none. They hold token ids, so text="none" keeps none either.
        thresholds: when something counts as evidence for a verdict: `seismograd.gradloc.Thresholds`, or a mapping with
            those of them that are to differ, such as {"share": 0.2}.
        controls: what each control may do, "off", "observe", "auto" or "on", and its settings by a dotted key; one mode
            for all of them; see `seismograd.controls.policy`. With "observe" training is not changed by a bit.

    Raises:
        ConfigError: a value that cannot be.
    """

    runs: str = "runs"
    name: str | None = None
    sinks: tuple[str | Sink, ...] = ("auto",)
    prometheus: int | str | None = None
    budget: float = 0.01
    probes: Mapping[str, Spacing] = field(default_factory=dict)
    shadow: str = "bf16"
    clip: tuple[ClipSpec, ...] = (ClipSpec(),)
    gradloc: str = "auto"
    text: str = "full"
    save_batches: float = 0.0
    thresholds: Thresholds = field(default_factory=Thresholds)
    controls: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            check(getattr(self, name))
        if self.save_batches and self.text == "none":
            fix = 'saved micro-batches hold token ids: set text="full", or 0 here'
            raise refusal("save_batches", self.save_batches, fix)

    @classmethod
    def resolve(cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Config:
        """The settings in force: those given and not None, else the environment's, else the defaults.

        Raises:
            ConfigError: as the class; a value from the environment is named by its variable.
        """
        settings: dict[str, Any] = {}
        for f in fields(cls):
            variable = f"SEISMOGRAD_{f.name.upper()}"
            if given.get(f.name) is not None:
                settings[f.name] = normal(f.name, given[f.name])
            elif variable in environment:
                settings[f.name] = from_environment(f.name, variable, environment[variable])
        return cls(**settings)

    @property
    def address(self) -> tuple[str, int] | None:
        """(interface, port) of /metrics, or None."""
        if self.prometheus is None:
            return None
        host, _, port = str(self.prometheus).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")  # as IPv6 addresses are written before a port
        return host or "127.0.0.1", int(port)

    def as_json(self) -> dict[str, Any]:
        """The settings, JSON-serialisable; sinks of one's own by their name."""
        return {
            "runs": self.runs,
            "name": self.name,
            "sinks": [sink if isinstance(sink, str) else sink.name for sink in self.sinks],
            "prometheus": self.prometheus,
            "budget": self.budget,
            "probes": dict(self.probes),
            "shadow": self.shadow,
            "clip": [
                {key: str(x) if isinstance(x, float) and math.isinf(x) else x for key, x in vars(spec).items()}
                for spec in self.clip
            ],
            "gradloc": self.gradloc,
            "text": self.text,
            "save_batches": self.save_batches,
            "thresholds": dict(vars(self.thresholds)),
            "controls": self.controls.as_json(),
        }
