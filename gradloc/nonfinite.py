"""Gradients that are not finite: which tokens, which tensor, which layer first.

First the tokens whose own numbers are not finite, which costs nothing. Where all numbers are finite, the backward made
the NaN, and bisection on it finds the token. The layer is the first whose output is not finite in a forward, or else
the one that the backward reached first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seismograd.gradloc.attribution import Step
from seismograd.gradloc.bisection import Bisection, bisect
from seismograd.gradloc.replay import Replay
from seismograd.gradloc.tokens import Ints, Tokens
from seismograd.telemetry.incidents import Attempt


@dataclass(frozen=True)
class NonFinite:
    """What is not finite, on this rank.

    Args:
        tokens: indices in `Tokens` of those that brought it in.
        where: sentences: which tensor, which layer.
        attempts: replays that were spent.
    """

    tokens: Ints
    where: tuple[str, ...]
    attempts: tuple[Attempt, ...] = ()


def explain(step: Step, replay: Replay | None) -> NonFinite:
    """Where the NaN or infinity came in. A collective where there is a replay."""
    tokens, where = _own_numbers(step.tokens)
    sentences = [where] if where else []
    attempts: list[Attempt] = []
    if replay is not None:
        bad = [name for name, p in zip(replay.names, replay.parameters, strict=True) if not bool(p.isfinite().all())]
        if bad:
            sentences.append(f"the weights themselves are not finite, first in {bad[0]} ({len(bad)} of all parameters)")
        anywhere = sum(step.ranks.sum([float(len(tokens))]))
        if not anywhere and not bad:
            shares, attempts = bisect(step, replay, Bisection(budget=64))
            if shares is not None:
                tokens = np.flatnonzero(~np.isfinite(shares.tokens))
                if len(tokens):
                    sentences.append("all of the token's numbers are finite: its backward made the NaN")
        first = replay.first_nonfinite(_micro_batch(step, tokens))
        if first is not None:
            sentences.append(f"first not finite in the forward: the output of {first}")
        else:
            layers = [n for n, g in zip(replay.names, replay.gradient, strict=True) if not bool(g.isfinite().all())]
            if layers:
                sentences.append(
                    f"{len(layers)} parameters have gradients that are not finite, nearest to the loss {layers[-1]}"
                )
    return NonFinite(tokens, tuple(sentences), tuple(attempts))


def _own_numbers(tokens: Tokens) -> tuple[Ints, str | None]:
    """The tokens whose numbers are not finite, and which number it is, in the order of cause and effect."""
    named = (
        ("rollout_logp", tokens.rollout, tokens.trained & np.isfinite(tokens.logp)),
        ("advantage", tokens.advantage, tokens.trained),
        ("logp", tokens.logp, np.ones(len(tokens), bool)),
        ("loss_weight", tokens.weight, np.ones(len(tokens), bool)),
    )
    for name, values, counted in named:
        # A column that a step does not have at all is NaN everywhere, and no finding.
        bad = counted & ~np.isfinite(values)
        if bad.any() and (name in ("logp", "loss_weight") or np.isfinite(values).any()):
            masked = int((bad & ~tokens.trained).sum())
            aside = f", {masked} of them masked out (0 * inf)" if masked else ""
            return np.flatnonzero(bad), f"{name} is not finite at {int(bad.sum())} tokens{aside}"
    return np.empty(0, dtype=np.int64), None


def _micro_batch(step: Step, tokens: Ints) -> int | None:
    """The one to look at, or None where this rank has none."""
    if len(tokens):
        return int(step.tokens.batch[tokens[0]])
    return 0 if step.batches else None
