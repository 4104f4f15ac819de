"""The figures: one panel a signal, by step; a line is the mean over the seeds, its band their extremes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import matplotlib as mpl
import numpy as np

from phantom.found import Found

mpl.use("svg")
mpl.rcParams.update(
    {"svg.hashsalt": "phantom", "svg.fonttype": "none", "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}
)

from matplotlib import pyplot as plt  # noqa: E402  # after the backend is chosen

PANELS = (
    ("reward", "reward (minus completion tokens)"),
    ("alpha", "mean |alpha| (nats)"),
    ("beta", "mean |beta| (nats)"),
    ("snr", "SNR = |alpha| / |beta|"),
    ("phantom", "phantom fraction"),
    ("legitimate", "legitimate fraction"),
    ("deployed", "deployed improvement (nats)"),
    ("kl", "KL to the rollout policy (k3, nats)"),
)
COLOURS = {
    "A": "tab:blue", "B": "tab:red", "F": "tab:olive", "G": "tab:green", "wide": "tab:purple", "detach": "tab:brown",
    "FP16": "tab:cyan",
}  # fmt: skip


def draw(runs: Sequence[Found], main_eps: float, path: Path) -> None:
    """All panels as one SVG. Runs at another width than the main one are dashed."""
    figure, axes = plt.subplots(4, 2, figsize=(9, 10), sharex=True, layout="constrained")
    for (key, eps), members in groupby(sorted(runs, key=_group), key=_group):
        some = list(members)
        dashed = eps not in (0.0, main_eps)
        label = key if eps == 0.0 else f"{key}, eps {eps:g}"
        for (name, title), axis in zip(PANELS, axes.flat, strict=True):
            steps, values = _curves(some, name)
            axis.set_title(title)
            if steps.size:
                (line,) = axis.plot(
                    steps, values.mean(0), color=COLOURS[key], ls="--" if dashed else "-", lw=1.1, label=label
                )
                axis.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.08, lw=0)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _group(run: Found) -> tuple[str, float]:
    return run.key, run.eps or 0.0


def _curves(runs: Sequence[Found], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(S,) steps that all runs have measured, and (runs, S) values."""
    if name == "reward":
        return np.arange(1, len(runs[0].reward) + 1), np.array([run.reward for run in runs])
    by_step = [{step: value for step, value in run.series[name] if np.isfinite(value)} for run in runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    return np.array(steps), np.array([[values[step] for step in steps] for values in by_step])
