"""Experiment 1: phantom clipping on a CPU, from the published recipe. Results: docs/experiments/phantom_clipping.md

    python examples/phantom_clipping.py              # the small model, all runs, three seeds: half an hour
    python examples/phantom_clipping.py --smollm2    # SmolLM2-135M-Instruct: A, B and G, one seed: 25 minutes
    python examples/phantom_clipping.py --quick      # a smoke test, 30 s, written to RUNS

The times are those of one core that others share. Needs the extra "experiments" (pip install -e '.[experiments]').

The reward is minus the number of completion tokens, so the best policy stops at once. Rollouts come from a BF16 engine
that is up to three steps behind; the trainer computes in FP32 or not, clips its ratio or not, and seismograd watches. A
run that RUNS holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from phantom import variants as v
from phantom.found import Found, read
from phantom.loop import Setting, train
from phantom.policy import Policy, small, smollm2
from phantom.report import write

PUBLISHED_EPS = 0.2
PUBLISHED_SPREAD = 0.149
"""Standard deviation of beta in the study; the clip's width there is 1.34 times it."""

DOCS = Path(__file__).parent.parent / "docs" / "experiments"


@dataclass(frozen=True)
class Plan:
    """What is run.

    Args:
        setting: sizes.
        seeds: of the runs at the width that keeps the published ratio of width to spread.
        scaled: the variants at that width.
        published: those at the published width of 0.2 too.
        width: given, in place of the one that keeps the quotient: ten steps of few tokens are to show something.
    """

    setting: Setting
    seeds: tuple[int, ...]
    scaled: tuple[v.Variant, ...]
    published: tuple[v.Variant, ...]
    width: float | None = None

    def runs(self, eps: float) -> Iterator[tuple[v.Variant, float, int]]:
        """(variant, width, seed)."""
        for seed in self.seeds:
            for variant in self.scaled:
                yield variant, eps, seed
        for variant in self.published:
            for seed in self.seeds:
                yield variant, PUBLISHED_EPS, seed


SMALL = Plan(
    Setting(steps=40, prompts=4, group=8, limit=12, rate=1e-5),
    (1, 2, 3),
    (v.B, v.A, v.G, v.F, v.WIDE_EPS, v.DETACH, v.FP16),
    (v.B,),
)
SMOLLM2 = Plan(Setting(steps=8, prompts=1, group=6, limit=8, rate=3e-7), (1,), (v.B, v.G, v.A), ())
QUICK = Plan(Setting(steps=10, prompts=2, group=6, limit=10, rate=1e-5), (1,), (v.B, v.A, v.G), (), width=0.01)


def before(policy: Policy, setting: Setting, runs: Path) -> Found:
    """What run B would meet at the published width: one watched step at a learning rate of 0."""
    one = Setting(1, setting.prompts, setting.group, setting.limit, 0.0)
    return read(_once(policy, v.B, PUBLISHED_EPS, 0, one, runs, "before"), v.B, PUBLISHED_EPS, 0)


def run_all(policy: Policy, plan: Plan, start: Found, runs: Path) -> list[Found]:
    """Every run of the plan, and what its store says."""
    eps = plan.width or round(PUBLISHED_EPS / PUBLISHED_SPREAD * start.first("beta_std"), 3)
    print(f"{policy.name}: {policy.trained}; clip widths {eps} and {PUBLISHED_EPS}", flush=True)
    found = []
    for variant, width, seed in plan.runs(eps):
        began = time.perf_counter()
        folder = _once(policy, variant, width, seed, plan.setting, runs, f"{variant.key}-{width}-{seed}")
        found.append(read(folder, variant, width, seed))
        print(f"{time.perf_counter() - began:5.0f} s  {found[-1].line()}", flush=True)
    return found


def _once(policy: Policy, variant: v.Variant, eps: float, seed: int, setting: Setting, runs: Path, name: str) -> Path:
    """The run's folder; trained if it is not there yet, complete and with the same settings."""
    asked = json.dumps({"eps": eps, "seed": seed, **asdict(setting)})
    folder, settings = runs / name, runs / name / "setting.json"
    if settings.is_file() and settings.read_text() == asked:
        return folder
    if folder.is_dir():
        shutil.rmtree(folder)
    done = train(policy, variant, eps, seed, setting, runs, name)
    (done / "setting.json").write_text(asked)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--smollm2", action="store_true")
    which.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs/phantom_clipping"))
    parser.add_argument("--out", type=Path, help="docs/experiments where not given; RUNS with --quick")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.smollm2:
        part, policy, plan = "smollm2", smollm2(), SMOLLM2
    elif args.quick:
        part, policy, plan = "quick", small(0, steps=80, ends=0.3, sentence=10), QUICK
    else:
        part, policy, plan = "small", small(0), SMALL
    runs = args.runs / part
    start = before(policy, plan.setting, runs)
    found = run_all(policy, plan, start, runs)
    out = args.out or (args.runs if args.quick else DOCS)
    print(f"written: {write(out, part, policy, plan.setting, start, found)}")


if __name__ == "__main__":
    main()
