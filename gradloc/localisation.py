"""`localize`: from a step whose gradient spiked to the token, its kind and the cure. Joins the methods of this room."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Literal

import numpy as np
import torch
from torch import nn

from seismograd.gradloc.attribution import TOLERANCE, ForeignGradient, Shares, Step, attribute
from seismograd.gradloc.bisection import Bisection, bisect
from seismograd.gradloc.findings import Findings, find, sequence_shares
from seismograd.gradloc.jvp import differentiate
from seismograd.gradloc.nonfinite import NonFinite, explain
from seismograd.gradloc.replay import ModelReplay, Replay
from seismograd.gradloc.sharded import ShardedReplay, is_sharded
from seismograd.gradloc.tokens import Floats, Ints, Tokens
from seismograd.gradloc.vectors import root
from seismograd.gradloc.verdict import Thresholds, Verdict, judge, not_finite
from seismograd.gradloc.verification import Verification, layer_norms, norm_without, verify
from seismograd.gradloc.whatif import controls_on
from seismograd.telemetry.faults import reason
from seismograd.telemetry.incidents import Attempt, Culprit, Incident
from seismograd.telemetry.ranks import Alone, Ranks, everywhere
from seismograd.telemetry.records import TokenBatch

Method = Literal["auto", "attribution", "jvp", "bisect"]
METHODS: tuple[Method, ...] = ("auto", "attribution", "jvp", "bisect")


def localize(
    batches: Sequence[TokenBatch],
    replay: Replay | nn.Module | None,
    *,
    method: Method = "auto",
    grad_scale: float = 1.0,
    top_k: int = 8,
    verified: int = 3,
    thresholds: Thresholds | None = None,
    bisection: Bisection | None = None,
    ranks: Ranks | None = None,
    told: bool = True,
) -> Incident:
    """Explain a step's gradient, which stands in .grad, not clipped. Leaves everything as it was, bit for bit.

    With several processes all call it, with their own micro-batches, and all get the same incident.

    Args:
        batches: the step's micro-batches, each with its loss_weight.
        replay: the model, where the batches have their own replays; or a `Replay`; or None where nothing can be run
            again, so that tokens are ranked by what is known without (loss_weight and ratios).
        method: "auto" tries attribution, then jvp, then bisect, until one is believable; or one of these.
        grad_scale: G = grad_scale * sum of loss_weight * grad logp: 1 / world size where gradients are averaged over
            it.
        top_k: tokens that are looked at, and at most named.
        verified: of these, how many get a backward of their own.
        thresholds: of the verdict.
        bisection: how that method searches.
        ranks: the processes that share the step; this one alone where None.
        told: whether notes and attempts may quote what an exception says, which may be text of the data; where not,
            they name its type and where it was raised.

    Returns:
        The incident; its `notes` say what could not be done and why. Never raises for what a step or a model holds.

    Raises:
        ValueError: a setting that cannot be, or a micro-batch whose columns do not fit each other.
    """
    if method not in METHODS:
        raise ValueError(f"localize(method={method!r}): give one of {', '.join(METHODS)}")
    _check(replay, top_k, verified, grad_scale)
    batches = [_flagged(batch) for batch in batches]
    began = time.perf_counter()
    search = _Localisation(
        batches, method, grad_scale, top_k, verified, thresholds or Thresholds(), bisection, ranks or Alone(), told
    )
    incident = search.run(replay)
    return replace(incident, seconds=time.perf_counter() - began)


def _check(replay: object, top_k: object, verified: object, grad_scale: object) -> None:
    """Raises ValueError where a setting cannot be; its message names the setting and the fix."""
    for name, value, least in (("top_k", top_k, 1), ("verified", verified, 0)):
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise ValueError(f"localize({name}={value!r}): give a whole number of at least {least}")
    if isinstance(grad_scale, bool) or not isinstance(grad_scale, Real) or not 0 < float(grad_scale) < math.inf:
        raise ValueError(f"localize(grad_scale={grad_scale!r}): give a finite number above 0")
    if not (replay is None or isinstance(replay, nn.Module) or hasattr(replay, "norms")):
        raise ValueError(
            f"localize(replay={replay!r}): give the model, a Replay, or None where nothing can be run again"
        )


def _flagged(batch: TokenBatch) -> TokenBatch:
    """With a mask of flags, whatever numbers it came in: as an index, a mask of floats fails."""
    return batch if batch.mask.dtype == torch.bool else replace(batch, mask=batch.mask != 0)


@dataclass
class _Localisation:
    """One call of `localize`."""

    batches: Sequence[TokenBatch]
    method: Method
    scale: float
    top_k: int
    verified: int
    limits: Thresholds
    bisection: Bisection | None
    ranks: Ranks
    told: bool

    def run(self, replay: Replay | nn.Module | None) -> Incident:
        notes: list[str] = []
        made, reason = everywhere(self.ranks, lambda: self._replay(replay), self.told)
        if reason is not None:
            notes.append(f"no replay: {reason}. Tokens are ranked by what is known without one")
        tokens, reason = everywhere(self.ranks, lambda: Tokens.of(self.batches), self.told)
        if reason is not None:
            raise ValueError(f"localize(): a micro-batch's columns do not fit each other ({reason})")  # on all ranks
        if made is None:
            return self._without_replay(tokens, notes)
        norm = root(made.norms(made.gradient))
        step = Step(self.batches, tokens, norm, self.scale, self.ranks, self.told)
        with made.kept():
            if not math.isfinite(norm):
                return self._not_finite(step, made, notes)
            if norm == 0:
                notes.append("the gradient is exactly zero: there is nothing to localise (zeroed, or all advantages 0)")
                return self._judged(step, np.zeros(len(tokens)), None, [], "ratios", notes, made)
            return self._finite(step, made, notes)

    def _replay(self, replay: Replay | nn.Module | None) -> Replay | None:
        if not isinstance(replay, nn.Module):
            return replay
        if is_sharded(replay):
            return ShardedReplay(replay, self.batches, self.ranks)
        return ModelReplay(replay, self.batches)

    def _finite(self, step: Step, replay: Replay, notes: list[str]) -> Incident:
        largest = step.ranks.max(float(np.abs(step.tokens.weight).max(initial=0.0)))
        if largest == 0:
            notes.append("no token has a finite weight in the loss but 0: nothing of the gradient passes through logp")
            return self._judged(step, np.zeros(len(step.tokens)), None, [], "ratios", notes, replay)
        if not math.isfinite(largest):
            notes.append("the gradient is finite, and weights in the loss are not: they are not those that made it")
            return self._not_finite(step, replay, notes)
        try:
            shares, attempts = self._shares(step, replay)
        except ForeignGradient as e:
            shares, attempts = None, e.attempts
            notes.append(str(e))
        if shares is None:
            notes.append(
                f"no method gave shares that can be believed ({attempts[0].outcome}). Tokens are ranked by what is "
                "known without one"
            )
            return self._judged(step, _by_weight(step.tokens), None, attempts, "ratios", notes, replay, estimated=True)
        candidates = self._candidates(step, shares.tokens)
        # Also those below what is named alone: the worst of a sequence that is.
        worth = candidates[np.abs(shares.tokens[candidates]) >= self.limits.share / 2]
        if not replay.precise and not len(worth):
            worth = candidates[:1]  # a sum may be right by luck where rounding hides much: hold one token against it
        first = self._first(step, shares.tokens, worth)
        verification, reason = step.everywhere(lambda: verify(step, replay, first))
        if reason is not None:
            notes.append(f"not verified: {reason}")
        elif verification.replay_error > 1e-3 and replay.precise:
            notes.append(
                f"the replayed log-probabilities are up to {verification.replay_error:.2g} nats off the recorded ones: "
                "norms and influences are as good as that"
            )
        if verification is not None:
            wrong = [abs(v.share - shares.tokens[v.token]) for v in verification.tokens]
            off = step.ranks.max(max(wrong, default=0.0))
            if off > TOLERANCE and _believed(attempts) != "bisect":
                notes.append(f"a verified token's share is {off:.2f} off its exact one: shares are as good as that")
            attempts.append(Attempt("verification", "believed", None, verification.forwards, verification.backwards))
        return self._judged(step, shares.tokens, verification, attempts, _believed(attempts), notes, replay, shares)

    def _shares(self, step: Step, replay: Replay) -> tuple[Shares | None, list[Attempt]]:
        methods: dict[str, Callable[[], tuple[Shares | None, list[Attempt]]]] = {
            "attribution": lambda: attribute(step, replay),
            "jvp": lambda: differentiate(step, replay),
            "bisect": lambda: bisect(step, replay, self.bisection),
        }
        attempts: list[Attempt] = []
        for name in methods if self.method == "auto" else (self.method,):
            shares, tried = methods[name]()
            attempts += tried
            if shares is not None:
                return shares, attempts
        return None, attempts

    def _not_finite(self, step: Step, replay: Replay, notes: list[str]) -> Incident:
        found, reason = _explained(step, replay)
        if reason is not None:
            notes.append(f"no replay: {reason}. Only the tokens' own numbers were looked at")
        shares = np.zeros(len(step.tokens))
        chosen = found.tokens[: self.top_k]
        own = find(step, shares, chosen, {}, self.limits.silenced_log_ratio)
        everybody = step.ranks.gather((own, found.where))
        culprits = [c for findings, _ in everybody for c in findings.candidates]
        where = list(dict.fromkeys(sentence for _, sentences in everybody for sentence in sentences))
        verdict = not_finite(culprits[: self.top_k], where)
        return self._incident(step, verdict, shares, "nonfinite", list(found.attempts), notes, replay)

    def _without_replay(self, tokens: Tokens, notes: list[str]) -> Incident:
        step = Step(self.batches, tokens, math.nan, self.scale, self.ranks, self.told)
        if not notes:
            notes.append("no replay was given. Tokens are ranked by what is known without one: loss_weight and ratios")
        bad = bool(sum(self.ranks.sum([float((~np.isfinite(tokens.weight)).sum())])))
        if bad:
            found = explain(step, None)
            own = find(step, np.zeros(len(tokens)), found.tokens[: self.top_k], {}, self.limits.silenced_log_ratio)
            everybody = self.ranks.gather((own, found.where))
            culprits = [c for findings, _ in everybody for c in findings.candidates][: self.top_k]
            where = [sentence for _, sentences in everybody for sentence in sentences]
            return self._incident(step, not_finite(culprits, where), np.zeros(len(tokens)), "ratios", [], notes, None)
        return self._judged(step, _by_weight(tokens), None, [], "ratios", notes, None, estimated=True)

    def _judged(
        self,
        step: Step,
        shares: Floats,
        verification: Verification | None,
        attempts: list[Attempt],
        method: str,
        notes: list[str],
        replay: Replay | None,
        believed: Shares | None = None,
        estimated: bool = False,
    ) -> Incident:
        known = {} if verification is None else {v.token: v for v in verification.tokens}
        candidates = self._candidates(step, shares)
        bound = self.limits.silenced_log_ratio
        own, reason = step.everywhere(lambda: find(step, shares, candidates, known, bound))
        if reason is not None:
            raise RuntimeError(reason)  # on all ranks
        findings: list[Findings] = step.ranks.gather(own)
        verdict = judge(findings, self.limits)
        verdict = replace(verdict, culprits=verdict.culprits[: self.top_k])
        incident = self._incident(step, verdict, shares, method, attempts, notes, replay)
        if estimated:
            incident = _without_shares(incident)
        if believed is not None and believed.parts:
            incident = replace(incident, completeness=believed.completeness, parts=believed.named)
        if verification is not None and replay is not None:
            error = step.ranks.max(verification.replay_error)
            incident = replace(incident, replay_error=error, without_culprits=norm_without(step, replay, verification))
        return incident

    def _incident(
        self,
        step: Step,
        verdict: Verdict,
        shares: Floats,
        method: str,
        attempts: list[Attempt],
        notes: list[str],
        replay: Replay | None,
    ) -> Incident:
        mine = [c for c in verdict.culprits if c.rank == step.ranks.rank]
        firsts: dict[tuple[int, int, int], Culprit] = {}
        for c in mine:
            firsts.setdefault((c.micro_batch, c.row, c.sequence), c)
        sequences, reason = step.everywhere(
            lambda: [sequence_shares(step, shares, c) for c in list(firsts.values())[:4]]
        )
        if reason is not None:
            sequences, notes = [], [*notes, f"the sequences' shares are missing: {reason}"]
        everybody = [s for found in step.ranks.gather(sequences) for s in found]
        return Incident(
            step=step.batches[0].step if step.batches else -1,
            verdict=verdict.kind,
            evidence=verdict.evidence,
            advice=verdict.advice,
            method=method,
            attempts=tuple(attempts),
            grad_norm=step.norm,
            culprits=verdict.culprits,
            sequences=tuple(everybody),
            norms={} if replay is None else layer_norms(replay, replay.norms(replay.gradient)),
            # Where no ratio is in the weights, a control of ratios would have done nothing.
            controls=controls_on(verdict.culprits, step.norm) if verdict.kind in ("A.1", "A.2") else {},
            notes=tuple(notes),
            environment=_environment(step, replay),
        )

    def _candidates(self, step: Step, shares: Floats) -> Ints:
        """Indices of this rank's tokens among the `top_k` of all ranks, worst first."""
        order = np.argsort(-np.abs(np.nan_to_num(shares)), kind="stable")[: self.top_k]
        everybody = step.ranks.gather([float(abs(shares[t])) for t in order])
        least = sorted((x for found in everybody for x in found), reverse=True)[: self.top_k]
        return np.array([t for t in order if least and abs(shares[t]) >= least[-1] and shares[t] != 0], dtype=np.int64)

    def _first(self, step: Step, shares: Floats, worth: Ints) -> Ints:
        """Of this rank's, those among the first `verified` of all ranks."""
        everybody = step.ranks.gather([float(abs(shares[t])) for t in worth])
        least = sorted((x for found in everybody for x in found), reverse=True)[: self.verified]
        return np.array([t for t in worth if least and abs(shares[t]) >= least[-1]], dtype=np.int64)


def _explained(step: Step, replay: Replay) -> tuple[NonFinite, str | None]:
    """With the replay where that works on all ranks, without it elsewhere."""
    try:
        return explain(step, replay), None
    except Exception as e:
        return explain(step, None), reason(e, step.told)


def _by_weight(tokens: Tokens) -> Floats:
    """A stand-in for the shares where nothing can be replayed: |weight| of all, as if all tokens pulled alike."""
    weight = np.abs(np.nan_to_num(tokens.weight, posinf=0.0))
    total = weight.sum()
    return weight / total if total > 0 else weight


def _without_shares(incident: Incident) -> Incident:
    """Shares that stand in for unknown ones lead to a verdict, and are not told."""
    return replace(
        incident,
        evidence=tuple(sentence for sentence in incident.evidence if "of the gradient norm" not in sentence),
        culprits=tuple(replace(c, share=math.nan, pull=None) for c in incident.culprits),
        sequences=(),
    )


def _believed(attempts: Sequence[Attempt]) -> str:
    return next(a.method for a in reversed(attempts) if a.believed and a.method != "verification")


def _environment(step: Step, replay: Replay | None) -> dict[str, str]:
    found = {"torch": torch.__version__, "ranks": str(step.ranks.size)}
    if replay is not None:
        found["device"] = str(replay.parameters[0].device)
        found["dtype"] = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in replay.parameters}))
    return found
