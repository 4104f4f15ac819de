"""The same shares by forward-mode automatic differentiation: exact, without a distance to choose, at a higher price.

For models whose operations all have a forward derivative (fused attention has none, so the plain one runs).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor
from torch.autograd import forward_ad

from seismograd.gradloc.attribution import MOST, ForeignGradient, Shares, Step, replayed_part, summed
from seismograd.gradloc.replay import LOGP, Replay
from seismograd.gradloc.sameness import another_forward, most_off, nats_off
from seismograd.telemetry.incidents import Attempt


def differentiate(step: Step, replay: Replay) -> tuple[Shares | None, list[Attempt]]:
    """The shares by one dual forward, and what came of it: None where the model refuses or the sum is not 1."""
    if replay.joint:
        return None, [Attempt("jvp", "the parameters are sharded, and their gathering has no forward derivative")]
    found, reason = step.everywhere(lambda: _derivative(step, replay))
    if reason is not None:
        return None, [Attempt("jvp", reason, forwards=1.0)]
    shares, mismatch = found
    shares, mismatch = summed(step, shares), step.ranks.max(mismatch)
    if mismatch > most_off(replay):
        return None, [Attempt("jvp", another_forward(mismatch), shares.completeness, forwards=1.0)]
    attempts = [Attempt("jvp", shares.outcome, shares.completeness, forwards=1.0)]
    if not shares.believable:
        replayed, attempt = replayed_part(step, replay)
        attempts.append(attempt)
        if replayed is not None and replayed > MOST:
            raise ForeignGradient(replayed, attempts)
        shares = replace(shares, replayed=replayed or 1.0)
        if shares.believable:
            attempts.append(Attempt("jvp", shares.outcome, shares.completeness))
    return (shares if shares.believable else None), attempts


def _derivative(step: Step, replay: Replay) -> tuple[Shares, float]:
    """This rank's shares, and how far the forward is from the recorded one, nats."""
    c, logp = [], []
    parts = dict.fromkeys(step.others, 0.0)
    with replay.dual():
        for i, batch in enumerate(step.batches):
            outputs = replay.forward(i)
            c.append(step.tokens.pick(i, _tangent(outputs[LOGP])))
            logp.append(step.tokens.pick(i, forward_ad.unpack_dual(outputs[LOGP]).primal))  # type: ignore[no-untyped-call]
            for name, weight in batch.others.items():
                parts[name] += float((weight.double().cpu() * _tangent(outputs[name]).double().cpu()).sum())
    unit = step.scale / step.norm**2  # the dual carries the derivative along G, and shares are of |G|
    derivative = np.concatenate(c) if c else np.empty(0)
    w = step.tokens.weight
    mismatch = nats_off(np.concatenate(logp) if logp else np.empty(0), step.tokens.logp, w)
    shares = Shares(np.where(w == 0, 0.0, w * derivative * unit), {k: x * unit for k, x in parts.items()})
    return shares, mismatch


def _tangent(output: Tensor) -> Tensor:
    tangent: Tensor | None = forward_ad.unpack_dual(output).tangent  # type: ignore[no-untyped-call]
    if tangent is None:
        raise RuntimeError("the model's forward has no forward derivative")
    return tangent
