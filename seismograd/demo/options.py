"""The options of `seismograd demo`, known before anything heavy is imported."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

PORT = 9464


@dataclass(frozen=True)
class Scale:
    """The size of a demo.

    Args:
        steps: optimizer steps.
        batch: completions a step.
        group: completions a problem.
        completion: most tokens of a completion.
        rate: learning rate of AdamW.
        layer: before which a residual stream is cancelled out.
        left: what is left of it.
    """

    steps: int
    batch: int
    group: int
    completion: int
    rate: float
    layer: int
    left: float


REAL = Scale(steps=24, batch=8, group=8, completion=24, rate=1e-5, layer=6, left=1e-2)
TINY = Scale(steps=40, batch=8, group=4, completion=16, rate=1e-4, layer=2, left=1e-2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them on the command's parser."""
    add = parser.add_argument
    add("--tiny", action="store_true", help="a random model of 1M parameters instead of SmolLM2-135M-Instruct")
    add("--steps", type=_positive, help=f"optimizer steps (default {REAL.steps}, with --tiny {TINY.steps})")
    add("--port", type=int, default=PORT, help=f"port of /metrics on 127.0.0.1, 0 for a free one (default {PORT})")
    add("--runs", default="runs", help="folder in which the run's folder is made (default ./runs)")
    add("--seed", type=int, default=0, help="of the problems, the samples and the tiny model (default 0)")
    add("--no-serve", dest="serve", action="store_false", help="without the live page")
    add("--hold", type=float, default=0.0, metavar="SECONDS", help="keep /metrics up that long after the last step")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs a number of at least 1, got {text}")
    return number
