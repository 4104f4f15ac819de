"""One setting's value: what can be, and the forms in which `watch` and the environment give it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
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


def refusal(setting: str, value: object, fix: str) -> ConfigError:
    """The error to raise.

    Args:
        setting: its name, dotted where it is part of one, or its variable.
        value: that cannot be.
        fix: a clause.
    """
    return ConfigError(f"seismograd: {setting}={value!r} cannot be: {fix}")


# -- what can be ----------------------------------------------------------------------------------------------------


def _runs(value: Any) -> None:
    if not isinstance(value, str) or not value or "\0" in value:
        raise refusal("runs", value, "give the path of a folder")


def _name(value: Any) -> None:
    if value is None:
        return
    if (
        not isinstance(value, str)
        or value in ("", ".", "..")
        or any(sep in value for sep in ("/", "\\", "\0"))
        or len(value.encode()) > 200  # file systems take 255, and a number may be added
    ):
        raise refusal("name", value, "it names a folder: text without slashes, not empty, of at most 200 bytes")


def _sinks(value: Any) -> None:
    if not isinstance(value, tuple):
        raise refusal("sinks", value, f"known names are {', '.join(SINK_NAMES)}; or pass sink objects")
    for sink in value:
        if isinstance(sink, str) and sink not in SINK_NAMES:
            raise refusal("sinks", sink, f"known names are {', '.join(SINK_NAMES)}; or pass a sink object")
        if not isinstance(sink, (str, Sink)):
            raise refusal("sinks", sink, "a sink has a name and the methods open, write, event and close")


def _prometheus(value: Any) -> None:
    if value is None:
        return
    port = str(value).rpartition(":")[2]
    whole = isinstance(value, (int, str)) and not isinstance(value, bool)
    if not whole or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise refusal("prometheus", value, 'give a port from 0 to 65535, or "ADDRESS:PORT"')


def _budget(value: Any) -> None:
    if not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1):
        raise refusal("budget", value, "give a share of step time from 0 to 1, e.g. 0.01 for 1%")


def _probes(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise refusal("probes", value, 'give a mapping such as {"shadow": 10}')
    for probe, spacing in value.items():
        if probe not in PROBES:
            raise refusal(f"probes.{probe}", spacing, f"known probes are {', '.join(PROBES)}")
        if spacing != "auto" and not (isinstance(spacing, int) and not isinstance(spacing, bool) and spacing >= 0):
            raise refusal(f"probes.{probe}", spacing, '"auto", or a number of steps, or 0 for never')
    shadow, deployed = (value.get(probe, "auto") for probe in ("shadow", "deployed"))
    if isinstance(deployed, int) and deployed and isinstance(shadow, int) and (not shadow or deployed % shadow):
        fix = f"it starts from a shadow probe of the same step, so give a multiple of probes.shadow={shadow}"
        raise refusal("probes.deployed", deployed, "set probes.shadow too, which it starts from" if not shadow else fix)


def _shadow(value: Any) -> None:
    if not isinstance(value, str) or value not in DTYPES:
        raise refusal("shadow", value, f"known precisions are {', '.join(DTYPES)}")


def _clip(value: Any) -> None:
    if not value:
        raise refusal("clip", value, "give a ClipSpec, a tuple of them, one eps such as 0.2, or (eps_low, eps_high)")
    for spec in value:
        if not isinstance(spec, ClipSpec):
            raise refusal("clip", spec, "give a ClipSpec, a tuple of them, or one eps such as 0.2")


def _one_of(setting: str, choices: Sequence[str], value: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        raise refusal(setting, value, f"give one of {', '.join(choices)}")


def _save_batches(value: Any) -> None:
    if not (_is_number(value) and 0 <= value < math.inf):
        raise refusal("save_batches", value, "give megabytes, e.g. 64, or 0 for none")


def _thresholds(value: Any) -> None:
    if not isinstance(value, Thresholds):
        raise refusal("thresholds", value, 'give a mapping such as {"share": 0.2}, or gradloc.Thresholds')


def _controls(value: Any) -> None:
    if not isinstance(value, Policy):
        raise refusal("controls", value, "give a mode, or a mapping such as {'layerclip': 'auto'}")


CHECKS: Mapping[str, Callable[[Any], None]] = {
    "runs": _runs,
    "name": _name,
    "sinks": _sinks,
    "prometheus": _prometheus,
    "budget": _budget,
    "probes": _probes,
    "shadow": _shadow,
    "clip": _clip,
    "gradloc": partial(_one_of, "gradloc", WHEN),
    "text": partial(_one_of, "text", TEXT),
    "save_batches": _save_batches,
    "thresholds": _thresholds,
    "controls": _controls,
}
"""By setting: raises ConfigError where the value cannot be."""


# -- the forms in which a value is given ------------------------------------------------------------------------------


def _policy(given: Any) -> Policy:
    try:
        return Policy.of(given)
    except ValueError as e:
        raise ConfigError(f"seismograd: {e}") from e


def normal(name: str, value: Any) -> Any:
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
        raise refusal("clip", (low, high), str(e)) from e


def from_environment(name: str, variable: str, text: str) -> Any:
    """What an environment variable's text stands for.

    Raises:
        ConfigError: naming the variable, where it stands for nothing.
    """
    try:
        return _PARSERS[name](text.strip())
    except ConfigError:
        raise
    except ValueError as e:
        raise refusal(variable, text, f"{e}; see seismograd/config.py for an example") from e


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
        if key.strip() in given:
            raise ValueError(f"{key.strip()} is given twice")
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
