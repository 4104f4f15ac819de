"""PromQL for boards: selectors that the catalogue vouches for, and the few shapes that panels share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seismograd.telemetry.catalogue import CATALOGUE, PREFIX, MetricSpec

RUN = ('job="$job"', 'run="$run"')
"""Every query is about the one run that the board shows."""

ALL_LAYERS = ('layer="all"', 'group="all"')
"""Matchers of the global gradient norm."""

PEAK = "Drawn is the largest value of each interval, so that zooming out loses no peak."
"""Said wherever `largest` is used."""

_NAME = re.compile(rf"\b{PREFIX}(\w+)")
_MATCHER = re.compile(r'(\w+)(=|!=|=~|!~)"[^"]*"')


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Args:
        expr: PromQL with Grafana's variables.
        legend: Grafana's legend format, ``{{label}}`` for a label's value.
    """

    expr: str
    legend: str = ""


def series(metric: str, *matchers: str) -> str:
    """The run's series of a metric, narrowed by matchers such as ``cell="phantom"``.

    Raises:
        ValueError: the catalogue has no such metric or label.
    """
    if metric not in CATALOGUE:
        raise ValueError(f"a board names the metric {metric!r}, which is not in the catalogue")
    for matcher in matchers:
        found = _MATCHER.fullmatch(matcher)
        if found is None or found[1] not in CATALOGUE[metric].labels:
            raise ValueError(f"a board matches {metric!r} on {matcher!r}, which names none of its labels")
    return CATALOGUE[metric].prometheus_name + "{" + ",".join((*RUN, *matchers)) + "}"


def metrics_in(expr: str) -> list[MetricSpec]:
    """The metrics that an expression names, in order, each once.

    Raises:
        KeyError: one of them is not in the catalogue.
    """
    return [CATALOGUE[name] for name in dict.fromkeys(_NAME.findall(expr))]


def largest(selector: str) -> str:
    """The largest value of each interval, so that zooming out does not step over a peak."""
    return f"max_over_time({selector}[$__rate_interval])"


def smallest(selector: str) -> str:
    """The smallest value of each interval."""
    return f"min_over_time({selector}[$__rate_interval])"


def largest_by_layer(selector: str, count: int) -> str:
    """The `count` layers with the largest value anywhere in the time shown.

    A plain topk chooses anew at every point, and lines come and go; ``@ end()`` fixes the choice for the whole panel.
    """
    return f"{selector} and on (layer) topk({count}, max_over_time({selector}[$__range] @ end()))"


def over_usual(selector: str) -> str:
    """Each series over its own median in the time shown."""
    return f"{selector} / quantile_over_time(0.5, {selector}[$__range] @ end())"


def in_layer_order(expr: str) -> str:
    """Layer numbers padded to three digits: Prometheus sorts series by their labels as text."""
    for digits in ("(\\\\d)", "(\\\\d\\\\d)"):
        expr = f'label_replace({expr}, "layer", "0$1", "layer", "{digits}")'
    return expr


def or_zero(total: str) -> str:
    """A total that is 0, rather than absent, while the run exists and nothing was counted."""
    return f"{total} or on () 0 * max({series('step')})"
