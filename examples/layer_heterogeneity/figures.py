"""Figures numbers are told by: what the page says of each arm, over seeds, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.layer_heterogeneity.arms import GLOBAL, HEALTHY

Array = NDArray[np.float64]

LAST = 3  # looks at the held-out loss that the final one is the mean of
TARGET = 0.6  # of the run: the loss that the run without collapsed tokens has by then
EXPLOSION = 10.0  # times its usual norm: what is called an explosion
KEPT = 0.95


@dataclass(frozen=True)
class Mean:
    """Over seeds, with the 95% interval of a bootstrap over them."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, seeds: Sequence[float]) -> Mean:
        x = np.asarray(seeds, dtype=np.float64)
        drawn = np.random.default_rng(0).choice(x, (10_000, len(x))).mean(axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        return cls(float(x.mean()), float(low), float(high))

    def text(self, form: str = ".3f") -> str:
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"

    @property
    def sure(self) -> bool:
        """Whether zero lies outside of the interval."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Figures:
    """Of one arm; None where the arm has no explosions.

    Args:
        loss: held out, at the end, nats.
        worse: loss less that of the global clip, seed by seed.
        steps: to the target; where a seed does not reach it, all of its steps.
        unreached: such seeds.
        scale: what the median healthy layer is multiplied by at an explosion, the median of them.
        kept: that over what the global clip would leave without the sick layer, the median.
        kept_share: part of the explosions with at least 95% kept.
        false: part of the honest steps at which the arm's own rule clips.
        explosions: of all seeds.
        size: median and largest of them, times the layer's usual norm.
    """

    loss: Mean
    worse: Mean
    steps: Mean
    unreached: int
    scale: Mean | None
    kept: Mean | None
    kept_share: Mean | None
    false: Mean
    explosions: int
    size: tuple[float, float]


def figures(experiment: dict[str, Any], every: int) -> dict[str, Figures]:
    """Of all arms."""
    arms = experiment["arms"]
    targets = [seed["loss"][int(TARGET * len(seed["loss"])) - 1] for seed in arms[HEALTHY]]
    base = [_final(seed) for seed in arms[GLOBAL]]
    return {name: _figures(seeds, targets, base, every) for name, seeds in arms.items()}


def at_explosions(seed: dict[str, Any], what: str) -> Array:
    """One of a run's series, at the explosions."""
    return np.asarray(seed[what])[explosions(seed)]


def explosions(seed: dict[str, Any]) -> NDArray[np.int64]:
    """Steps with a collapsed token in them at which the layer's norm shows it."""
    sick = np.array(seed["sick"], dtype=np.int64)
    return sick[np.asarray(seed["exploded"])[sick] >= EXPLOSION]


def _figures(seeds: list[dict[str, Any]], targets: list[float], base: list[float], every: int) -> Figures:
    reached = [_reached(seed["loss"], target, every) for seed, target in zip(seeds, targets, strict=True)]
    final = [_final(seed) for seed in seeds]
    spiky = [seed for seed in seeds if len(explosions(seed))]
    sizes = np.concatenate([at_explosions(seed, "exploded") for seed in seeds])
    false = [len(set(seed["clipped"]) & set(seed["honest"])) / len(seed["honest"]) for seed in seeds]

    def median(what: str) -> Mean | None:
        return Mean.of([float(np.median(at_explosions(seed, what))) for seed in spiky]) if spiky else None

    return Figures(
        loss=Mean.of(final),
        worse=Mean.of(np.subtract(final, base).tolist()),
        steps=Mean.of([every * len(seeds[0]["loss"]) if x is None else x for x in reached]),
        unreached=reached.count(None),
        scale=median("scale"),
        kept=median("kept"),
        kept_share=Mean.of([float((at_explosions(s, "kept") >= KEPT).mean()) for s in spiky]) if spiky else None,
        false=Mean.of(false),
        explosions=len(sizes),
        size=(float(np.median(sizes)), float(sizes.max())) if len(sizes) else (1.0, 1.0),
    )


def _final(seed: dict[str, Any]) -> float:
    return float(np.mean(seed["loss"][-LAST:]))


def _reached(loss: list[float], target: float, every: int) -> float | None:
    """Steps, between two looks by interpolation."""
    for i, now in enumerate(loss):
        if now <= target:
            before = loss[i - 1] if i else now
            part = (before - target) / (before - now) if before > now else 1.0
            return every * (i + part)
    return None
