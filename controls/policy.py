"""Which controls a run has, how each is set, and when it may act: ``watch(trainer, controls={...})``.

    {"layerclip": "auto", "tokenclip": "observe"}                 modes: off, observe, auto, on
    {"layerclip.reference": "history", "layerclip.hold": 200}     settings of one, by a dotted key
    "observe"                                                     all of them alike

What switches an armed control on:

    layerclip   a spike of a gradient norm whose verdict is B, or whose kind is not known while a layer is out of
                proportion; it acts in this very step
    tokenclip   verdict A.1 or S, or a token's log-ratio that spikes; from the next step on, as this one's loss is made
    seqclip     verdict A.2; from the next step on
    cleanratio  nothing: it costs a forward a micro-batch, which is for a person to decide
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from seismograd.controls.layerclip import REFERENCES, References
from seismograd.controls.switch import MODES, Mode

CONTROLS = ("layerclip", "tokenclip", "seqclip", "cleanratio")


@dataclass(frozen=True)
class LayerClipPolicy:
    """Args: see `seismograd.controls.LayerClip`.

    mode: of the four.
    reference, factor, groups, warmup: as there.
    hold: steps that it stays on after the last step in which it clipped.
    """

    mode: Mode = "auto"
    reference: References = "peers"
    factor: float = 4.0
    groups: bool = False
    warmup: int = 16
    hold: int = 100

    def __post_init__(self) -> None:
        _one_of("layerclip", self, "mode", MODES)
        _one_of("layerclip", self, "reference", REFERENCES)
        _number("layerclip", self, "factor", 1.0, math.inf)
        _whole("layerclip", self, "warmup", 2, 128)
        _whole("layerclip", self, "hold", 1)
        if not isinstance(self.groups, bool):
            raise _refuse("layerclip", "groups", self.groups, "give True or False")


@dataclass(frozen=True)
class TokenClipPolicy:
    """Args:
    mode: of the four.
    method: "tis" caps a token's ratio at `cap`; "icepop" leaves tokens out whose ratio is not within [low, high].
    cap, low, high: of the ratio exp(logp - rollout_logp).
    hold: steps that it stays on after the last reason.
    """

    mode: Mode = "observe"
    method: Literal["tis", "icepop"] = "tis"
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0
    hold: int = 100

    def __post_init__(self) -> None:
        _one_of("tokenclip", self, "mode", MODES)
        _one_of("tokenclip", self, "method", ("tis", "icepop"))
        _number("tokenclip", self, "cap", 0.0, math.inf)
        _bounds("tokenclip", self)
        _whole("tokenclip", self, "hold", 1)


@dataclass(frozen=True)
class SeqClipPolicy:
    """Args:
    mode: of the four.
    of: a sequence's ratio is exp of the "mean" of its tokens' log-ratios, or of their "sum".
    low, high: sequences whose ratio is not within are left out.
    hold: steps that it stays on after the last reason.
    """

    mode: Mode = "observe"
    of: Literal["mean", "sum"] = "mean"
    low: float = 0.5
    high: float = 2.0
    hold: int = 100

    def __post_init__(self) -> None:
        _one_of("seqclip", self, "mode", MODES)
        _one_of("seqclip", self, "of", ("mean", "sum"))
        _bounds("seqclip", self)
        _whole("seqclip", self, "hold", 1)


@dataclass(frozen=True)
class CleanRatioPolicy:
    """Args:
    mode: "off", "observe" or "on".
    """

    mode: Mode = "observe"

    def __post_init__(self) -> None:
        fix = "give off, observe or on; it costs a forward a micro-batch, so that nothing switches it on by itself"
        if self.mode not in ("off", "observe", "on"):
            raise _refuse("cleanratio", "mode", self.mode, fix)


@dataclass(frozen=True)
class Policy:
    """The settings of all controls.

    Args:
        layerclip, tokenclip, seqclip, cleanratio: of each.
    """

    layerclip: LayerClipPolicy = field(default_factory=LayerClipPolicy)
    tokenclip: TokenClipPolicy = field(default_factory=TokenClipPolicy)
    seqclip: SeqClipPolicy = field(default_factory=SeqClipPolicy)
    cleanratio: CleanRatioPolicy = field(default_factory=CleanRatioPolicy)

    @classmethod
    def of(cls, given: Policy | str | Mapping[str, Any]) -> Policy:
        """From what `watch` takes: a mode for all, or a mapping as in this module's docstring.

        Raises:
            ValueError: an unknown control or setting, or a value that cannot be; it names the key and the fix.
        """
        if isinstance(given, Policy):
            return given
        if isinstance(given, str):
            # "auto" for all leaves the one that nothing can switch on to look on.
            given = {c: "observe" if (c, given) == ("cleanratio", "auto") else given for c in CONTROLS}
        if not isinstance(given, Mapping):
            raise ValueError(f"controls={given!r} cannot be: give a mode, or a mapping such as {{'layerclip': 'auto'}}")
        chosen: dict[str, dict[str, Any]] = {}
        for key, value in given.items():
            control, dot, setting = str(key).partition(".")
            setting = setting if dot else "mode"
            kind = _KINDS.get(control)
            if kind is None:
                raise ValueError(f"controls[{key!r}] is no control: known are {', '.join(CONTROLS)}")
            known = [f.name for f in fields(kind)]
            if setting not in known:
                raise ValueError(f"controls[{key!r}] is no setting of {control}: known are {', '.join(known)}")
            taken = chosen.setdefault(control, {})
            if setting in taken and taken[setting] != value:  # a mode may stand under two keys
                raise ValueError(
                    f"controls sets {control}.{setting} twice, to {taken[setting]!r} and to {value!r}: give one of them"
                )
            taken[setting] = value
        return cls(**{control: _KINDS[control](**settings) for control, settings in chosen.items()})

    def as_json(self) -> dict[str, Any]:
        """The mapping that makes it again, JSON-serialisable."""
        return {
            control if name == "mode" else f"{control}.{name}": value
            for control in CONTROLS
            for name, value in vars(getattr(self, control)).items()
        }


_KINDS: Mapping[str, type[Any]] = {
    "layerclip": LayerClipPolicy,
    "tokenclip": TokenClipPolicy,
    "seqclip": SeqClipPolicy,
    "cleanratio": CleanRatioPolicy,
}


def _refuse(control: str, name: str, value: object, fix: str) -> ValueError:
    key = control if name == "mode" else f"{control}.{name}"
    return ValueError(f"controls[{key!r}]={value!r} cannot be: {fix}")


def _one_of(control: str, settings: Any, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(settings, name)
    if not isinstance(value, str) or value not in choices:
        raise _refuse(control, name, value, f"give one of {', '.join(choices)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(control: str, settings: Any, name: str, above: float, below: float) -> None:
    value = getattr(settings, name)
    if not (_is_number(value) and above < value < below):
        raise _refuse(control, name, value, f"give a finite number above {above:g}")


def _whole(control: str, settings: Any, name: str, least: int, most: int | None = None) -> None:
    value = getattr(settings, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        span = f"at least {least}" if most is None else f"from {least} to {most}"
        raise _refuse(control, name, value, f"give a whole number of steps, {span}")


def _bounds(control: str, settings: Any) -> None:
    for name in ("low", "high"):
        value = getattr(settings, name)
        if not (_is_number(value) and 0 <= value < math.inf):
            raise _refuse(control, name, value, "give a finite number, at least 0")
    if not settings.low < settings.high:
        low, high = f"controls['{control}.low']={settings.low!r}", f"controls['{control}.high']={settings.high!r}"
        raise ValueError(f"{low} and {high} cannot be: give low < high")
