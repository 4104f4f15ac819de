"""The rule table as Prometheus alert rules: ``seismograd.rules.yml``.

One alert a rule of telemetry/rules.py, with the expression that `promql` gives. There is none for a run that makes no
more steps: from outside, a run that hangs looks like one that has ended in a process that stays, and an alert that
fires after each finished run is soon ignored. The board shows the time since the last step instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from seismograd.dashboards.yaml_text import yaml_text
from seismograd.telemetry.baselines import Above, Below, MeanAbove
from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.rules import RULES, Rule, on_probe, promql

RUNBOOK = "docs/detection.md"
FILE = "seismograd.rules.yml"


@dataclass(frozen=True)
class Alert:
    """One Prometheus alert rule.

    Args:
        name: CamelCase.
        signal: the rule's name, also the anchor of its section in docs/detection.md.
        expr: PromQL for Prometheus 2.42 and later.
        hold: how long `expr` must hold, Prometheus' ``for``.
        severity: "critical" or "warning".
        summary, description: Prometheus templates.
    """

    name: str
    signal: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str

    @property
    def labels(self) -> dict[str, str]:
        return {"severity": self.severity, "signal": self.signal}

    @property
    def annotations(self) -> dict[str, str]:
        return {"summary": self.summary, "description": self.description, "runbook": f"{RUNBOOK}#{self.signal}"}

    def as_rule(self) -> dict[str, object]:
        """The rule as the rule file holds it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": self.labels,
            "annotations": self.annotations,
        }


def alert_name(signal: str) -> str:
    """``grad_norm`` as ``SeismogradGradNorm``."""
    return "Seismograd" + "".join(word.capitalize() for word in signal.split("_"))


def counts_spikes(rule: Rule) -> bool:
    """Whether the alert fires on what the process found, and the metric itself is not compared."""
    return promql(rule).startswith("increase(")


def alerts(rules: Iterable[Rule] = RULES) -> tuple[Alert, ...]:
    """All alerts, in the order of the rule table."""
    return tuple(_of(rule) for rule in rules)


def rules_file() -> str:
    """The text of ``seismograd.rules.yml``."""
    group = {"name": "seismograd", "rules": [alert.as_rule() for alert in alerts()]}
    return yaml_text({"groups": [group]}, source="telemetry/rules.py")


def _of(rule: Rule) -> Alert:
    what = rule.summary.removesuffix(".")
    probed = on_probe(rule)
    if counts_spikes(rule):
        seen = "Found by the run itself within the last 5 minutes."
    else:
        assert isinstance(rule.baseline, (Above, Below))
        side = "above" if isinstance(rule.baseline, Above) else "below"
        mean = "The mean of " if isinstance(rule.baseline, MeanAbove) else ""
        seen = f'{mean}{CATALOGUE[rule.selection.metric].prometheus_name} is {{{{ printf "%.3g" $value }}}}, {side} '
        seen += f"{rule.baseline.bound:g}"
        seen += f", as the run itself found on {rule.baseline.steps} measurements." if probed else f" for {rule.hold}."
    return Alert(
        name=alert_name(rule.signal),
        signal=rule.signal,
        expr=promql(rule),
        hold="0m" if probed else rule.hold,
        severity=rule.severity,
        summary=f"{what} (run {{{{ $labels.run }}}})",
        description=f"{seen} {rule.advice}",
    )
