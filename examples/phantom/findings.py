"""Which published findings hold here. Each is judged by a criterion that is written beside it, not by eye."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phantom.found import Found

UNCLIPPED = ("F", "wide", "detach")
OURS = "(ours)"
LEAST_SEEDS = 3


@dataclass(frozen=True)
class Finding:
    """One published statement.

    Args:
        published: in the study's sense.
        here: what was measured.
        criterion: what would count as reproduced.
        holds: whether it does; None where the runs cannot tell.
    """

    published: str
    here: str
    criterion: str
    holds: bool | None


class Runs:
    """The runs of one part, by variant, at one width (runs without a width count at every width)."""

    def __init__(self, runs: Sequence[Found], eps: float) -> None:
        self._runs = [run for run in runs if run.eps in (None, eps)]

    def __contains__(self, key: str) -> bool:
        return any(run.key == key for run in self._runs)

    def of(self, key: str) -> list[Found]:
        return [run for run in self._runs if run.key == key]

    def mean(self, key: str, value: Callable[[Found], float]) -> float:
        return float(np.mean([value(run) for run in self.of(key)]))

    def span(self, key: str, value: Callable[[Found], float], form: str = "{:+.2f}") -> str:
        """The mean, and the extremes where there are several seeds."""
        values = [value(run) for run in self.of(key)]
        text = form.format(float(np.mean(values)))
        return f"{text} [{form.format(min(values))}, {form.format(max(values))}]" if len(values) > 1 else text


def findings(runs: Runs) -> list[Finding]:
    """All that the runs at hand can answer."""
    # Runs of one seed that differ by what chance would give say nothing of which learns better.
    compared = [_stall(runs), _rescue(runs), _deployed(runs), _hill(runs)]
    if len(runs.of("B")) < LEAST_SEEDS:
        compared = [replace(f, holds=None, criterion=f"{LEAST_SEEDS} seeds or more") for f in compared]
    return [
        *compared,
        _early(runs),
        _negative(runs),
        _correlated(runs),
        _rare(runs),
        _noise(runs),
        _matched(runs),
        _only_b(runs),
        *([_any_clip(runs)] if all(key in runs for key in UNCLIPPED) else []),
        *([_redrawn(runs)] if "FP16" in runs else []),
    ]


def _gained(run: Found) -> float:
    return run.gained


def _taken(run: Found) -> float:
    return run.mean("phantom") + run.mean("legitimate")


def _stall(runs: Runs) -> Finding:
    return Finding(
        "FP32 against BF16 with the clip (B) does not converge, BF16 autocast (A) does",
        f"reward gained: B {runs.span('B', _gained)}, A {runs.span('A', _gained)}; the clip takes the gradient of "
        f"{runs.span('B', _taken, '{:.1%}')} of the tokens in B and of {runs.span('A', _taken, '{:.1%}')} in A",
        "B gains less than half of what A does",
        runs.mean("B", _gained) < 0.5 * runs.mean("A", _gained),
    )


def _rescue(runs: Runs) -> Finding:
    there = [key for key in ("G", *UNCLIPPED) if key in runs]
    gains = ", ".join(f"{key} {runs.span(key, _gained)}" for key in there)
    return Finding(
        "Without beta in the ratio (G), with ratio 1 (F), or without a clip that binds (wide, detach) learning returns",
        f"reward gained: {gains}; B {runs.span('B', _gained)}",
        "each gains twice what B does",
        all(runs.mean(key, _gained) > 2 * runs.mean("B", _gained) for key in there),
    )


def _deployed(runs: Runs) -> Finding:
    return Finding(
        "Phantom clipping keeps the deployed policy from improving",
        f"deployed improvement a step: B {_gain(runs, 'B')}, G {_gain(runs, 'G')}",
        "B's largest seed is below G's smallest",
        max(run.mean("deployed") for run in runs.of("B")) < min(run.mean("deployed") for run in runs.of("G")),
    )


def _hill(runs: Runs) -> Finding:
    return Finding(
        "FP32 gradients with the clean ratio (G) improve the deployed BF16 policy more than BF16's own (A)",
        f"deployed improvement a step: G {_gain(runs, 'G')}, A {_gain(runs, 'A')}",
        "G's smallest seed is above A's largest",
        min(run.mean("deployed") for run in runs.of("G")) > max(run.mean("deployed") for run in runs.of("A")),
    )


def _gain(runs: Runs, key: str) -> str:
    return runs.span(key, lambda run: run.mean("deployed"), "{:.4f}")


def _early(runs: Runs) -> Finding:
    return Finding(
        "Before the policy has moved, beta alone puts 18% of the tokens out of the clip",
        f"step 1: {runs.span('B', lambda run: run.first('phantom_region'), '{:.1%}')} out of the clip, of which "
        f"{runs.span('B', lambda run: run.first('phantom'), '{:.1%}')} on the side that takes the gradient",
        "between half and twice of it",
        0.09 <= runs.mean("B", lambda run: run.first("phantom_region")) <= 0.36,
    )


def _negative(runs: Runs) -> Finding:
    return Finding(
        "beta has a negative mean",
        f"B: {runs.span('B', lambda run: run.mean('beta_mean'), '{:+.4f}')} nats",
        "negative with every seed, by a tenth of mean |beta|",
        all(run.mean("beta_mean") < -0.1 * run.mean("beta") for run in runs.of("B")),
    )


def _correlated(runs: Runs) -> Finding:
    return Finding(
        "beta correlates with the advantage",
        f"B: {runs.span('B', lambda run: run.mean('beta_advantage'), '{:+.3f}')}",
        "beyond 0.1 with every seed, of one sign",
        all(run.mean("beta_advantage") > 0.1 for run in runs.of("B"))
        or all(run.mean("beta_advantage") < -0.1 for run in runs.of("B")),
    )


def _rare(runs: Runs) -> Finding:
    def times(run: Found) -> float:
        return run.mean("beta_uncommon") / run.mean("beta_common")

    return Finding(
        "|beta| is up to 50 times as large for improbable tokens",
        f"log-prob -5 to -20 over above -5: {runs.span('B', times, '{:.1f}')} times",
        "at least 10 times",
        runs.mean("B", times) >= 10,
    )


def _noise(runs: Runs) -> Finding:
    return Finding(
        "At first the log-ratio is mostly gap of precision (SNR below 1)",
        f"SNR over the first 8 steps: {runs.span('B', _early_snr, '{:.2f}')}",
        "below 1 with every seed",
        all(_early_snr(run) < 1 for run in runs.of("B")),
    )


def _early_snr(run: Found) -> float:
    return float(np.mean([a for _, a in run.series["alpha"][:8]]) / np.mean([b for _, b in run.series["beta"][:8]]))


def _matched(runs: Runs) -> Finding:
    there = [key for key in ("A", "FP16") if key in runs]
    return Finding(
        "Equal precisions (FP16 everywhere, or BF16 autocast) leave neither a gap nor phantom clipping",
        ", ".join(
            f"{key}: |beta| {runs.mean(key, lambda run: run.mean('beta')):.1e}, phantom "
            f"{runs.mean(key, lambda run: run.mean('phantom')):.1%}"
            for key in there
        ),
        "both 0",
        all(run.mean("beta") == run.mean("phantom") == 0 for key in there for run in runs.of(key)),
    )


def _only_b(runs: Runs) -> Finding:
    others = [key for key in ("A", "G", "F", "wide", "detach", "FP16") if key in runs]
    called = [run for key in others for run in runs.of(key) if run.called is not None]
    mine = [run.called for run in runs.of("B")]
    steps = ", ".join("never" if step is None else f"at step {step}" for step in mine)
    return Finding(
        f"{OURS} From the live metrics alone the rule table calls B phantom clipping, and nothing else",
        f"B: {steps}; of {sum(len(runs.of(key)) for key in others)} other runs {len(called)}",
        "every run of B, no other",
        all(step is not None for step in mine) and not called,
    )


def _any_clip(runs: Runs) -> Finding:
    def gains(keys: tuple[str, ...]) -> dict[str, float]:
        return {key: runs.mean(key, _gained) for key in keys}

    clipped, free = gains(("B", "A", "G")), gains(UNCLIPPED)
    return Finding(
        f"{OURS} A clip of this width costs reward, as much where alpha fills it (A, G) as where beta does (B)",
        "reward gained: " + ", ".join(f"{key} {gain:+.2f}" for key, gain in {**clipped, **free}.items()),
        "each run without a clip gains more than each with one, and B no less than both A and G",
        min(free.values()) > max(clipped.values()) and clipped["B"] >= max(clipped["A"], clipped["G"]),
    )


def _redrawn(runs: Runs) -> Finding:
    def second(run: Found) -> float:
        return run.series["alpha"][1][1]

    return Finding(
        f"{OURS} After one step alpha in BF16 is mostly rounding drawn anew, which no choice of ratio takes out",
        f"mean |alpha| at step 2, one optimizer step after the sync: A {runs.span('A', second, '{:.3f}')}, FP16 "
        f"{runs.span('FP16', second, '{:.3f}')}; legitimate clipping over all steps: A "
        f"{runs.span('A', lambda run: run.mean('legitimate'), '{:.1%}')}, FP16 "
        f"{runs.span('FP16', lambda run: run.mean('legitimate'), '{:.1%}')}",
        "A's alpha is at least 3 times FP16's after the same step",
        runs.mean("A", second) >= 3 * runs.mean("FP16", second),
    )
