"""LayerClip: what its own code costs, what it leaves the healthy layers, and that it leaves honest steps alone.

python -m benchmarks.controls            # some ten minutes; writes benchmarks/results/controls.md and .json
python -m benchmarks.controls --quick    # a minute, to see that it runs
"""

from __future__ import annotations

import argparse
import csv
import gzip
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import bank
from benchmarks.honest import columns, read
from benchmarks.layer_incidents import Spikes, Step, Story, incident, incident_table, kind_b, of_incidents
from benchmarks.overhead import Array, bootstrap
from benchmarks.report import Finding, Report, table
from seismograd.controls import LayerClip
from seismograd.controls.layerclip import REFERENCES, LayerScales, References, apply
from seismograd.telemetry.layers import Grouping, ModelMap, Place
from seismograd.telemetry.norms import take_norms

DATA = Path(__file__).parent.parent / "tests" / "data"
DISCARDED = 3  # pairs at the beginning
WINDOW = 128  # steps that LayerClip learns from


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        layers: of the model whose step the cost is held against.
        steps: with a sick layer, in each of its four measurements; twice as many have none.
        pairs: with and without.
        seeds: of the bank.
        honest: steps that LayerClip sees before an incident.
        models: keys of the bank.
    """

    layers: int = 32
    steps: int = 16
    pairs: int = 30
    seeds: int = 3
    honest: int = 24
    models: tuple[str, ...] = bank.MODELS


FULL = Size()
QUICK = Size(layers=4, steps=6, pairs=4, seeds=1, honest=17, models=bank.MODELS[:1])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: the figures mean little")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    size = QUICK if args.quick else FULL
    report = Report("LayerClip", "python -m benchmarks.controls" + (" --quick" if args.quick else ""))
    measure(size, report)
    if args.quick:
        report.notes.insert(0, "A quick run: too few steps for its figures to mean much.")
    report.write(args.out, "controls")
    print(report.markdown())


def measure(size: Size, report: Report) -> None:
    """All parts, into the report."""
    say("own code")
    costs = [own_time(size, reference, groups) for reference in REFERENCES for groups in (False, True)]
    dearest = max(costs, key=lambda cost: cost.share)
    say("with and without, interleaved")
    report.findings += [of_cost(dearest), of_pairs(paired(size), 1 + dearest.share)]
    report.tables.append("Own code by the thread clock:\n\n" + cost_table(costs))
    say("incidents of kind B")
    told = [Story.of(spec, size.honest) for spec in kind_b(size.seeds, size.models)]
    for reference in REFERENCES:
        found = [incident(story, reference) for story in told]
        report.findings += of_incidents(reference, found)
        report.tables.append(f"Incidents of kind B, {reference}:\n\n{incident_table(found)}")
    say("honest steps")
    for reference in REFERENCES:
        report.findings += of_honest(reference)
    report.notes += NOTES


def say(what: str) -> None:
    print(f"measuring: {what} ...", file=sys.stderr, flush=True)


# -- time in our own code ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Thread-clock seconds of our code in steps where it does not act and where it does, and of whole steps."""

    reference: References
    groups: bool
    units: int
    idle: Array
    acting: Array
    steps: Array

    @property
    def own(self) -> Array:
        """The dearer of the two."""
        return max(self.idle, self.acting, key=lambda seconds: float(seconds.mean()))

    @property
    def share(self) -> float:
        """Of a step."""
        return float(self.own.mean() / np.median(self.steps))


class Workload:
    """Steps of a Qwen3 of many layers: forward, backward, norms, global clip, AdamW."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, head_dim=32,
                num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, pad_token_id=None,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._map, self._parameters = ModelMap(self.model), list(self.model.parameters())

    def step(self, clip: LayerClip | None, sick: bool = False) -> tuple[float, LayerScales | None]:
        """One training step. The norms are taken in any case.

        Returns:
            Thread-clock seconds of LayerClip's own code, and what it did.
        """
        ids = torch.randint(512, (8, 64))
        self._optimizer.zero_grad()
        self.model(input_ids=ids, labels=ids).loss.backward()
        if sick:
            for p in self.model.model.layers[1].parameters():
                p.grad.mul_(100)
        norms = take_norms(self._parameters)
        assert norms is not None
        grouping = self._map.grouping(norms.parameters)
        series = grouping.norms(norms.per_parameter.double().numpy(), float(norms.total))
        since, scales = time.thread_time(), None
        if clip is not None:
            scales = clip.judge(grouping, series)
            if scales.acts:
                apply(scales, norms.parameters)
        own = time.thread_time() - since
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        return own, scales

    def warm(self, clip: LayerClip) -> LayerClip:
        """With its window full, as it is for most of a run: a step's norms again and again, give or take a tenth."""
        self.step(None)
        norms = take_norms(self._parameters)
        assert norms is not None
        grouping, usual = self._map.grouping(norms.parameters), norms.per_parameter.double().numpy()
        draw = np.random.default_rng(0)
        for _ in range(WINDOW):
            clip.judge(grouping, grouping.norms(usual * np.exp(0.1 * draw.normal(size=len(usual))), 0.0))
        return clip


def own_time(size: Size, reference: References, groups: bool) -> Cost:
    """Every third step has a sick layer."""
    workload = Workload(size.layers)
    clip = workload.warm(LayerClip(workload.model, reference=reference, groups=groups))
    idle, acting, steps = [], [], []
    for i in range(3 * size.steps):
        since = time.thread_time()
        own, scales = workload.step(clip, sick=i % 3 == 2)
        assert scales is not None
        steps.append(time.thread_time() - since - own)
        (acting if scales.clipped else idle).append(own)
    return Cost(reference, groups, len(scales.units), np.array(idle), np.array(acting), np.array(steps))


def of_cost(cost: Cost) -> Finding:
    low, high = bootstrap(cost.own, np.mean)
    step = float(np.median(cost.steps))
    values = {
        "share": cost.share, "interval": [low / step, high / step], "units": cost.units, "step_seconds": step,
        "idle_seconds": cost.idle.tolist(), "acting_seconds": cost.acting.tolist(),
    }  # fmt: skip
    measured = (
        f"{cost.share:.3%} [{low / step:.3%}, {high / step:.3%}] of a step of {step:.2f} s ({cost.reference}, "
        f"{cost.units} {'module groups' if cost.groups else 'layers'}: the dearest of four)"
    )
    return Finding(
        "LayerClip's own code over a step, thread clock", "at most 0.5%", measured, cost.share <= 0.005, values
    )


def cost_table(costs: Sequence[Cost]) -> str:
    rows = []
    for cost in costs:
        cells = [f"{x.mean() * 1e6:.0f} ({len(x)} steps)" if len(x) else "none" for x in (cost.idle, cost.acting)]
        units = f"{cost.units} {'module groups' if cost.groups else 'layers'}"
        rows.append((cost.reference, units, *cells, f"{np.median(cost.steps):.3f}", f"{cost.share:.3%}"))
    return table(("reference", "units", "leaves all, µs", "clips, µs", "step, s", "dearer over step"), rows)


def paired(size: Size) -> Array:
    """(pairs,) CPU time of a step with LayerClip (a layer is clipped in every other pair) over one without."""
    workload, draw = Workload(size.layers), np.random.default_rng(0)
    clip = workload.warm(LayerClip(workload.model))
    ratios = []
    for pair in range(size.pairs + DISCARDED):
        took = {}
        for with_ in draw.permutation([True, False]).tolist():
            since = time.thread_time()
            workload.step(clip if with_ else None, sick=pair % 2 == 1)
            took[with_] = time.thread_time() - since
        ratios.append(took[True] / took[False])
    return np.array(ratios[DISCARDED:])


def of_pairs(ratios: Array, expected: float) -> Finding:
    median = float(np.median(ratios))
    low, high = bootstrap(ratios, np.median)
    measured = f"{median:.4f} [{low:.4f}, {high:.4f}], {len(ratios)} pairs"
    values = {"ratio": median, "interval": [low, high], "expected": expected, "ratios": ratios.tolist()}
    what = "step with / without LayerClip, interleaved, thread clock"
    return Finding(what, f"interval not above {expected:.4f}", measured, low <= expected, values)


# -- honest steps -----------------------------------------------------------------------------------------------------


def runs() -> Iterator[tuple[str, Grouping, Array]]:
    """(name, grouping, (steps, columns) norms) of each honest run in tests/data."""
    for path in sorted(DATA.glob("honest_layers_*.csv.gz")):
        grouping, rows = read(path)
        yield path.name, grouping, np.array([[row[name] for name in columns(rows)] for row in rows])
    for path in sorted(DATA.glob("honest_grpo_*.csv.gz")):
        with gzip.open(path, "rt") as file:
            found = list(csv.DictReader(file))
        names = [name for name in found[0] if name.startswith("norm_")]
        norms = np.array([[float(row[name]) for name in names] for row in found])
        yield path.name, Grouping.of([Place(name, "all of it") for name in names]), norms


def judged(grouping: Grouping, norms: Array, reference: References, groups: bool) -> tuple[int, int]:
    """Steps of a run on which LayerClip would clip; and on which it would switch itself on, where a spike of a gradient
    norm by the rule table is wanted too."""
    clip, spikes = LayerClip(nn.Linear(1, 1), reference=reference, groups=groups), Spikes()
    clipped = enabled = 0
    for number, row in enumerate(norms):
        step = Step(grouping, grouping.norms(row, float(np.linalg.norm(row))))
        beyond = bool(clip.judge(grouping, step.series).clipped)
        spiked = bool(spikes(number, step))
        clipped += beyond
        enabled += beyond and spiked
    return clipped, enabled


def of_honest(reference: References) -> list[Finding]:
    steps = {"layers": 0, "module groups": 0}
    clipped, enabled = dict(steps), dict(steps)
    for name, grouping, norms in runs():
        for unit in ("layers", "module groups") if name.startswith("honest_layers") else ("layers",):
            got = judged(grouping, norms, reference, unit != "layers")
            steps[unit] += len(norms)
            clipped[unit] += got[0]
            enabled[unit] += got[1]
    found = []
    for unit, whole in steps.items():
        for what, counted in (("switched on", enabled), ("clipped, were it always on", clipped)):
            values = {"steps": whole, "count": counted[unit]}
            measured, passed = f"{counted[unit]} of {whole:,}", counted[unit] == 0
            found.append(Finding(f"{reference} by {unit}: honest steps {what}", "none", measured, passed, values))
    return found


NOTES = [
    "Own code: `judge` and, where a layer is clipped, the scaling of its gradients, by the thread's clock, over the "
    "median step by the same clock. The step: a random Qwen3 of 32 layers, hidden size 128, 8 sequences of 64 tokens; "
    "forward, backward, norms, global clip, AdamW; one thread. In every third step a layer's gradient is multiplied by "
    "100. Taking the norms is not counted: they are measured with or without LayerClip. Its time depends on the number "
    "of layers alone, a larger model's step is longer.",
    "With / without: the same steps in pairs whose order is drawn, every other pair with a sick layer.",
    "Kind B: every incident of the bank whose fault is a collapsed embedding or a cancelled residual stream, after 24 "
    "honest steps of the same model on other data; judged by the rule table, localised, and handed to the controls' "
    "policy at its defaults (LayerClip on auto). max_norm is the largest |G| of the honest steps. Update kept: what is "
    "left of the median healthy layer's gradient, over what the same global clip would leave it if there were no sick "
    "layer.",
    "Honest steps: the runs of real GRPO in tests/data; `python -m benchmarks.honest` makes those with module groups. "
    "LayerClip switches itself on at a spike where a layer is beyond its threshold too.",
]


if __name__ == "__main__":
    main()
