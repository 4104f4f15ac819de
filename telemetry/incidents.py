"""What is known of an incident: a spike, the tokens behind it, the kind of fault and the cure.

The JSON form is published in docs/incident.schema.json. Numbers that JSON has no sign for stand in it as "nan", "inf"
and "-inf".
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from seismograd.telemetry.visible import visible

INCIDENT_SCHEMA_VERSION = 1

VERDICTS: Mapping[str, str] = {
    "A.1": "token mismatch: the rollout's log-probability of a token is not that of the trained policy",
    "A.2": "sequence mismatch: small gaps between rollout and training add up over a sequence",
    "B": "layer heterogeneity: ratios are near 1, and a token's gradient explodes in some layers",
    "W": "weight outlier: a finite but outlying advantage or normaliser",
    "N": "non-finite: a NaN or an infinity",
    "S": "silenced: a corrupted ratio took a token's gradient away",
    "D": "diffuse: no token holds a share worth naming",
}

# {layer: {module group: gradient norm}}, with the sum over a layer's groups under "all".
LayerNorms = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Culprit:
    """One token of an incident.

    Args:
        rank, micro_batch, row: where it is.
        position: column in input_ids of the predicted token.
        sequence: index of its sequence among all of its rank's, in the order of the micro-batches; -1 where unknown.
        share: its part of the step's gradient norm; the shares of all tokens add up to 1, less what is named in
            `Incident.parts`.
        pull: d logp / d theta . G / |G|: how fast its log-probability changes along the step's gradient, or None.
        influence: 1 - |G without it| / |G|, exact, from a backward of its own; None where that was not run.
        grad_norm: norm of its own gradient, exact, or None.
        norms: of its own gradient, by layer and module group, or None.
        heterogeneity: how unlike the rest of the step its gradient is spread over the layers, 1 where it is alike; the
            largest quotient of the two over the layers, over the median one. None where that was not run.
        token_id, text, before, after: the token and its context, None where they are not known or withheld.
        logp, rollout_logp, shadow_logp: nats.
        log_ratio: logp less the reference of the loss's ratio, nats.
        sequence_log_ratio: the sum of log_ratio over the trained tokens of its sequence.
        advantage, loss_weight: of the token; loss_weight is dL/dlogp.
    """

    rank: int
    micro_batch: int
    row: int
    position: int
    sequence: int
    share: float
    loss_weight: float
    logp: float
    rollout_logp: float | None = None
    shadow_logp: float | None = None
    log_ratio: float | None = None
    sequence_log_ratio: float | None = None
    advantage: float | None = None
    pull: float | None = None
    influence: float | None = None
    grad_norm: float | None = None
    norms: LayerNorms | None = None
    heterogeneity: float | None = None
    token_id: int | None = None
    text: str | None = None
    before: str | None = None
    after: str | None = None

    @property
    def where(self) -> str:
        """Its place in words."""
        return f"rank {self.rank}, micro-batch {self.micro_batch}, row {self.row}, position {self.position}"


@dataclass(frozen=True)
class SequenceShares:
    """All trained tokens of a culprit's sequence, for a bar under the text.

    Args:
        rank, micro_batch, row: where it is.
        positions: columns in input_ids.
        shares: of the step's gradient norm, one a position.
        log_ratios: nats, one a position, or None.
        texts: the tokens' texts, one a position, or None where they are not known or withheld.
    """

    rank: int
    micro_batch: int
    row: int
    positions: tuple[int, ...]
    shares: tuple[float, ...]
    log_ratios: tuple[float, ...] | None = None
    texts: tuple[str, ...] | None = None

    @property
    def share(self) -> float:
        return sum(self.shares)


@dataclass(frozen=True)
class Attempt:
    """A method that was tried.

    Args:
        method: "attribution", "jvp", "bisect", "nonfinite", or what supports them: "verification", "whole gradient".
        outcome: "believed", or why it was not.
        completeness: the sum of all shares over what it should be, or None.
        forwards, backwards: of whole micro-batches, over the number of the step's micro-batches: 1.0 is one pass.
        detail: e.g. the distance moved.
    """

    method: str
    outcome: str
    completeness: float | None = None
    forwards: float = 0.0
    backwards: float = 0.0
    detail: str = ""

    @property
    def believed(self) -> bool:
        return self.outcome == "believed"


@dataclass(frozen=True)
class Incident:
    """A localised spike.

    Args:
        step: optimizer step.
        verdict: one of `VERDICTS`.
        evidence: what led to the verdict, a sentence each.
        advice: the cure in one sentence.
        method: that was believed: "attribution", "jvp", "bisect", "nonfinite"; "ratios" where no replay was possible.
        attempts: every method that was tried, in order.
        completeness: the sum of all shares over what it should be, or None.
        parts: of |G|, by name: "tokens", and what does not pass through logp ("entropy", "router").
        grad_norm: |G| of the step, before clipping.
        without_culprits: |G| without the verified culprits, or None.
        replay_error: largest |logp replayed - logp recorded| over the verified micro-batches, nats, or None.
        culprits: worst first.
        sequences: the culprits' sequences.
        norms: of the step's gradient by layer and module group.
        controls: what each control would have done, by name.
        notes: what could not be done, and why.
        seconds: wall-clock time that it took.
        spike: signal, key, value, baseline, threshold and score of the spike that led here, or None.
        environment: versions, device and precision.
        run: the run's name, or "".
        time: Unix seconds.
    """

    step: int
    verdict: str
    evidence: tuple[str, ...]
    advice: str
    method: str
    attempts: tuple[Attempt, ...] = ()
    completeness: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float = math.nan
    without_culprits: float | None = None
    replay_error: float | None = None
    culprits: tuple[Culprit, ...] = ()
    sequences: tuple[SequenceShares, ...] = ()
    norms: LayerNorms = field(default_factory=dict)
    controls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    spike: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    time: float = field(default_factory=time.time)

    @property
    def passes(self) -> float:
        """Forward and backward passes over the whole step that were spent, a forward and a backward counting 1 each."""
        return sum(a.forwards + a.backwards for a in self.attempts)

    def headline(self) -> str:
        """The incident in one line, for consoles and alerts."""
        kind = VERDICTS[self.verdict].split(":")[0]
        who = "no single token"
        if self.culprits:
            worst = self.culprits[0]
            who = f"token {worst.text!r} at {worst.where}" if worst.text is not None else worst.where
        return visible(f"step {self.step}: {self.verdict} {kind}, {who}. {self.advice}")

    def summary(self) -> dict[str, Any]:
        """What an event carries of it, JSON-serialisable: without the sequences and the norms by layer."""
        whole = _plain(asdict(self))
        for key in ("sequences", "norms", "attempts", "environment", "spike"):
            del whole[key]
        for culprit in whole["culprits"]:
            del culprit["norms"]
        return {"schema_version": INCIDENT_SCHEMA_VERSION, **whole}

    def to_json(self) -> str:
        """The published form, one line."""
        return json.dumps({"schema_version": INCIDENT_SCHEMA_VERSION, **_plain(asdict(self))}, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Incident:
        """Raises:
        ValueError: it is damaged, no incident, or one of a newer schema; the message names the fix.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"damaged, not JSON ({e}); take the file from the run's folder again") from e
        version = data.pop("schema_version", None) if isinstance(data, dict) else None
        if not isinstance(version, int):
            raise ValueError("no incident, it has no schema_version; incidents are RUN/incidents/step-NNNNNN.json")
        if version > INCIDENT_SCHEMA_VERSION:
            raise ValueError(
                f"schema version {version}, this seismograd reads {INCIDENT_SCHEMA_VERSION}; update seismograd"
            )
        if data.get("verdict") not in list(VERDICTS):
            raise ValueError(f"unknown verdict {data.get('verdict')!r}; update seismograd, or the file is damaged")
        nested = {"culprits": Culprit, "sequences": SequenceShares, "attempts": Attempt}
        try:
            parts = {name: tuple(_made(kind, item) for item in data.get(name, ())) for name, kind in nested.items()}
            made: Incident = _made(Incident, {**data, **parts})
        except (TypeError, AttributeError) as e:
            raise ValueError(f"damaged ({e}); take the file from the run's folder again") from e
        return made


# Fields that are text whatever they say: a token or a run may be named "nan".
_TEXTS = frozenset(
    (
        *("text", "before", "after", "texts", "verdict", "evidence", "advice"),
        *("method", "outcome", "detail", "notes", "run", "environment"),
    )
)


@dataclass(frozen=True)
class Explained:
    """An incident on its way to its files.

    Args:
        incident: as it is told.
        saved: the step's micro-batches for a later replay, see gradloc/saved.py; None where they are not kept.
    """

    incident: Incident
    saved: Mapping[str, Any] | None = None


def _made(kind: Any, data: Mapping[str, Any]) -> Any:
    """A record of the fields that it knows; lists become tuples."""
    known = {f.name for f in fields(kind)}
    read = {k: x if k in _TEXTS else _numbers(x) for k, x in data.items() if k in known}
    return kind(**{k: tuple(x) if isinstance(x, list) else x for k, x in read.items()})


def _plain(x: Any) -> Any:
    """For JSON: numbers without a sign there as text, tuples as lists."""
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items()}
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x


def _numbers(x: Any) -> Any:
    """The inverse of `_plain`, for all but the fields that are text."""
    if isinstance(x, dict):
        return {k: _numbers(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_numbers(v) for v in x]
    return float(x) if isinstance(x, str) and x in ("nan", "inf", "-inf") else x
