"""docs/metrics.md: the catalogue as a page for people."""

from __future__ import annotations

from collections.abc import Iterable

from seismograd.telemetry.catalogue import CATALOGUE, MetricSpec
from seismograd.telemetry.rules import RULES

_REDUCE = {
    "token_mean": "mean, weighted by each rank's trained tokens",
    "sum": "sum",
    "max": "largest value",
    "min": "smallest value",
    "same": "already the same on all ranks",
    "rank0": "rank 0's own",
}
_COST = {
    "free": "known from what the trainer computes anyway; every step",
    "probe": "needs an extra forward, a backward or a pass over the weights; spaced by the overhead budget, the last "
    "value is kept between",
    "triggered": "only after a spike; outside the budget",
}
_INTRO = """\
<!-- Generated from telemetry/catalogue.py by `python -m seismograd.dashboards`. Do not edit. -->
# Metrics

Every metric that seismograd can emit. Names change only with an entry in the changelog.

In Prometheus each series also has the label `run`, beside `job` and `instance`, which the scrape adds. In W&B a series
is named `seismograd/NAME/LABEL VALUE/...`, with the label values in the order given here. Log-probabilities and
log-ratios are in nats.
"""


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    parts = [_INTRO, *_legend(), _index(CATALOGUE.values()), *(_section(spec) for spec in CATALOGUE.values())]
    return "\n".join(parts)


def _legend() -> Iterable[str]:
    yield "**Reduced** says how the values of several ranks become one:\n"
    yield _list(_REDUCE)
    yield "**Cost** says what a value takes:\n"
    yield _list(_COST)


def _list(meaning: dict[str, str]) -> str:
    return "".join(f"- `{key}`: {text}\n" for key, text in meaning.items())


def _index(specs: Iterable[MetricSpec]) -> str:
    lines = ["| metric | type | unit | labels | reduced | cost |", "|---|---|---|---|---|---|"]
    for spec in specs:
        name = f"[`{spec.prometheus_name}`](#{spec.prometheus_name})"
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        lines.append(f"| {name} | {spec.kind} | {spec.unit or '-'} | {labels} | `{spec.reduce}` | `{spec.cost}` |")
    return "\n".join(lines) + "\n"


def _section(spec: MetricSpec) -> str:
    lines = [f"## {spec.prometheus_name}", "", spec.help, "", f"- Definition or source: {_source(spec.source)}"]
    watched = [rule.signal for rule in RULES if rule.selection.metric == spec.name]
    if watched:
        signals = ", ".join(f"[{signal}](detection.md#{signal})" for signal in watched)
        lines.append(f"- Watched by: {signals}")
    keys = {label: f"<{label}>" for label in spec.labels}
    lines.append(f"- W&B: `{spec.wandb_key(keys)}`")
    return "\n".join(lines) + "\n"


def _source(text: str) -> str:
    """Formulas hold characters that Markdown would take for markup."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")
