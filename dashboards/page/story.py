"""What happened in a run, in words: the events of its rules, told by the rule table.

Each sentence is about one signal: what it did at its worst, when, and what is known of the cause. Sentences come
critical ones first, explained ones before others, then the newest; the first two are the headline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seismograd.telemetry.baselines import Above, Below
from seismograd.telemetry.incidents import VERDICTS
from seismograd.telemetry.records import Event
from seismograd.telemetry.rules import RULES, Rule
from seismograd.telemetry.store import RunStore
from seismograd.telemetry.visible import number, percent, visible

_LATELY, _ROWS = 20, 500
"""Measured values over which a share of tokens is told, and rows in which they are looked for."""

_GRADIENTS = ("grad_norm", "layer_grad_norm", "loss_weight", "sequence", "log_ratio", "sequence_log_ratio", "kl")
"""Signals that one bad token or layer raises together: told as one finding, by the first of them."""


@dataclass(frozen=True)
class Sentence:
    """One finding.

    Args:
        text: in words.
        signal: of the rule table.
        severity: "critical" or "warning".
        step: where it was at its worst.
        advice: what to look at first.
        incident: name of the incident's file, or None.
        also: signals that fired with it.
    """

    text: str
    signal: str
    severity: str
    step: int
    advice: str
    incident: str | None = None
    also: tuple[str, ...] = field(default=())


def story(events: Sequence[Event], store: RunStore) -> list[Sentence]:
    """The findings of a run, none where no rule fired."""
    rules = {rule.signal: rule for rule in RULES}
    spikes = [e for e in events if e.kind == "spike" and e.data.get("signal") in rules]
    incidents = {e.step: e for e in events if e.kind == "incident"}
    told: list[Sentence] = []
    for step, group in _bursts(spikes).items():
        told.append(_burst(rules[group[0].data["signal"]], step, group, incidents.get(step)))
    for signal, rule in rules.items():
        found = [e for e in spikes if e.data["signal"] == signal]
        if found and signal not in _GRADIENTS:
            told.append(_single(rule, found, store))
    order = {"critical": 0, "warning": 1}
    return sorted(told, key=lambda s: (order.get(s.severity, 2), s.incident is None, -s.step))


def headline(sentences: Sequence[Sentence], step: int | None) -> str:
    """The run in one line."""
    if step is None:
        return "waiting for the first step"
    if not sentences:
        return f"quiet: no rule has fired in {step} steps"
    first = [sentence.text for sentence in sentences[:2]]
    more = len(sentences) - len(first)
    return "; ".join(first) + (f"; {more} more below" if more else "")


def sentence_json(sentence: Sentence) -> dict[str, Any]:
    """JSON-serialisable."""
    return vars(sentence) | {"also": list(sentence.also)}


def _bursts(spikes: Sequence[Event]) -> dict[int, list[Event]]:
    """Spikes of the gradient's signals by step, the signal that says most first."""
    bursts: dict[int, list[Event]] = {}
    for event in spikes:
        if event.data["signal"] in _GRADIENTS:
            bursts.setdefault(event.step, []).append(event)
    for group in bursts.values():
        group.sort(key=lambda e: _GRADIENTS.index(e.data["signal"]))
    return bursts


def _burst(rule: Rule, step: int, group: Sequence[Event], incident: Event | None) -> Sentence:
    event = group[0]
    where = ""
    if rule.signal == "layer_grad_norm":
        where = f" of layer {visible(_label(event.data.get('key', ''), 'layer'))}"
    text = f"{subject(rule.signal)}{where} spiked {_times(event.data)} at step {step}"
    advice, name = rule.advice, None
    if incident is not None:
        text += f": {_cause(incident.data)}"
        advice = visible(str(incident.data.get("advice") or advice))
        name = _file_name(incident.data)
    also = tuple(dict.fromkeys(e.data["signal"] for e in group[1:] if e.data["signal"] != rule.signal))
    severity = str(event.data.get("severity", rule.severity))
    return Sentence(text, rule.signal, severity, step, advice, name, also)


def _single(rule: Rule, found: Sequence[Event], store: RunStore) -> Sentence:
    worst = max(found, key=lambda e: _distance(rule, e.data))
    value = _value(worst.data.get("value"))
    if rule.signal in ("phantom_fraction", "hidden_fraction"):
        text = _share(rule, store, found[0].step, value)
    elif isinstance(rule.baseline, Below):
        text = f"{subject(rule.signal)} fell to {number(value, 2)} at step {worst.step}: {_lowered(rule.summary)}"
    elif rule.signal == "nonfinite":
        where = visible(_label(str(found[0].data.get("key", "")), "where"))
        text = f"values that are not finite at step {found[0].step}: {where}"
    else:
        key = str(worst.data.get("key", ""))
        where = f" of layer {visible(_label(key, 'layer'))}" if 'layer="' in key else ""
        text = f"{subject(rule.signal)}{where} rose {_times(worst.data)} at step {worst.step}: {_lowered(rule.summary)}"
    return Sentence(text, rule.signal, rule.severity, worst.step, rule.advice)


def _share(rule: Rule, store: RunStore, since: int, worst: float) -> str:
    """A share of tokens: what it is lately, or what it was."""
    cell = rule.selection.where[0].value
    lately = _lately(store, cell)
    cause = "training and rollout precision differ"
    assert isinstance(rule.baseline, Above)
    if lately > rule.baseline.bound:
        return f"{cell} clipping {_VERB[cell]} {percent(round(lately, 3))} of tokens: {cause}"
    return f"{cell} clipping {_PAST[cell]} {percent(round(worst, 3))} of tokens at step {since}: {cause}"


def _lately(store: RunStore, cell: str) -> float:
    """Median share of a cell over its last values, the largest of the ratios'; NaN where there is none."""
    found: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for block in store.blocks(after=store.last_row() - _ROWS):
        for i, series in enumerate(block.series):
            if series[:2] == ("clip_fraction", cell):
                found.setdefault(series, []).extend(zip(block.ids.tolist(), block.values[:, i].tolist(), strict=True))
    medians = [float(np.median([value for _, value in sorted(values)[-_LATELY:]])) for values in found.values()]
    return max((x for x in medians if math.isfinite(x)), default=math.nan)


_VERB = {"phantom": "takes", "hidden": "misses"}
_PAST = {"phantom": "took", "hidden": "missed"}

_SUBJECTS: Mapping[str, str] = {
    "grad_norm": "gradient norm",
    "layer_grad_norm": "gradient norm",
    "loss_weight": "largest weight of a token in the loss",
    "sequence": "pull of one sequence on the loss",
    "log_ratio": "largest log-ratio of a token",
    "sequence_log_ratio": "largest log-ratio of a sequence",
    "layer_proportion": "proportion",
    "kl": "KL to the rollout policy",
    "beta": "precision gap |beta|",
    "alpha_floor": "|alpha| at identical weights",
    "snr": "signal-to-noise ratio",
}


def subject(signal: str) -> str:
    """The signal in words."""
    return _SUBJECTS.get(signal, signal.replace("_", " "))


def _cause(data: Mapping[str, Any]) -> str:
    """What GradLoc found, in a few words."""
    culprits = data.get("culprits") or []
    verdict = str(data.get("verdict", ""))
    kind = VERDICTS.get(verdict, verdict).split(":")[0]
    if not culprits:
        return f"no single token ({verdict}, {kind})"
    return f"{len(culprits)} token{'s' if len(culprits) > 1 else ''} ({verdict}, {kind})"


def _file_name(data: Mapping[str, Any]) -> str | None:
    path = str(data.get("path") or "")
    name = path.replace("\\", "/").rsplit("/", 1)[-1]
    return name.removesuffix(".json") if name.endswith(".json") else None


def _times(data: Mapping[str, Any]) -> str:
    """By how much: `38x`, or the value where there is no quotient."""
    score = _value(data.get("score"))
    if math.isfinite(score) and score > 0:
        return f"{score:.0f}x" if score >= 10 else f"{number(score, 2)}x"
    return f"to {number(_value(data.get('value')), 3)}"


def _value(value: object) -> float:
    """Events hold what JSON has no number for as text."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _distance(rule: Rule, data: Mapping[str, Any]) -> float:
    value = _value(data.get("value"))
    if math.isnan(value):
        return math.inf
    return -value if isinstance(rule.baseline, Below) else value


def _label(key: str, label: str) -> str:
    """The value of a label in a key such as `grad_norm{layer="3",group="all"}`."""
    start = f'{label}="'
    at = key.find(start)
    return key[at + len(start) :].split('"', 1)[0] if at >= 0 else key


def _lowered(summary: str) -> str:
    return summary[0].lower() + summary[1:].rstrip(".")
