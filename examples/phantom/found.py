"""What a run's store says: nothing is computed anew from tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phantom.variants import Variant
from seismograd import RunStore, Spike
from seismograd.telemetry.detector import Detector, measured
from seismograd.telemetry.rules import RULES

VERDICT = "Precision mismatch: phantom clipping"
SERIES: dict[str, tuple[str, dict[str, str]]] = {
    "alpha": ("alpha_abs_mean", {}),
    "alpha_floor": ("alpha_floor", {}),
    "beta": ("beta_abs_mean", {}),
    "beta_mean": ("beta_mean", {}),
    "beta_std": ("beta_std", {}),
    "beta_advantage": ("beta_advantage_correlation", {}),
    "beta_common": ("beta_abs_mean_by_rarity", {"rarity": "common"}),
    "beta_uncommon": ("beta_abs_mean_by_rarity", {"rarity": "uncommon"}),
    "beta_rare": ("beta_abs_mean_by_rarity", {"rarity": "rare"}),
    "snr": ("snr", {}),
    "phantom": ("clip_fraction", {"cell": "phantom", "ratio": "ppo"}),
    "legitimate": ("clip_fraction", {"cell": "legitimate", "ratio": "ppo"}),
    "hidden": ("clip_fraction", {"cell": "hidden", "ratio": "ppo"}),
    "phantom_region": ("clip_region_fraction", {"cell": "phantom", "ratio": "ppo"}),
    "deployed": ("deployed_improvement", {}),
    "kl": ("kl", {"estimator": "k3"}),
}
"""Our short names and the catalogue's."""


@dataclass(frozen=True)
class Found:
    """One run.

    Args:
        key, what: the variant's.
        eps: width of the clip, or None where the run has none of this width.
        seed: of the run.
        reward: by step, the mean over the step's completions; the loop's own.
        series: by short name, (step, value) as stored.
        called: the step at which the rule table calls it phantom clipping, or None.
        others: the other signals that fire.
    """

    key: str
    what: str
    eps: float | None
    seed: int
    reward: list[float]
    series: dict[str, list[tuple[int, float]]]
    called: int | None
    others: list[str]

    def mean(self, name: str) -> float:
        """The mean over the measured steps, NaN where there are none."""
        values = [value for _, value in self.series[name] if math.isfinite(value)]
        return sum(values) / len(values) if values else math.nan

    def first(self, name: str) -> float:
        """At the first measured step, at which the policy has not moved."""
        return self.series[name][0][1] if self.series[name] else math.nan

    @property
    def gained(self) -> float:
        """Reward of the last five steps over that of the first step."""
        return sum(self.reward[-5:]) / len(self.reward[-5:]) - self.reward[0]

    def line(self) -> str:
        """For the console."""
        called = "" if self.called is None else f", {VERDICT} at step {self.called}"
        return (
            f"{self.key} eps {self.eps} seed {self.seed}: reward {self.reward[0]:.1f} {self.gained:+.1f}, |alpha| "
            f"{self.mean('alpha'):.3f}, |beta| {self.mean('beta'):.3f}, phantom {self.mean('phantom'):.1%}, legitimate "
            f"{self.mean('legitimate'):.1%}{called}"
        )

    def as_json(self) -> dict[str, Any]:
        """With values rounded to 5 digits; NaN as null."""
        series = {
            name: [[step, float(f"{value:.5g}") if math.isfinite(value) else None] for step, value in points]
            for name, points in self.series.items()
        }
        return {**self.__dict__, "series": series, "reward": [round(x, 4) for x in self.reward]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Found:
        series = {
            name: [(step, math.nan if value is None else value) for step, value in points]
            for name, points in data["series"].items()
        }
        return cls(**{**data, "series": series})


def read(folder: Path, variant: Variant, eps: float, seed: int) -> Found:
    """A finished run, from its store.

    Raises:
        RuntimeError: a part of the hook failed, so that figures are missing.
    """
    with RunStore.read(folder / "run.db") as store:
        faults = [event.message for event in store.events("fault")]
        if faults:
            raise RuntimeError(f"{folder}: {faults[0]}")
        spikes = judged(store)
        series = {name: store.series(metric, **labels) for name, (metric, labels) in SERIES.items()}
    called = [spike.step for spike in spikes if spike.summary.startswith(VERDICT)]
    return Found(
        key=variant.key,
        what=variant.what,
        eps=eps if variant.clips_at_eps else None,
        seed=seed,
        reward=json.loads((folder / "rewards.json").read_text()),
        series=series,
        called=min(called, default=None),
        others=sorted({spike.signal for spike in spikes if not spike.summary.startswith(VERDICT)}),
    )


def judged(store: RunStore) -> list[Spike]:
    """What the present rule table finds in the stored metrics, row by row as the run's own worker did.

    A run that was made under the same table has the same spikes among its events.
    """
    detector = Detector([rule for rule in RULES if rule.judged == "worker"])
    return [spike for row in store.rows() for spike in detector.judge(row.step, measured(row.readings))]
