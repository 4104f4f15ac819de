"""The experiment's page: what was done, its tables, what they say, its pictures."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import table
from examples.layer_heterogeneity.arms import GLOBAL, HEALTHY, HISTORY, PEERS, UNCLIPPED
from examples.layer_heterogeneity.figures import Figures, at_explosions, figures
from examples.layer_heterogeneity.svg import Chart, Series, page

NAME = "layer_heterogeneity"

INTRODUCTION = """\
A small transformer (6 blocks, width 48) learns a language of 32 words, each of which depends on the two before it. Its
vocabulary has 224 more tokens whose embeddings have collapsed to a ten-thousandth of a usual one, as those of tokens
that training has hardly seen do. One comes up in a quarter of the steps. The first normalisation then divides by almost
nothing, and the gradient of the embedding explodes; those of the other layers do not. Nothing is multiplied by hand.
All arms of a seed have the same model, batches and learning rate, which is constant and was tuned for none of them.
max_norm is 2.0, above |G| in nearly all honest steps.

LayerClip is armed. It switches itself on at a spike (grad_norm or layer_grad_norm beyond three times its envelope, and
a layer beyond LayerClip's threshold) in that very step, and off again 100 steps after it last had something to clip;
the global clip follows it. ZClip and AdaGC are used in place of the global clip, with their papers' settings
(arXiv:2504.02507, arXiv:2502.11034); in their warm-ups of 25 and 100 steps they are the global clip.

An explosion is a step with a collapsed token in it in which the embedding's gradient norm is ten times its usual one or
more. Scale: what the median healthy layer's gradient is multiplied by, the median of the explosions. Kept: that, over
what the global clip would leave if the embedding had no gradient at all. Target: the held-out loss that the run of the
same seed without collapse has after 60% of its steps; a run that does not reach it counts with all of its steps. Loss:
the mean of the last three looks, nats. Honest steps clipped: the part of the steps without any rare token at which the
arm's own rule clips something (LayerClip: LayerClip, not the global clip behind it). Figures are means over the seeds
with the 95% interval of a bootstrap over seeds."""


def write(results: dict[str, Any], folder: Path) -> str:
    """The page and its pictures into the folder.

    Args:
        results: what layer_heterogeneity.json holds.

    Returns:
        The page.
    """
    parts = [
        "# Layer heterogeneity",
        f"`{results['command']}`",
        f"{os.cpu_count()}-core {platform.machine()} CPU, torch {results['torch']}; one thread.",
        INTRODUCTION,
    ]
    for i, experiment in enumerate(results["experiments"]):
        found = figures(experiment, results["every"])
        name = f"{NAME}_{i + 1}.svg"
        (folder / name).write_text(page(_charts(experiment, results["every"])))
        parts += [_heading(experiment["setting"]), _table(found), said(found), f"![loss, and update kept]({name})"]
    text = "\n\n".join(parts) + "\n"
    (folder / f"{NAME}.md").write_text(text)
    return text


def said(found: dict[str, Figures]) -> str:
    """What the table says, in words that follow from it."""
    of_global = found[GLOBAL]
    if of_global.kept is None:
        return "No explosion came up: nothing is said."
    size, largest = of_global.size
    lines = [
        f"{of_global.explosions} explosions, {size:.0f} times the layer's usual norm in the median, {largest:,.0f} at "
        f"most. The global clip leaves the healthy layers {of_global.kept.value:.0%} of their update at the median one."
    ]
    for name in (PEERS, HISTORY):
        one = found[name]
        if one.kept is not None and one.kept_share is not None:
            lines.append(
                f"{name} keeps at least 95% of it at {one.kept_share.value:.1%} of the explosions, and "
                f"{one.kept.value:.1%} at the median one; it clips at {one.false.value:.2%} of the honest steps."
            )
    for name, one in found.items():
        if name not in (GLOBAL, HEALTHY):
            lines.append(f"{name}: {_compared(one)}.")
    if UNCLIPPED in found and abs(found[UNCLIPPED].loss.value - found[PEERS].loss.value) < 0.005:
        lines.append(
            "No clip at all does as well as LayerClip by peers: here an explosion, of a rare token's embedding, does "
            "no harm of its own, only by what the global clip takes from the other layers for it."
        )
    loss = found[HEALTHY].worse
    lines.append(
        f"All that the explosions cost under the global clip: {-loss.value:.3f} nats "
        f"[{-loss.high:.3f}, {-loss.low:.3f}] (the run without collapse against it)."
    )
    return "\n".join(f"- {line}" for line in lines)


def _compared(one: Figures) -> str:
    if not one.worse.sure:
        return f"no difference in loss from the global clip that these seeds show ({one.worse.text('+.3f')} nats)"
    return f"{'worse' if one.worse.value > 0 else 'better'} than the global clip ({one.worse.text('+.3f')} nats)"


def _heading(setting: dict[str, Any]) -> str:
    names = {"SGD": "SGD with momentum 0.9", "AdamW": "AdamW, weight decay 0.01"}
    when = f"collapsed tokens from {'step ' + str(setting['after']) if setting['after'] else 'the first step'} on"
    return f"## {names[setting['optimizer']]}, lr {setting['lr']:g}, {setting['steps']} steps, {when}"


def _table(found: dict[str, Figures]) -> str:
    rows = []
    for name, one in found.items():
        steps = one.steps.text(".0f") + (f", {one.unreached} not" if one.unreached else "")
        spiky = [
            x.text(form) if x else "" for x, form in ((one.scale, ".3f"), (one.kept, ".1%"), (one.kept_share, ".0%"))
        ]
        rows.append((name, one.loss.text(), one.worse.text("+.3f"), steps, *spiky, one.false.text(".1%")))
    head = (
        "arm", "loss", "loss less global clip's", "steps to target", "scale at an explosion", "kept, median",
        "explosions with 95% kept", "honest steps clipped",
    )  # fmt: skip
    return table(head, rows)


def _charts(experiment: dict[str, Any], every: int) -> list[Chart]:
    arms = experiment["arms"]
    curves = {name: np.mean([seed["loss"] for seed in seeds], axis=0) for name, seeds in arms.items()}
    looks = [every * (i + 1) for i in range(len(curves[GLOBAL]))]
    lines = tuple(Series(name, looks, y.tolist()) for name, y in curves.items())
    apart = tuple(Series(name, looks, (y - curves[GLOBAL]).tolist()) for name, y in curves.items())
    dots = tuple(
        Series(name, *(np.concatenate([at_explosions(s, x) for s in seeds]).tolist() for x in ("exploded", "kept")))
        for name, seeds in arms.items()
    )
    low, high = (float(f([y.tolist() for y in curves.values()])) for f in (np.min, np.max))
    times = "norm of the embedding's gradient over its usual one"
    return [
        Chart("held-out loss, mean of the seeds", "steps", "nats", lines, True, False, (low, high)),
        Chart("loss less the global clip's, cut at 0.04", "steps", "nats", apart, True, False, (-0.04, 0.04)),
        Chart("healthy layers' update kept at each explosion", times, "kept", dots, False, True, (0.0, 1.05)),
    ]
