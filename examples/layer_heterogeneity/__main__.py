"""Writes docs/experiments/layer_heterogeneity.md, .json and its pictures.

python -m examples.layer_heterogeneity
python -m examples.layer_heterogeneity --quick    # under half a minute, to see that it runs

Needs neither GPU nor network: 90 runs of a small transformer, some 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from examples.layer_heterogeneity.arms import ARMS, EARLY, Arm
from examples.layer_heterogeneity.page import write
from examples.layer_heterogeneity.training import EVERY, Setting, run

SETTINGS = (
    (Setting("SGD", 0.1), ARMS),
    (Setting("AdamW", 2e-3), ARMS),
    (Setting("SGD", 0.1, after=0), tuple(arm for arm in ARMS if arm.name in EARLY)),
)
SEEDS = 5
QUICK_STEPS = 60


def main(argv: Sequence[str] | None = None) -> None:
    """Train all arms, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps and seeds: the figures mean little")
    parser.add_argument("--out", type=Path, default=Path("docs/experiments"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings = [(replace(s, steps=QUICK_STEPS), arms) for s, arms in SETTINGS[:1]] if args.quick else SETTINGS
    seeds = 2 if args.quick else SEEDS
    args.out.mkdir(parents=True, exist_ok=True)
    results = {
        "command": "python -m examples.layer_heterogeneity" + (" --quick" if args.quick else ""),
        "torch": torch.__version__.partition("+")[0],
        "every": EVERY,
        "experiments": [train(setting, arms, seeds) for setting, arms in settings],
    }
    (args.out / "layer_heterogeneity.json").write_text(json.dumps(results) + "\n")
    print(write(results, args.out))


def train(setting: Setting, arms: Sequence[Arm], seeds: int) -> dict[str, Any]:
    """All arms of a setting: {setting, arms: {name: [one a seed]}}."""
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for seed in range(seeds):
        for arm in arms:
            print(f"{setting.optimizer}, seed {seed}: {arm.name} ...", file=sys.stderr, flush=True)
            clip = partial(arm.clip, max_norm=setting.max_norm)
            found[arm.name].append(run(setting, seed, clip, arm.collapsed).summary(setting.max_norm))
    return {"setting": asdict(setting), "arms": found}


if __name__ == "__main__":
    main()
