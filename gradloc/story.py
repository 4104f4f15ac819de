"""An incident in words and rows of text: what page and terminal tell alike. All text is still untrusted."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from seismograd.telemetry.incidents import VERDICTS, Culprit, Incident
from seismograd.telemetry.visible import NOT_KNOWN, number, percent

Pairs = list[tuple[str, str]]

_WHOLE_NORM = 'grad_norm{layer="all",group="all"}'

# What is told of a culprit, in this order.
CULPRIT_COLUMNS: Mapping[str, Callable[[Culprit], str]] = {
    "rank": lambda c: number(c.rank),
    "micro-batch": lambda c: number(c.micro_batch),
    "row": lambda c: number(c.row),
    "position": lambda c: number(c.position),
    "share": lambda c: percent(c.share),
    "influence": lambda c: percent(c.influence),
    "gradient norm": lambda c: number(c.grad_norm),
    "logp, training": lambda c: number(c.logp),
    "logp, shadow": lambda c: number(c.shadow_logp),
    "logp, rollout": lambda c: number(c.rollout_logp),
    "log-ratio": lambda c: number(c.log_ratio),
    "log-ratio, sequence": lambda c: number(c.sequence_log_ratio),
    "advantage": lambda c: number(c.advantage),
    "loss weight": lambda c: number(c.loss_weight),
}


def verdict_words(incident: Incident) -> tuple[str, str]:
    """The kind in a few words, and what it means."""
    kind, _, meaning = VERDICTS.get(incident.verdict, "").partition(": ")
    return kind, meaning


def token(culprit: Culprit) -> str:
    """The culprit's text, or what stands for it."""
    if culprit.text is not None:
        return culprit.text
    return "text not known" if culprit.token_id is None else f"token id {culprit.token_id}"


def when(incident: Incident) -> str:
    """The time, UTC, to the second."""
    try:
        return f"{datetime.datetime.fromtimestamp(incident.time, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (TypeError, ValueError, OverflowError, OSError):
        return NOT_KNOWN


def spike_sentence(spike: Mapping[str, Any] | None) -> str:
    """The spike that led here, or ""."""
    if not spike:
        return ""
    seen = f"{spike.get('signal', '')}: {spike.get('key', '')} was {number(spike.get('value'))}"
    known = (("usual", "baseline"), ("threshold", "threshold"), ("score", "score"))
    rest = ", ".join(f"{name} {number(spike[key])}" for name, key in known if spike.get(key) is not None)
    return f"{seen} ({rest})" if rest else seen


def key_numbers(incident: Incident) -> Pairs:
    """What one wants to know first. Norms are of the gradient before clipping; log-probabilities in nats."""
    spike = incident.spike or {}
    usual = [("usual gradient norm", number(spike.get("baseline")))] if spike.get("key") == _WHOLE_NORM else []
    return [
        ("gradient norm", number(incident.grad_norm)),
        *usual,
        ("norm without the culprits", number(incident.without_culprits)),
        ("method", incident.method),
        ("completeness", percent(incident.completeness)),
        ("passes over the step", number(incident.passes, 3)),
        ("seconds", number(incident.seconds, 3)),
        ("replay error, nats", number(incident.replay_error)),
    ]


def parts(incident: Incident) -> Pairs:
    """What each part adds to the gradient norm."""
    return [(name, number(value)) for name, value in incident.parts.items()]


def controls(incident: Incident) -> list[tuple[str, Pairs]]:
    """What each control did, or would have done."""
    return [
        (name, [(key.replace("_", " "), value) for key, value in _flat(done)])
        for name, done in incident.controls.items()
    ]


def attempts(incident: Incident) -> list[tuple[str, str, str, str, str]]:
    """Method, outcome, completeness, passes and detail of each attempt, in order."""
    return [
        (a.method, a.outcome, percent(a.completeness), number(a.forwards + a.backwards, 3), a.detail)
        for a in incident.attempts
    ]


def _flat(x: object, name: str = "") -> Pairs:
    """Nested mappings and lists as dotted names; every value as text."""
    if isinstance(x, Mapping):
        return [pair for key, value in x.items() for pair in _flat(value, f"{name}.{key}" if name else str(key))]
    if isinstance(x, (list, tuple)):
        return [(name, ", ".join(number(value) for value in x))]
    if isinstance(x, bool):
        return [(name, "yes" if x else "no")]
    return [(name, x if isinstance(x, str) else number(x))]
