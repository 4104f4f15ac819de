"""THE rule table: which signals are watched, against which baseline, and what is said when one fires.

The one table drives the check in the process and generates the Prometheus alert rules (dashboards/prometheus), so that
the alert of a newcomer without Prometheus and the alert in production are the same alert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from seismograd.telemetry.baselines import Above, Baseline, Below, Envelope, MeanAbove, Robust
from seismograd.telemetry.catalogue import CATALOGUE


@dataclass(frozen=True)
class Match:
    """A condition on one label, as in PromQL."""

    label: str
    op: Literal["=", "!="]
    value: str

    def accepts(self, labels: Mapping[str, str]) -> bool:
        return (labels[self.label] == self.value) == (self.op == "=")

    def __str__(self) -> str:
        return f'{self.label}{self.op}"{self.value}"'


@dataclass(frozen=True)
class Selection:
    """The series of one metric that satisfy all conditions.

    Raises:
        ValueError: the catalogue has no such metric or label.
    """

    metric: str
    where: tuple[Match, ...] = ()

    def __post_init__(self) -> None:
        if self.metric not in CATALOGUE:
            raise ValueError(f"a rule names the metric {self.metric!r}, which is not in the catalogue")
        for match in self.where:
            if match.label not in CATALOGUE[self.metric].labels:
                raise ValueError(f"a rule matches on {match.label!r}, which is no label of {self.metric!r}")

    def accepts(self, labels: Mapping[str, str]) -> bool:
        return all(match.accepts(labels) for match in self.where)

    @property
    def promql(self) -> str:
        """The selector in PromQL, with the metric's full name."""
        name = CATALOGUE[self.metric].prometheus_name
        return name + ("{" + ",".join(map(str, self.where)) + "}" if self.where else "")


@dataclass(frozen=True)
class Given:
    """Judge a rule only on steps at which another series is above a bound."""

    selection: Selection
    above: float


@dataclass(frozen=True)
class Rule:
    """One watched signal.

    Args:
        signal: the rule's name, the label value in spikes_total.
        selection: the series that are watched. Counters are judged by what the step added to them.
        baseline: what is usual for them.
        judged: "step" in the training thread before the optimizer step (a spike there can be acted on in the same
            step), "worker" on seismograd's own thread a moment later.
        severity: "critical" wakes somebody, "warning" does not.
        summary: one sentence, what has been seen.
        advice: one sentence, what to look at first.
        given: only judged where this holds too.
        cooldown: steps after a spike during which further ones are counted, but not notified.
        hold: Prometheus' ``for`` of absolute rules. Of those on probes, whose last value stays until the next run, it
            is the window of a mean only: their durations count measurements, which the process does.
    """

    signal: str
    selection: Selection
    baseline: Baseline
    judged: Literal["step", "worker"]
    severity: Literal["critical", "warning"]
    summary: str
    advice: str
    given: Given | None = None
    cooldown: int = 50
    hold: str = "0m"


_ALL_LAYERS = Match("layer", "=", "all")
_ONE_LAYER = Match("layer", "!=", "all")
_WHOLE = Match("group", "=", "all")
_PHANTOM = Selection("clip_fraction", (Match("cell", "=", "phantom"),))
# Nats. Ratios up to 3 are what importance masks let pass (TRL's cap is 3, IcePop's 5).
_RATIO_OF_THREE = 1.0986
# Nats. BF16 engines at identical weights differ by about 0.02 a token; well below, a quotient means nothing.
_ENGINES = 0.005
_ABS_MAX = Match("stat", "=", "abs_max")

RULES: tuple[Rule, ...] = (
    Rule(
        "nonfinite",
        Selection("nonfinite_total"),
        Above(0.0),
        "step",
        "critical",
        "Values that are not finite.",
        "Look at which tensor has them first; a NaN in rollout_logp comes from the rollout engine.",
    ),
    Rule(
        "grad_norm",
        Selection("grad_norm", (_ALL_LAYERS,)),
        Envelope(),
        "step",
        "critical",
        "The global gradient norm jumped.",
        "Compare loss_weight and log_ratio of the same step: high too, a token's ratio is corrupt; not, a layer "
        "explodes.",
    ),
    Rule(
        "layer_grad_norm",
        Selection("grad_norm", (_ONE_LAYER, _WHOLE)),
        Envelope(),
        "step",
        "critical",
        "A layer's gradient norm jumped.",
        "One layer alone points at that layer; all layers at once point at the batch.",
    ),
    Rule(
        "loss_weight",
        Selection("loss_weight", (_ABS_MAX,)),
        Envelope(),
        "step",
        "critical",
        "One token weighs far more in the loss than any before.",
        "Look at that step's largest ratio and advantage, and at the loss's normaliser.",
    ),
    Rule(
        "sequence",
        Selection("sequence_loss_weight"),
        Envelope(),
        "step",
        "critical",
        "One sequence pulls on the loss far more than any before.",
        "Look at sequence_log_ratio: many small gaps add up over a long sequence.",
    ),
    Rule(
        "log_ratio",
        Selection("log_ratio", (_ABS_MAX,)),
        Envelope(floor=_RATIO_OF_THREE),
        "step",
        "warning",
        "A token's probability moved far more between rollout and training than usual.",
        "With a negative advantage it inflates the gradient, with a positive one it silences the token: check the "
        "rollout log-probs.",
    ),
    Rule(
        "sequence_log_ratio",
        Selection("sequence_log_ratio", (_ABS_MAX,)),
        Envelope(floor=_RATIO_OF_THREE),
        "worker",
        "warning",
        "A sequence's summed log-ratio moved far more than usual.",
        "Check staleness and the length of the sequence; MIS masks such sequences.",
    ),
    Rule(
        "layer_proportion",
        Selection("layer_proportion"),
        # In 4,000 honest steps (tests/data) the embedding reached 2.5 times its median; explosions are 70 to 120 times.
        Robust(mads=6.0, factor=3.0, window=256, warmup=100),
        "worker",
        "warning",
        "A layer is out of proportion to the others.",
        "The whole model is not in a burst, this layer is: look at its weights and activations.",
    ),
    Rule(
        "kl",
        Selection("kl", (Match("estimator", "=", "k3"),)),
        Envelope(factor=5.0, floor=0.01),
        "worker",
        "warning",
        "KL to the rollout policy jumped.",
        "Check staleness, learning rate and the weight sync.",
    ),
    Rule(
        "beta",
        Selection("beta_abs_mean"),
        Robust(mads=6.0, factor=2.0, floor=_ENGINES),
        "worker",
        "warning",
        "The gap of precision between training and rollout changed its size.",
        "Check whether either side changed its precision, kernels or padding; a mask error looks the same.",
    ),
    Rule(
        "alpha_floor",
        Selection("alpha_floor"),
        Robust(mads=6.0, factor=2.0, floor=_ENGINES),
        "worker",
        "critical",
        "At identical weights the rollout engine disagrees more than it used to.",
        "Weights probably did not reach the engine: check the sync, tied heads first.",
    ),
    Rule(
        "phantom_fraction",
        _PHANTOM,
        # Experiment 1 (docs/experiments): 3.8% and 4.7% in mismatched runs, 0 by construction in all others.
        MeanAbove(0.03, steps=8),
        "worker",
        "warning",
        "Precision mismatch: phantom clipping. The gap of precision clips tokens that the policy did not move.",
        # In the order of the study that found it, strongest first; docs/detection.md has the source.
        "Match the precisions (FP16 on both sides, or BF16 autocast with FP32 weights at a BF16 rollout); else clip "
        "the clean ratio, from a forward in the rollout's precision; else widen the clip until it stops nothing, or "
        "detach the ratio.",
        hold="5m",
    ),
    Rule(
        "hidden_fraction",
        Selection("clip_fraction", (Match("cell", "=", "hidden"),)),
        Above(0.05, steps=5),
        "worker",
        "warning",
        "Hidden clipping: the gap of precision lets tokens pass that the clip should stop.",
        "Take the gap out of the ratio, or train at the rollout's precision.",
        hold="5m",
    ),
    Rule(
        "snr",
        Selection("snr"),
        Below(1.0, steps=20),
        "worker",
        "warning",
        "The log-ratio is mostly precision noise, and the clip acts on it.",
        "Raise the precision of the rollout or of the shadowed part of the ratio.",
        given=Given(_PHANTOM, 0.01),
        hold="10m",
    ),
)


def promql(rule: Rule) -> str:
    """The rule as a PromQL expression that Prometheus 2.42 and later evaluates.

    Baselines that live in the process (envelope, robust) and counters alert on what the process found; absolute bounds
    are compared by Prometheus itself. One on a probe fires once the process has found it, and while it lasts.
    """
    spikes = f'{CATALOGUE["spikes_total"].prometheus_name}{{signal="{rule.signal}"}}'
    if CATALOGUE[rule.selection.metric].kind == "counter" or not isinstance(rule.baseline, (Above, Below)):
        return f"increase({spikes}[5m]) > 0"
    op = ">" if isinstance(rule.baseline, Above) else "<"
    value = rule.selection.promql
    if isinstance(rule.baseline, MeanAbove):
        value = f"avg_over_time({value}[{rule.hold}])"
    expression = f"{value} {op} {rule.baseline.bound:g}"
    if rule.given is not None:
        expression += f" and on (job, run) {rule.given.selection.promql} > {rule.given.above:g}"
    if on_probe(rule):
        expression += f" and on (job, run) {spikes} > 0"
    return expression


def on_probe(rule: Rule) -> bool:
    """Whether its metric is measured now and then, so that a duration counts measurements rather than time."""
    return CATALOGUE[rule.selection.metric].cost == "probe"
