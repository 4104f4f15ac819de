"""What one rank found, in a form that travels: the verdict is made from all ranks' findings together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np

from seismograd.gradloc.attribution import Step
from seismograd.gradloc.tokens import Floats, Ints
from seismograd.gradloc.verification import Verified
from seismograd.telemetry.incidents import Culprit, SequenceShares


@dataclass(frozen=True)
class Typical:
    """What is usual in the step, over the tokens that have a weight.

    Args:
        count: how many there are.
        weight: median |dL/dlogp|, where advantages are known of tokens that have one: a KL term alone weighs others.
        advantage: median |advantage| of the same tokens, NaN where unknown.
        length: median number of trained tokens in a sequence.
        pull: median |d logp / d theta . G / |G||, see `Culprit.pull`.
        micro_batch: median |dL/dlogp| by micro-batch, over its |advantage| where that is known.
    """

    count: int
    weight: float
    advantage: float
    length: float
    pull: float
    micro_batch: tuple[float, ...]


@dataclass(frozen=True)
class SequenceDrift:
    """A sequence as a whole.

    Args:
        rank, micro_batch, row: where it is.
        sequence: see `Culprit.sequence`.
        share: of |G|, summed over its tokens.
        weight: median |dL/dlogp| of its tokens that have one.
        advantage: median |advantage| of its tokens, NaN where unknown.
        log_ratio: sum over its trained tokens, nats.
        largest: largest |log_ratio| of a token in it, nats.
        tokens: trained ones.
    """

    rank: int
    micro_batch: int
    row: int
    sequence: int
    share: float
    weight: float
    advantage: float
    log_ratio: float
    largest: float
    tokens: int


@dataclass(frozen=True)
class Findings:
    """One rank's.

    Args:
        rank: whose.
        candidates: tokens that hold a share worth a look, verified where that was possible.
        typical: of the rank's tokens.
        sequences: those with the largest share, and those that drifted most.
        micro_batch_shares: of |G|, summed over each micro-batch.
        silenced: tokens whose ratio is far off and whose weight is 0 though they have an advantage.
    """

    rank: int
    candidates: tuple[Culprit, ...]
    typical: Typical
    sequences: tuple[SequenceDrift, ...]
    micro_batch_shares: tuple[float, ...]
    silenced: tuple[Culprit, ...]


def find(
    step: Step, shares: Floats, candidates: Ints, verified: Mapping[int, Verified], log_ratio_bound: float
) -> Findings:
    """This rank's findings.

    Args:
        step: its micro-batches.
        shares: (N,) of |G|; 0 where not known.
        candidates: indices of tokens.
        verified: by index.
        log_ratio_bound: nats; a token beyond it with a weight of 0 counts as silenced.
    """
    tokens = step.tokens
    gone = tokens.trained & (np.abs(tokens.log_ratio) > log_ratio_bound) & (tokens.weight == 0)
    gone &= (np.nan_to_num(tokens.advantage) != 0) & ~tokens.left_out
    worst = np.flatnonzero(gone)
    worst = worst[np.argsort(-np.abs(tokens.log_ratio[worst]))][:8]
    by_batch = [float(np.nansum(shares[tokens.of_batch(i)])) for i in range(len(step.batches))]
    return Findings(
        rank=step.ranks.rank,
        micro_batch_shares=tuple(by_batch),
        candidates=tuple(_culprit(step, int(t), float(shares[t]), verified.get(int(t))) for t in candidates),
        typical=_typical(step, shares),
        sequences=_sequences(step, shares),
        silenced=tuple(_culprit(step, int(t), 0.0, None) for t in worst),
    )


def sequence_shares(step: Step, shares: Floats, culprit: Culprit) -> SequenceShares:
    """All tokens of a culprit's sequence. Of this rank."""
    tokens = step.tokens
    at = np.flatnonzero((tokens.batch == culprit.micro_batch) & (tokens.row == culprit.row))
    if (own := at[tokens.column[at] == culprit.position - 1]).size and tokens.sequence[own[0]] >= 0:
        at = at[tokens.sequence[at] == tokens.sequence[own[0]]]  # packed rows hold several sequences
    return SequenceShares(
        rank=step.ranks.rank,
        micro_batch=culprit.micro_batch,
        row=culprit.row,
        positions=tuple((tokens.column[at] + 1).tolist()),
        shares=tuple(shares[at].tolist()),
        log_ratios=None if np.isnan(tokens.log_ratio[at]).all() else tuple(tokens.log_ratio[at].tolist()),
    )


def _culprit(step: Step, t: int, share: float, verified: Verified | None) -> Culprit:
    tokens = step.tokens
    batch = step.batches[int(tokens.batch[t])]
    row, position = int(tokens.row[t]), int(tokens.column[t]) + 1
    same = tokens.trained & (tokens.sequence == tokens.sequence[t]) & (tokens.sequence[t] >= 0)
    culprit = Culprit(
        rank=step.ranks.rank,
        micro_batch=int(tokens.batch[t]),
        row=row,
        position=position,
        sequence=int(tokens.sequence[t]),
        share=share,
        pull=_pull(step, t, share),
        loss_weight=float(tokens.weight[t]),
        logp=float(tokens.logp[t]),
        rollout_logp=_known(tokens.rollout[t]),
        shadow_logp=_known(tokens.shadow[t]),
        log_ratio=_known(tokens.log_ratio[t]),
        sequence_log_ratio=_known(np.nansum(tokens.log_ratio[same])) if same.any() else None,
        advantage=_known(tokens.advantage[t]),
        token_id=None if batch.input_ids is None else _token_id(batch.input_ids, row, position),
    )
    if verified is None:
        return culprit
    return replace(
        culprit,
        share=verified.share,
        grad_norm=verified.norm,
        influence=1 - verified.without / step.norm,
        norms=verified.norms,
        heterogeneity=verified.heterogeneity,
    )


def _pull(step: Step, t: int, share: float) -> float | None:
    weight = float(step.tokens.weight[t])
    return share * step.norm / (weight * step.scale) if weight and np.isfinite(weight) else None


def _token_id(input_ids: object, row: int, position: int) -> int | None:
    """None where the ids do not have the shape of the tokens (packed rows whose ids were not given)."""
    try:
        return int(input_ids[row, position])  # type: ignore[index]
    except (IndexError, TypeError):
        return None


def _typical(step: Step, shares: Floats) -> Typical:
    tokens = step.tokens
    weighty = np.isfinite(tokens.weight) & (tokens.weight != 0)
    weights = np.abs(tokens.weight)
    advantages = np.abs(tokens.advantage)
    earning = weighty & (np.nan_to_num(advantages) > 0)
    if not earning.any():
        earning = weighty
    own = np.where(np.isnan(advantages), weights, weights / np.where(advantages > 0, advantages, 1.0))
    pulls = np.abs(shares[weighty]) * step.norm / (weights[weighty] * step.scale)
    return Typical(
        count=int(weighty.sum()),
        weight=_median(weights[earning]),
        advantage=_median(advantages[earning & ~np.isnan(advantages)]),
        length=_median(np.bincount(tokens.sequence[tokens.trained & (tokens.sequence >= 0)]).astype(np.float64)),
        pull=_median(pulls[np.isfinite(pulls)]),
        micro_batch=tuple(_median(own[earning & (tokens.batch == i)]) for i in range(len(step.batches))),
    )


def _sequences(step: Step, shares: Floats) -> tuple[SequenceDrift, ...]:
    tokens = step.tokens
    found = []
    for s in range(int(tokens.sequence.max(initial=-1)) + 1):
        at = np.flatnonzero(tokens.sequence == s)
        known = at[tokens.trained[at] & np.isfinite(tokens.log_ratio[at])]
        found.append(
            SequenceDrift(
                rank=step.ranks.rank,
                micro_batch=int(tokens.batch[at[0]]),
                row=int(tokens.row[at[0]]),
                sequence=s,
                share=float(np.nansum(shares[at])),
                weight=_median(np.abs(tokens.weight[at][tokens.weight[at] != 0])),
                advantage=_median(np.abs(tokens.advantage[at][~np.isnan(tokens.advantage[at])])),
                log_ratio=float(tokens.log_ratio[known].sum()),
                largest=float(np.abs(tokens.log_ratio[known]).max(initial=0.0)),
                tokens=len(known),
            )
        )
    by_share = sorted(found, key=lambda s: -abs(s.share))[:4]
    by_drift = sorted(found, key=lambda s: -abs(s.log_ratio))[:4]
    return tuple(dict.fromkeys([*by_share, *by_drift]))


def _known(x: float) -> float | None:
    return None if np.isnan(x) else float(x)


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def pooled(findings: Sequence[Findings]) -> Typical:
    """What is usual over all ranks: medians of the ranks' medians."""
    counted = [f.typical for f in findings if f.typical.count]
    if not counted:
        return Typical(0, nan, nan, nan, nan, ())
    return Typical(
        count=sum(t.count for t in counted),
        weight=_median(np.array([t.weight for t in counted])),
        advantage=_median(np.array([t.advantage for t in counted if not np.isnan(t.advantage)])),
        length=_median(np.array([t.length for t in counted if not np.isnan(t.length)])),
        pull=_median(np.array([t.pull for t in counted if not np.isnan(t.pull)])),
        micro_batch=tuple(x for t in counted for x in t.micro_batch),
    )
