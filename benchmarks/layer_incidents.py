"""Incidents of kind B before the controls: does LayerClip switch itself on, and what does it leave healthy layers?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from torch import nn

from benchmarks import bank
from benchmarks.overhead import Array
from benchmarks.report import Finding, table
from seismograd.controls.layerclip import REFERENCES, References
from seismograd.controls.policy import Policy
from seismograd.gradloc import localize
from seismograd.protection import Protection
from seismograd.telemetry.detector import Detector, Measured
from seismograd.telemetry.incidents import Explained
from seismograd.telemetry.layers import Grouping, ModelMap
from seismograd.telemetry.norms import take_norms
from seismograd.telemetry.records import Spike
from seismograd.telemetry.rules import RULES

LAYER_FAULTS = ("embedding", "residual")  # of the bank: kind B
GLOBAL = "all"


@dataclass(frozen=True)
class Incident:
    """What a fault of kind B did, and what was left of the healthy layers' gradients.

    Args:
        fault, model: keys of the bank.
        exploded: the norm of the sick layer that grew most, over its median in the honest steps.
        sick: names of the layers that explode.
        clipped: of those that LayerClip clips.
        threshold: max_norm of the global clip: the largest |G| of the honest steps.
        kept: part of the healthy layers' gradients that LayerClip and the global clip leave.
        alone: part that the global clip by itself leaves.
        without: part that it would leave if there were no sick layer.
        spikes: signals of the rule table that fired.
        verdict: GradLoc's.
        enabled: whether the run's policy switched LayerClip on in this step.
    """

    fault: str
    model: str
    exploded: float
    sick: tuple[str, ...]
    clipped: tuple[str, ...]
    threshold: float
    kept: float
    alone: float
    without: float
    spikes: tuple[str, ...]
    verdict: str
    enabled: bool

    @property
    def caught(self) -> bool:
        """The sick layers are clipped, and no other."""
        return sorted(self.clipped) == sorted(self.sick)

    @property
    def share_kept(self) -> float:
        """Of what the global clip would leave if there were no sick layer."""
        return self.kept / self.without

    @property
    def share_alone(self) -> float:
        """The same, without LayerClip."""
        return self.alone / self.without


def kind_b(seeds: int, models: Sequence[str]) -> list[bank.Spec]:
    """All of the bank's, of these models."""
    return [spec for spec in bank.specs(seeds) if spec.fault in LAYER_FAULTS and spec.model in models]


@dataclass(frozen=True)
class Step:
    """The norms of one: `series` as `Grouping.norms` gives them, the first the whole gradient's."""

    grouping: Grouping
    series: Array

    @classmethod
    def of(cls, net: nn.Module) -> Step:
        norms = take_norms(list(net.parameters()))
        assert norms is not None
        grouping = ModelMap(net).grouping(norms.parameters)
        return cls(grouping, grouping.norms(norms.per_parameter.double().numpy(), float(norms.total)))


@dataclass(frozen=True)
class Story:
    """Honest steps of an incident's model, on other data, and the incident with what GradLoc makes of it."""

    spec: bank.Spec
    honest: Sequence[Step]
    sick: Step
    layers: tuple[str, ...]
    explained: Explained

    @classmethod
    def of(cls, spec: bank.Spec, honest: int) -> Story:
        earlier = [replace(spec, fault="honest", size=0.0, data=10_000 + i) for i in range(honest)]
        case = bank.make(spec)
        return cls(
            spec,
            [Step.of(bank.make(one).model) for one in earlier],
            Step.of(case.model),
            case.truth.layers,
            Explained(localize(case.batches, case.model)),
        )


def incident(story: Story, reference: References) -> Incident:
    """Judge it after the honest steps, as a run with LayerClip on auto does.

    Raises:
        RuntimeError: an honest step is clipped.
    """
    protection = Protection(nn.Linear(1, 1), Policy.of({"layerclip.reference": reference}))
    spikes, found = Spikes(), []
    for number, step in enumerate([*story.honest, story.sick]):
        scales = protection.judge(step.grouping, step.series)
        assert scales is not None
        found = spikes(number, step)
        last = step is story.sick
        if scales.clipped and not last:
            raise RuntimeError(f"{story.spec.name}: an honest step is clipped")
        protection.decide(number, found, story.explained if last else None, scales, clipping=True)
    well = np.array([unit not in story.layers for unit in scales.units])
    max_norm = max(float(step.series[0]) for step in story.honest)
    usual = np.median([step.series[1 : 1 + len(well)] for step in story.honest], axis=0)
    return Incident(
        story.spec.fault,
        story.spec.model,
        float((scales.norms / usual)[~well].max()),
        story.layers,
        scales.clipped,
        max_norm,
        float(np.median(scales.scales[well])) * min(1.0, max_norm / scales.norm),
        min(1.0, max_norm / float(story.sick.series[0])),
        min(1.0, max_norm / float(np.linalg.norm(scales.norms[well]))),
        tuple(spike.signal for spike in found),
        story.explained.incident.verdict,
        protection.on("layerclip"),
    )


class Spikes:
    """The rule table's judgement of grad_norm and layer_grad_norm."""

    def __init__(self) -> None:
        self._detector = Detector([rule for rule in RULES if rule.signal in ("grad_norm", "layer_grad_norm")])

    def __call__(self, number: int, step: Step) -> list[Spike]:
        """Judge a step, and learn from it."""
        layers = [GLOBAL, *step.grouping.layers]
        labels = [{"layer": layer, "group": GLOBAL} for layer in layers]
        return self._detector.judge(number, {"grad_norm": Measured(labels, step.series[: len(layers)])})


def of_incidents(reference: References, found: Sequence[Incident]) -> list[Finding]:
    whole = len(found)
    enabled, caught = sum(one.enabled for one in found), sum(one.caught for one in found)
    kept, alone = np.array([(one.share_kept, one.share_alone) for one in found]).T
    values = [{**asdict(one), "caught": one.caught} for one in found]
    return [
        Finding(
            f"{reference}: switched on in the very step of an incident of kind B",
            "all",
            f"{enabled} of {whole}",
            enabled == whole,
            {"enabled": enabled, "incidents": values},
        ),
        Finding(
            f"{reference}: the sick layers clipped and no other",
            "all",
            f"{caught} of {whole}",
            caught == whole,
            {"caught": caught},
        ),
        Finding(
            f"{reference}: healthy layers' update kept",
            "at least 95% in each",
            f"least {kept.min():.1%}, median {np.median(kept):.1%}",
            bool(kept.min() >= 0.95),
            {"kept": kept.tolist()},
        ),
        Finding(
            "the global clip alone: healthy layers' update kept",
            "reported",
            f"least {alone.min():.1%}, median {np.median(alone):.1%}, most {alone.max():.1%}",
            None,
            {"kept": alone.tolist()},
        ),
    ][: 4 if reference == REFERENCES[0] else 3]


def incident_table(found: Sequence[Incident]) -> str:
    rows = []
    for fault, model in dict.fromkeys((one.fault, one.model) for one in found):
        mine = [one for one in found if (one.fault, one.model) == (fault, model)]
        exploded = [one.exploded for one in mine]
        shares = [
            f"{min(shares):.1%} ... {max(shares):.1%}"
            for shares in ([one.share_alone for one in mine], [one.share_kept for one in mine])
        ]
        counts = [
            f"{sum(flags)} of {len(mine)}"
            for flags in (
                [bool(one.spikes) for one in mine],
                [one.verdict == "B" for one in mine],
                [one.enabled for one in mine],
                [one.caught for one in mine],
            )
        ]
        rows.append((fault, model, f"{min(exploded):.1f} ... {max(exploded):.1f}", *counts, *shares))
    head = (
        "fault", "model", "sick layer over usual", "spikes", "verdict B", "switched on", "sick clipped, no other",
        "global clip leaves", "LayerClip leaves",
    )  # fmt: skip
    return table(head, rows)
