"""The verdict: what kind of fault, on what evidence, and what to do.

Each kind explains the size of the guilty gradient by its own cause, so each test asks whether its cause is big enough:

    weight_t / usual weight = exp(log r_t) * |A_t| / usual |A| * normaliser

A ratio that is off but explains little of an outlying weight is no culprit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from seismograd.gradloc.findings import Findings, SequenceDrift, Typical, pooled
from seismograd.telemetry.incidents import Culprit


@dataclass(frozen=True)
class Thresholds:
    """When something counts as evidence. Defaults: benchmarks/gradloc.py on the incident bank.

    Args:
        share: of |G| that a token has to hold to be named: without it |G| falls by its share at most.
        sequence_share: of |G| that a sequence or a micro-batch has to hold to be named.
        token_log_ratio: |log r| of a token, nats; ln 2 is what TIS caps.
        sequence_log_ratio: |sum of log r| of a sequence, nats.
        silenced_log_ratio: |log r| at which a token without weight counts as silenced, nats.
        weight: |dL/dlogp| over the step's median.
        micro_batch_weight: median |dL/dlogp| of a micro-batch over that of the others.
        heterogeneity: of a token's gradient over the layers.
        pull: how far a token's log-probability moves along G, over the step's median.

    Raises:
        ValueError: a value that cannot be; the message names it and the fix.
    """

    share: float = 0.1
    sequence_share: float = 0.5
    token_log_ratio: float = math.log(2)
    sequence_log_ratio: float = 2.0
    silenced_log_ratio: float = 3.0
    weight: float = 10.0
    micro_batch_weight: float = 4.0
    heterogeneity: float = 5.0
    pull: float = 50.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and 0 < value < math.inf):
                raise ValueError(f"thresholds.{name}={value!r}: give a number above 0")

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Thresholds:
        """The defaults, with some of them changed by name.

        Raises:
            ValueError: as the class; also a name that is none of its.
        """
        for name in values:
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"thresholds.{name}: known thresholds are {', '.join(cls.__dataclass_fields__)}")
        return cls(**values)


@dataclass(frozen=True)
class Verdict:
    """A kind of `VERDICTS`, what led to it, the cure, and who is guilty, worst first."""

    kind: str
    evidence: tuple[str, ...]
    advice: str
    culprits: tuple[Culprit, ...] = ()


@dataclass(frozen=True)
class _Case:
    findings: Sequence[Findings]
    usual: Typical
    limits: Thresholds

    @property
    def candidates(self) -> list[Culprit]:
        return sorted((c for f in self.findings for c in f.candidates), key=lambda c: -abs(c.share))

    @property
    def sequences(self) -> list[SequenceDrift]:
        return sorted((s for f in self.findings for s in f.sequences), key=lambda s: -abs(s.share))

    def weight_factor(self, weight: float) -> float:
        """How outlying a weight is: over the step's median."""
        return abs(weight) / self.usual.weight if self.usual.weight > 0 else 1.0

    def advantage_factor(self, advantage: float | None) -> float:
        """How outlying an advantage is; 1 where it is not known."""
        if advantage is None or math.isnan(advantage) or not self.usual.advantage > 0:
            return 1.0
        return abs(advantage) / self.usual.advantage

    def shows(self, log_ratio: float, weight: float, advantage: float | None) -> bool:
        """Whether the ratio is what is outlying in the weight, on the log scale: it is in the loss, and little else."""
        factor, other = self.weight_factor(weight), self.advantage_factor(advantage)
        if not (factor > 0 and other > 0):
            return False
        excess = math.log(factor) - math.log(other)
        return excess >= 0.5 * log_ratio and log_ratio >= 0.5 * math.log(factor)


def judge(findings: Sequence[Findings], limits: Thresholds) -> Verdict:
    """The verdict on finite gradients, from the findings of all ranks."""
    case = _Case(findings, pooled(findings), limits)
    tests: tuple[Callable[[_Case], Verdict | None], ...] = (_token, _sequence, _micro_batch, _weight, _layer, _silenced)
    return next((found for test in tests if (found := test(case)) is not None), _diffuse(case))


def not_finite(culprits: Sequence[Culprit], where: Sequence[str]) -> Verdict:
    """The verdict on gradients that are not."""
    advice = "Stop this step from being applied, and mend what is named: a NaN in the weights stays there for good."
    if any("rollout_logp" in sentence for sentence in where):
        advice = "The rollout engine gave a log-probability that is not finite: mask such tokens before the loss."
    elif any("0 * inf" in sentence for sentence in where):
        advice = "Mask with torch.where before the exp, not by multiplying: 0 * inf is NaN."
    return Verdict(
        "N",
        tuple(where) or ("the gradient is not finite, and no token's own numbers say why",),
        advice,
        tuple(culprits),
    )


def _token(case: _Case) -> Verdict | None:
    bound = case.limits.token_log_ratio
    guilty = [
        c
        for c in case.candidates
        if c.share >= case.limits.share
        and c.log_ratio is not None
        and c.log_ratio > bound
        and case.shows(c.log_ratio, c.loss_weight, c.advantage)
    ]
    if not guilty:
        return None
    worst = guilty[0]
    assert worst.log_ratio is not None
    evidence = [
        f"log r = {worst.log_ratio:.2f} (ratio {_exp(worst.log_ratio)}), beyond the token bound of {bound:.2f}",
        f"its weight in the loss is {case.weight_factor(worst.loss_weight):.3g} times the step's median",
        f"it holds {worst.share:.0%} of the gradient norm",
    ]
    advice = "Cap or mask the token's ratio (TokenClip: TIS or IcePop), and check the rollout's log-probabilities."
    return Verdict("A.1", tuple(evidence), advice, tuple(guilty))


def _sequence(case: _Case) -> Verdict | None:
    bound = case.limits.sequence_log_ratio
    for s in case.sequences:
        drifted = s.log_ratio > bound and s.largest < max(case.limits.token_log_ratio, 0.5 * s.log_ratio)
        if drifted and s.share > case.limits.sequence_share and case.shows(s.log_ratio, s.weight, s.advantage):
            evidence = (
                f"the log-ratios of {_place(s)} add up to {s.log_ratio:.2f} (ratio {_exp(s.log_ratio)}) over "
                f"{s.tokens} tokens, the largest of which is {s.largest:.2f}",
                f"the sequence holds {s.share:.0%} of the gradient norm",
            )
            advice = (
                "Mask sequences by their ratio (SeqClip: MIS), and look at staleness and at the engine's precision."
            )
            return Verdict("A.2", evidence, advice, _of_sequence(case, s))
    return None


def _micro_batch(case: _Case) -> Verdict | None:
    weights = [w for w in case.usual.micro_batch if w > 0]
    if len(weights) < 2:
        return None
    largest = max(weights)
    others = sorted(weights)[:-1]
    usual = others[len(others) // 2]
    if largest < case.limits.micro_batch_weight * usual:
        return None
    for f in case.findings:
        for i, weight in enumerate(f.typical.micro_batch):
            share = f.micro_batch_shares[i]
            if weight == largest and share > case.limits.sequence_share:
                evidence = (
                    f"the median weight of micro-batch {i} on rank {f.rank} is {largest / usual:.3g} times the others'",
                    f"it holds {share:.0%} of the gradient norm",
                )
                advice = "Check the loss's normaliser: gradient accumulation, token counts over ranks, empty groups."
                mine = tuple(c for c in case.candidates if (c.rank, c.micro_batch) == (f.rank, i))
                return Verdict("W", evidence, advice, mine)
    return None


def _weight(case: _Case) -> Verdict | None:
    """Outlying weights that no ratio explains: sequences, which together hold the norm, or a token that does alone."""
    bound = case.limits.weight
    outliers = [s for s in case.sequences if _outlying(case, s.weight, s.advantage, s.tokens)]
    share = sum(s.share for s in outliers)
    if outliers and share > case.limits.sequence_share:
        worst = outliers[0]
        culprits = tuple(c for s in outliers for c in _of_sequence(case, s))
        evidence = [
            f"the weights of {_place(worst)} are {case.weight_factor(worst.weight):.3g} times the step's median, and "
            f"its ratios do not explain that (they add up to {worst.log_ratio:.2f})",
            f"{len(outliers)} such sequence{'s' * (len(outliers) > 1)}, with {share:.0%} of the gradient norm",
        ]
        if not math.isnan(worst.advantage):
            evidence.append(f"its |advantage| is {worst.advantage:.3g}, the step's median {case.usual.advantage:.3g}")
        return Verdict("W", tuple(evidence), "Check reward scaling and the advantage's normaliser.", culprits)
    guilty = tuple(
        c for c in case.candidates if case.weight_factor(c.loss_weight) > bound and c.share > case.limits.share
    )
    if not guilty or guilty[0].share < case.limits.sequence_share:
        return None
    tokens = (
        f"the token's weight in the loss is {case.weight_factor(guilty[0].loss_weight):.3g} times the step's median, "
        "and its ratio does not explain that",
        f"it holds {guilty[0].share:.0%} of the gradient norm",
    )
    return Verdict("W", tokens, "Check per-token advantages and the loss's normaliser.", guilty)


def _outlying(case: _Case, weight: float, advantage: float, tokens: int) -> bool:
    """Whether a sequence's weights are, and not only since it is short in a loss that divides by the length."""
    factor = case.weight_factor(weight)
    by_length = factor * tokens / case.usual.length if case.usual.length > 0 else factor
    return min(factor, by_length) > case.limits.weight


def _layer(case: _Case) -> Verdict | None:
    limits = case.limits

    def pulls(c: Culprit) -> float:
        return abs(c.pull) / case.usual.pull if c.pull is not None and case.usual.pull > 0 else math.inf

    guilty = [c for c in case.candidates if (c.heterogeneity or 0.0) > limits.heterogeneity and pulls(c) > limits.pull]
    if not guilty:
        return None
    worst = guilty[0]
    rows = {(c.rank, c.micro_batch, c.row) for c in guilty}
    # Those that were not verified: of the same sequences, pulling as hard, and holding as much as a named token has to.
    more = [c for c in case.candidates if c.heterogeneity is None and (c.rank, c.micro_batch, c.row) in rows]
    guilty += [c for c in more if pulls(c) > limits.pull and abs(c.share) >= limits.share]
    assert worst.norms is not None
    layer = max(worst.norms, key=lambda name: worst.norms[name]["all"] if worst.norms else 0.0)
    ratio = "its ratio is not known" if worst.log_ratio is None else f"its log r is {worst.log_ratio:.2f}, near 0"
    evidence = (
        f"{ratio}, and its weight {case.weight_factor(worst.loss_weight):.2g} times the step's median",
        f"over the layers its gradient is unlike the rest of the step's by {worst.heterogeneity:.3g}, most in {layer}",
        f"it holds {worst.share:.0%} of the gradient norm",
    )
    advice = "Clip by layer (LayerClip), and look at the weights and activations of that layer for this token."
    return Verdict("B", evidence, advice, tuple(guilty))


def _silenced(case: _Case) -> Verdict | None:
    bound = case.limits.silenced_log_ratio
    gone = [c for f in case.findings for c in f.silenced if c.log_ratio is not None and abs(c.log_ratio) > bound]
    if not gone:
        return None
    gone.sort(key=lambda c: -abs(c.log_ratio or 0.0))
    evidence = (
        f"{len(gone)} tokens have a ratio far off (log r = {gone[0].log_ratio:.2f}), an advantage, and no weight",
        "the norm does not show it",
    )
    advice = "Check the rollout's log-probabilities of these tokens; TokenClip (IcePop) leaves them out openly."
    return Verdict("S", evidence, advice, tuple(gone))


def _diffuse(case: _Case) -> Verdict:
    top = case.candidates[0] if case.candidates else None
    evidence = [f"none of the {case.usual.count} tokens stands out by a ratio or a weight that would explain its share"]
    if top is not None and top.share >= case.limits.share:
        seen = "" if top.heterogeneity is None else ", and its gradient is spread over the layers as the others' are"
        evidence.append(f"the largest share of the gradient norm is {top.share:.0%}, at {top.where}{seen}")
    elif top is not None:
        evidence.append(f"the largest share of the gradient norm is {abs(top.share):.1%}")
    return Verdict("D", tuple(evidence), "Look at the learning rate and at this step's data as a whole.")


def _of_sequence(case: _Case, s: SequenceDrift) -> tuple[Culprit, ...]:
    return tuple(c for c in case.candidates if (c.rank, c.sequence) == (s.rank, s.sequence))


def _place(s: SequenceDrift) -> str:
    return f"the sequence at rank {s.rank}, micro-batch {s.micro_batch}, row {s.row}"


def _exp(x: float) -> str:
    return f"{math.exp(x):.3g}" if x < 700 else f"1e{x / math.log(10):.0f}"
