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
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

from seismograd.collectors.budget import PROBES, Spacing
from seismograd.collectors.shadow import DTYPES
from seismograd.controls.policy import Policy
from seismograd.gradloc.verdict import Thresholds
from seismograd.localiser import TEXT, WHEN
from seismograd.telemetry.records import ClipSpec
from seismograd.telemetry.sinks import Sink

SINK_NAMES = ("auto", "wandb")


class ConfigError(ValueError):
    """A setting that cannot be.

    The message names it, its environment variable where it came from there, and the fix.
    """


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
        probes: by probe ("shadow", "deployed"): "auto" for spacing by the budget, or every k-th step, or 0 for never.
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
        for check in (
            _runs,
            _name,
            _sinks,
            _prometheus,
            _budget,
            _probes,
            _shadow,
            _clip,
            _choices,
            _save_batches,
            _thresholds,
            _controls,
        ):
            check(self)

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
                settings[f.name] = _normal(f.name, given[f.name])
            elif variable in environment:
                settings[f.name] = _from_environment(f.name, variable, environment[variable])
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


def _refuse(setting: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"seismograd: {setting}={value!r} cannot be: {fix}")


def _runs(c: Config) -> None:
    if not isinstance(c.runs, str) or not c.runs or "\0" in c.runs:
        raise _refuse("runs", c.runs, "give the path of a folder")


def _name(c: Config) -> None:
    if c.name is None:
        return
    if (
        not isinstance(c.name, str)
        or c.name in ("", ".", "..")
        or any(sep in c.name for sep in ("/", "\\", "\0"))
        or len(c.name.encode()) > 200  # file systems take 255, and a number may be added
    ):
        raise _refuse("name", c.name, "it names a folder: text without slashes, not empty, of at most 200 bytes")


def _sinks(c: Config) -> None:
    if not isinstance(c.sinks, tuple):
        raise _refuse("sinks", c.sinks, f"known names are {', '.join(SINK_NAMES)}; or pass sink objects")
    for sink in c.sinks:
        if isinstance(sink, str) and sink not in SINK_NAMES:
            raise _refuse("sinks", sink, f"known names are {', '.join(SINK_NAMES)}; or pass a sink object")
        if not isinstance(sink, (str, Sink)):
            raise _refuse("sinks", sink, "a sink has a name and the methods open, write, event and close")


def _prometheus(c: Config) -> None:
    if c.prometheus is None:
        return
    port = str(c.prometheus).rpartition(":")[2]
    whole = isinstance(c.prometheus, (int, str)) and not isinstance(c.prometheus, bool)
    if not whole or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise _refuse("prometheus", c.prometheus, 'give a port from 0 to 65535, or "ADDRESS:PORT"')


def _budget(c: Config) -> None:
    if not (isinstance(c.budget, (int, float)) and not isinstance(c.budget, bool) and 0 <= c.budget <= 1):
        raise _refuse("budget", c.budget, "give a share of step time from 0 to 1, e.g. 0.01 for 1%")


def _probes(c: Config) -> None:
    if not isinstance(c.probes, Mapping):
        raise _refuse("probes", c.probes, 'give a mapping such as {"shadow": 10}')
    for probe, spacing in c.probes.items():
        if probe not in PROBES:
            raise _refuse(f"probes.{probe}", spacing, f"known probes are {', '.join(PROBES)}")
        if spacing != "auto" and not (isinstance(spacing, int) and not isinstance(spacing, bool) and spacing >= 0):
            raise _refuse(f"probes.{probe}", spacing, '"auto", or a number of steps, or 0 for never')
    shadow, deployed = (c.probes.get(probe, "auto") for probe in ("shadow", "deployed"))
    if isinstance(deployed, int) and deployed and isinstance(shadow, int) and (not shadow or deployed % shadow):
        fix = f"it starts from a shadow probe of the same step, so give a multiple of probes.shadow={shadow}"
        raise _refuse("probes.deployed", deployed, "set probes.shadow too, which it starts from" if not shadow else fix)


def _shadow(c: Config) -> None:
    if not isinstance(c.shadow, str) or c.shadow not in DTYPES:
        raise _refuse("shadow", c.shadow, f"known precisions are {', '.join(DTYPES)}")


def _clip(c: Config) -> None:
    if not c.clip:
        raise _refuse("clip", c.clip, "give a ClipSpec, a tuple of them, one eps such as 0.2, or (eps_low, eps_high)")
    for spec in c.clip:
        if not isinstance(spec, ClipSpec):
            raise _refuse("clip", spec, "give a ClipSpec, a tuple of them, or one eps such as 0.2")


def _choices(c: Config) -> None:
    for name, choices in (("gradloc", WHEN), ("text", TEXT)):
        value = getattr(c, name)
        if not isinstance(value, str) or value not in choices:
            raise _refuse(name, value, f"give one of {', '.join(choices)}")


def _save_batches(c: Config) -> None:
    if not (_is_number(c.save_batches) and 0 <= c.save_batches < math.inf):
        raise _refuse("save_batches", c.save_batches, "give megabytes, e.g. 64, or 0 for none")
    if c.save_batches and c.text == "none":
        raise _refuse("save_batches", c.save_batches, 'saved micro-batches hold token ids: set text="full", or 0 here')


def _thresholds(c: Config) -> None:
    if not isinstance(c.thresholds, Thresholds):
        raise _refuse("thresholds", c.thresholds, 'give a mapping such as {"share": 0.2}, or gradloc.Thresholds')


def _controls(c: Config) -> None:
    if not isinstance(c.controls, Policy):
        raise _refuse("controls", c.controls, "give a mode, or a mapping such as {'layerclip': 'auto'}")


def _policy(given: Any) -> Policy:
    try:
        return Policy.of(given)
    except ValueError as e:
        raise ConfigError(f"seismograd: {e}") from e


def _normal(name: str, value: Any) -> Any:
    """The friendlier forms in which `watch` takes a setting."""
    if name == "runs":
        return os.path.expanduser(value) if isinstance(value, (str, os.PathLike)) else value
    if name == "sinks":
        if isinstance(value, (str, Sink)):
            return (value,)
        return tuple(value) if isinstance(value, Sequence) else value
    if name == "controls":
        return _policy(value)
    if name == "clip":
        if _is_number(value):
            return _clip_from(value, value)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return _clip_from(*value) if len(value) == 2 and all(map(_is_number, value)) else tuple(value)
        return (value,)
    if name == "thresholds" and isinstance(value, Mapping):
        try:
            return Thresholds.of(value)
        except ValueError as e:
            raise ConfigError(f"seismograd: {e}") from e
    return value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _clip_from(low: float, high: float) -> tuple[ClipSpec, ...]:
    try:
        return (ClipSpec(eps_low=low, eps_high=high),)
    except ValueError as e:
        raise _refuse("clip", (low, high), str(e)) from e


def _from_environment(name: str, variable: str, text: str) -> Any:
    try:
        return _PARSERS[name](text.strip())
    except ConfigError:
        raise
    except ValueError as e:
        raise _refuse(variable, text, f"{e}; see seismograd/config.py for an example") from e


def _parse_probes(text: str) -> dict[str, Spacing]:
    probes: dict[str, Spacing] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        probe, separator, spacing = item.partition("=")
        if not separator:
            raise ValueError("write probe=spacing, separated by commas")
        probes[probe] = "auto" if spacing == "auto" else int(spacing)
    return probes


def _parse_controls(text: str) -> Policy:
    if "=" not in text:
        return _policy(text)
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = item.partition("=")
        if not separator:
            raise ValueError("write control=mode, separated by commas")
        given[key.strip()] = _value(value.strip())
    return _policy(given)


def _value(text: str) -> Any:
    """A number or a truth value where it is one."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _parse_clip(text: str) -> tuple[ClipSpec, ...]:
    bounds = [float(part) for part in text.split(",")]
    if len(bounds) > 2:
        raise ValueError("write eps, or eps_low,eps_high")
    return _clip_from(bounds[0], bounds[-1])


def _parse_thresholds(text: str) -> Thresholds:
    values = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = item.partition("=")
        if not separator:
            raise ValueError("write threshold=number, separated by commas")
        values[name.strip()] = float(value)
    return Thresholds.of(values)


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "runs": os.path.expanduser,
    "name": lambda text: text or None,
    "sinks": lambda text: tuple(part.strip() for part in text.split(",") if part.strip() not in ("", "none")),
    "prometheus": lambda text: text or None,
    "budget": float,
    "probes": _parse_probes,
    "shadow": str,
    "clip": _parse_clip,
    "gradloc": str,
    "text": str,
    "save_batches": float,
    "thresholds": _parse_thresholds,
    "controls": _parse_controls,
}
