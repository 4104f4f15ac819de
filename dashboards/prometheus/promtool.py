"""``seismograd.rules.test.yml``: for promtool, series on which each alert must fire and series on which all stay quiet.

The expected alerts are written out with the values that the series have, so that a template that does not render, or a
label that is lost in an expression, fails the test too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seismograd.dashboards.prometheus.rules import FILE, Alert, alerts, counts_spikes
from seismograd.dashboards.yaml_text import yaml_text
from seismograd.telemetry.baselines import Above, MeanAbove
from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.rules import RULES, Rule, Selection, on_probe

INTERVAL = 15
"""Seconds between the samples of a series, and between evaluations."""

SETTLED = 600
"""Seconds of honest values before the fault."""

_TARGET = {"instance": "127.0.0.1:9464", "job": "seismograd", "run": "a-run"}
_OTHER_LABELS = {"ratio": "ppo"}
"""A value for each label that a rule leaves open."""


def rules_test_file() -> str:
    """The text of ``seismograd.rules.test.yml``."""
    by_signal = {alert.signal: alert for alert in alerts()}
    tests = [_honest()]
    for rule in RULES:
        alert = by_signal[rule.signal]
        test = _counted(alert) if counts_spikes(rule) else _probed(alert, rule) if on_probe(rule) else None
        tests.append(test or _bounded(alert, rule))
        if rule.given is not None:
            tests.append(_without_given(alert, rule))
    data = {"rule_files": [FILE], "evaluation_interval": f"{INTERVAL}s", "tests": tests}
    return yaml_text(data, source="telemetry/rules.py")


def _honest() -> dict[str, Any]:
    """A run with values on the right side of every bound, and no spike."""
    steps = SETTLED // INTERVAL
    series = []
    for rule in RULES:
        if counts_spikes(rule):
            series.append(_series(_name("spikes_total"), {"signal": rule.signal}, f"0x{steps}"))
        else:
            series.append(_series(*_selected(rule.selection), f"{_good(rule):g}x{steps}"))
            series.append(_series(_name("spikes_total"), {"signal": rule.signal}, f"0x{steps}"))
    checks = [_check(alert, SETTLED, None) for alert in alerts()]
    return _test("an honest run: nothing fires", series, checks)


def _counted(alert: Alert) -> dict[str, Any]:
    """One spike after a time without, first of its signal: the counter stands at 0 from the start."""
    signal = {"signal": alert.signal}
    series = _series(_name("spikes_total"), signal, f"0x{SETTLED // INTERVAL} 1x60")
    checks = [
        _check(alert, SETTLED, None),
        _check(alert, SETTLED + 2 * INTERVAL, _fired(alert, signal)),
        _check(alert, SETTLED + 600, None),
    ]
    return _test(f"{alert.signal}: one spike fires for 5 minutes", [series], checks)


def _bounded(alert: Alert, rule: Rule) -> dict[str, Any]:
    """A value beyond its bound: quiet before, quiet while pending, firing after, quiet again once it is back."""
    name, labels = _selected(rule.selection)
    hold = _seconds(rule.hold)
    settled, beyond = SETTLED // INTERVAL, 2 * hold // INTERVAL
    series = [_series(name, labels, f"{_good(rule):g}x{settled} {_bad(rule):g}x{beyond} {_good(rule):g}x60")]
    if rule.given is not None:
        given_name, given_labels = _selected(rule.given.selection)
        series.append(_series(given_name, given_labels, f"{2 * rule.given.above:g}x{settled + beyond + 60}"))
    end = SETTLED + 2 * hold + INTERVAL
    # A mean follows its values by up to the window that it is taken over, which is as long as the hold.
    lag = hold - 4 * INTERVAL if isinstance(rule.baseline, MeanAbove) else 0
    checks = [
        _check(alert, SETTLED, None),
        _check(alert, SETTLED + hold // 2, None),
        _check(alert, SETTLED + hold + 4 * INTERVAL + lag, _fired(alert, labels, _bad(rule))),
        _check(alert, end + 4 * INTERVAL + lag, None),
    ]
    return _test(f"{alert.signal}: beyond its bound for {rule.hold}", series, checks)


def _probed(alert: Alert, rule: Rule) -> dict[str, Any]:
    """A value beyond its bound: quiet, however long, until the run has counted enough measurements; firing as long as
    it lasts; quiet again once it is back.
    """
    name, labels = _selected(rule.selection)
    window = _seconds(rule.hold) if isinstance(rule.baseline, MeanAbove) else INTERVAL
    settled, uncounted, counted = SETTLED // INTERVAL, 2 * window // INTERVAL + 8, window // INTERVAL + 40
    values = f"{_good(rule):g}x{settled} {_bad(rule):g}x{uncounted + counted} {_good(rule):g}x{counted}"
    spikes = f"0x{settled + uncounted} 1x{2 * counted}"
    series = [_series(name, labels, values), _series(_name("spikes_total"), {"signal": rule.signal}, spikes)]
    if rule.given is not None:
        steps = settled + uncounted + 2 * counted
        series.append(_series(*_selected(rule.given.selection), f"{2 * rule.given.above:g}x{steps}"))
    beyond = SETTLED + INTERVAL  # "axn" are n + 1 samples
    found = beyond + uncounted * INTERVAL
    back = found + (counted + 1) * INTERVAL
    checks = [
        _check(alert, SETTLED, None),
        _check(alert, beyond + window, None),
        _check(alert, found + INTERVAL, _fired(alert, labels, _bad(rule))),
        _check(alert, back - INTERVAL, _fired(alert, labels, _bad(rule))),
        _check(alert, back + window, None),
    ]
    return _test(f"{alert.signal}: beyond its bound, and found by the run", series, checks)


def _without_given(alert: Alert, rule: Rule) -> dict[str, Any]:
    """The value beyond its bound, but the condition beside it does not hold."""
    assert rule.given is not None
    steps = 2 * _seconds(rule.hold) // INTERVAL
    series = [
        _series(*_selected(rule.selection), f"{_bad(rule):g}x{steps}"),
        _series(*_selected(rule.given.selection), f"{rule.given.above / 2:g}x{steps}"),
        _series(_name("spikes_total"), {"signal": rule.signal}, f"1x{steps}"),
    ]
    checks = [_check(alert, steps * INTERVAL, None)]
    return _test(f"{alert.signal}: beyond its bound, without {rule.given.selection.metric}", series, checks)


def _fired(alert: Alert, labels: Mapping[str, str], value: float = 0.0) -> dict[str, Any]:
    """What promtool must see, with the templates rendered."""
    rendered = {
        key: text.replace("{{ $labels.run }}", _TARGET["run"]).replace('{{ printf "%.3g" $value }}', f"{value:.3g}")
        for key, text in alert.annotations.items()
    }
    return {"exp_labels": {**_TARGET, **labels, **alert.labels}, "exp_annotations": rendered}


def _test(name: str, series: list[dict[str, str]], checks: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "interval": f"{INTERVAL}s", "input_series": series, "alert_rule_test": checks}


def _check(alert: Alert, seconds: int, expected: dict[str, Any] | None) -> dict[str, Any]:
    return {"eval_time": f"{seconds}s", "alertname": alert.name, "exp_alerts": [] if expected is None else [expected]}


def _series(name: str, labels: Mapping[str, str], values: str) -> dict[str, str]:
    pairs = ",".join(f'{key}="{value}"' for key, value in {**_TARGET, **labels}.items())
    return {"series": f"{name}{{{pairs}}}", "values": values}


def _name(metric: str) -> str:
    return CATALOGUE[metric].prometheus_name


def _selected(selection: Selection) -> tuple[str, dict[str, str]]:
    """The full name and labels of one series that the selection takes."""
    labels = {label: _OTHER_LABELS.get(label, "") for label in CATALOGUE[selection.metric].labels}
    labels |= {match.label: match.value for match in selection.where if match.op == "="}
    if not selection.accepts(labels):
        raise ValueError(f"no example labels for {selection.promql}: add some to _OTHER_LABELS")
    return _name(selection.metric), labels


def _good(rule: Rule) -> float:
    bound: float = rule.baseline.bound  # type: ignore[attr-defined]  # only Above and Below are compared by Prometheus
    return bound / 5 if isinstance(rule.baseline, Above) else bound * 5


def _bad(rule: Rule) -> float:
    bound: float = rule.baseline.bound  # type: ignore[attr-defined]  # as above
    return bound * 2 if isinstance(rule.baseline, Above) else bound / 2


def _seconds(hold: str) -> int:
    """Prometheus' "5m" in seconds."""
    return int(hold[:-1]) * {"s": 1, "m": 60, "h": 3600}[hold[-1]]
