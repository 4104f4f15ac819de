"""What travels between the rooms: frozen records, with shapes and units on every field.

B is the number of sequences of a micro-batch, T their padded length. A column p-1 of a (B, T-1) tensor stands for the
predicted token ``input_ids[:, p]``. Log-probabilities are in nats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from seismograd.telemetry.catalogue import CATALOGUE

if TYPE_CHECKING:
    from torch import Tensor

    from seismograd.telemetry.forward_state import ForwardState

SCHEMA_VERSION = 1

NO_LABELS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of one metric of the catalogue.

    Raises:
        ValueError: the name is not in the catalogue, or the labels are not those that it names.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=lambda: NO_LABELS)

    def __post_init__(self) -> None:
        spec = CATALOGUE.get(self.name)
        if spec is None:
            raise ValueError(f"metric {self.name!r} is not in the catalogue (telemetry/catalogue.py): add it there")
        if tuple(self.labels) != spec.labels:
            raise ValueError(
                f"metric {self.name!r} has the labels {spec.labels}, in this order; got {tuple(self.labels)}"
            )

    @property
    def series(self) -> tuple[str, ...]:
        """The series' identity: the name and the label values in the catalogue's order."""
        return (self.name, *self.labels.values())

    @property
    def key(self) -> str:
        """The identity as text: ``grad_norm{layer="0",group="mlp"}``."""
        if not self.labels:
            return self.name
        return self.name + "{" + ",".join(f'{k}="{v}"' for k, v in self.labels.items()) + "}"


@dataclass(frozen=True)
class ClipSpec:
    """How a loss limits one ratio, so that the cells of DESIGN section 3 can be computed from the trainer's own inputs.

    Args:
        ratio: the ratio's name, a label value: "ppo" for exp(logp - old_logp), "importance" for the trainer's recompute
            over the rollout engine's, exp(old_logp - rollout_logp).
        eps_low, eps_high: the bounds are 1 - eps_low and 1 + eps_high; ``math.inf`` where there is none.
        kind: "clip", PPO's minimum, takes the gradient away where the bound and the advantage's sign agree; "mask"
            takes it away outside the bounds whatever the sign; "cap" and "truncate" limit the weight and take nothing.
        level: the ratio of a "token", of a sequence's mean ("sequence_mean", GSPO) or sum ("sequence_sum") of log r.
        delta: upper bound for negative advantages too (dual clip), or None.

    Raises:
        ValueError: a bound that is negative or not a number.
    """

    ratio: Literal["ppo", "importance"] = "ppo"
    eps_low: float = 0.2
    eps_high: float = 0.2
    kind: Literal["clip", "mask", "cap", "truncate"] = "clip"
    level: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    delta: float | None = None

    def __post_init__(self) -> None:
        choices = {
            "ratio": ("ppo", "importance"),
            "kind": ("clip", "mask", "cap", "truncate"),
            "level": ("token", "sequence_mean", "sequence_sum"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"clip.{key} must be one of {', '.join(allowed)}; got {getattr(self, key)!r}")
        for key in ("eps_low", "eps_high"):
            bound = getattr(self, key)
            if not isinstance(bound, (int, float)) or math.isnan(bound) or (bound < 0 and key == "eps_low"):
                raise ValueError(f"clip.{key} must be a number of at least 0; got {bound!r}")
        if self.delta is not None and not self.delta > 0:
            raise ValueError(f"clip.delta must be above 0 or None; got {self.delta!r}")


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one micro-batch, built by an adapter as the trainer runs. Holds references, never copies, and lives
    only until its step ends.

    Args:
        step: optimizer step, counted from 1 as trainers log it.
        micro_batch: position within the step, from 0.
        rank: process that holds the tokens.
        input_ids: (B, T) int64, or None where the loop did not pass them.
        mask: (B, T-1) bool, true where a token is trained.
        attention_mask: (B, T), nonzero where input_ids is no padding, or None.
        logp: (B, T-1) float, of the training forward, detached.
        rollout_logp: (B, T-1) float as the rollout gave it (non-finite where the engine gave none), or None.
        old_logp: (B, T-1) float, the reference of the PPO ratio where that is not `rollout_logp` itself, or None.
        shadow_logp: (B, T-1) float, the probe's, or None where the probe did not run.
        loss_weight: (B, T-1) float, dL/dlogp with loss scaling taken out, or None before the backward.
        advantage: (B, T-1) or (B, 1) float, or None.
        entropy: (B, T-1) float nats, or None.
        left_out: (B, T-1) bool by reason: tokens of the completion that the loss does not train ("tool", ...).
        source: (B,) int64 data source, or None.
        sequence: (B, T-1) int64, for packed rows: which sequence of the micro-batch each token belongs to, -1 where
            unknown; None where each row is one sequence.
        staleness: optimizer steps between the rollout's weights and this step's, (B,) int64 or one int for all, or
            None.
        engine: whether `rollout_logp` comes from a rollout engine; False where the trainer recomputed it itself, so
            that no gap of precision lies between the two.
        temperature: that the logits are divided by in `logp`.
        replay: runs the same forward again and returns logp (B, T-1), or None.
        replay_all: as `replay`, but returns all that the loss may take from the model, by name: "logp" and the names of
            `others`; None where there is nothing but logp.
        replay_rows: as `replay_all`, for some of the rows alone, (R,) int64; None where they cannot be told apart.
        others: dL/d(output) of what does not pass through logp, by name: "entropy" (B, T-1), "router" (); with loss
            scaling taken out.
        state: random numbers and autocast of the training forward, or None where they were not taken.
    """

    step: int
    micro_batch: int
    rank: int
    mask: Tensor
    logp: Tensor
    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    rollout_logp: Tensor | None = None
    old_logp: Tensor | None = None
    shadow_logp: Tensor | None = None
    loss_weight: Tensor | None = None
    advantage: Tensor | None = None
    entropy: Tensor | None = None
    left_out: Mapping[str, Tensor] = field(default_factory=dict)
    source: Tensor | None = None
    sequence: Tensor | None = None
    staleness: Tensor | int | None = None
    engine: bool = True
    temperature: float = 1.0
    replay: Callable[[], Tensor] | None = None
    replay_all: Callable[[], Mapping[str, Tensor]] | None = None
    replay_rows: Callable[[Tensor], Mapping[str, Tensor]] | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    state: ForwardState | None = None

    def replayed(self) -> Tensor:
        """(B, T-1) what `replay` gives.

        Raises:
            ValueError: it is no tensor of the shape of `logp`.
        """
        assert self.replay is not None
        found = self.replay()
        shape = getattr(found, "shape", None)  # a user's function may return anything
        if shape != self.logp.shape:
            what = type(found).__name__ if shape is None else tuple(shape)
            raise ValueError(f"run.tokens(replay=...) gave {what}, logp has {tuple(self.logp.shape)}")
        return found


@dataclass(frozen=True)
class Spike:
    """A rule of the rule table that fired.

    Args:
        signal: the rule's name.
        key: the series that fired, as ``name{label="value"}``.
        step: optimizer step.
        value: what was seen, in the metric's unit (NaN or inf where that is the finding).
        baseline: the level it was held against: the envelope or median before this step, or the absolute bound.
        threshold: the value beyond which the rule fires.
        score: value / baseline.
        severity: "critical" or "warning".
        summary: one sentence for people.
        repeat: True within the rule's cool-down after an earlier spike of the signal: counted, but nobody is notified.
    """

    signal: str
    key: str
    step: int
    value: float
    baseline: float
    threshold: float
    score: float
    severity: str
    summary: str
    repeat: bool = False

    def sentence(self) -> str:
        """The spike in one line, for consoles, alerts and logs."""
        seen = f"step {self.step}: {self.summary} {self.key} = {self.value:.4g}"
        if not math.isfinite(self.value):
            return seen
        return f"{seen} (usual {self.baseline:.4g}, threshold {self.threshold:.4g})"


@dataclass(frozen=True)
class Event:
    """Something that happened once.

    Args:
        kind: "run_start", "run_end", "spike", "incident", "fault", "control", "action", "degraded", "gap" or
            "note".
        message: one line for people, naming the fix where there is one.
        step: optimizer step, or -1 outside of steps.
        time: Unix seconds.
        data: JSON-serialisable detail, e.g. the spike's fields.
    """

    kind: str
    message: str
    step: int = -1
    time: float = field(default_factory=time.time)
    data: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(spike: Spike) -> Event:
        """The spike's fields as data; values that JSON has no number for as "nan", "inf" and "-inf"."""
        found = {k: str(x) if isinstance(x, float) and not math.isfinite(x) else x for k, x in asdict(spike).items()}
        return Event("spike", spike.sentence(), spike.step, data={"schema_version": SCHEMA_VERSION, **found})


@dataclass(frozen=True)
class Row:
    """The readings of one step on their way to the sinks.

    Args:
        step: optimizer step, counted from 1 as trainers log it.
        time: Unix seconds at which the step ended.
        readings: values known at this row; a step may have a further row with what the trainer logged after it.
    """

    step: int
    time: float
    readings: tuple[Reading, ...]


@dataclass(frozen=True)
class RunInfo:
    """The identity of a run, given to each sink at its opening.

    Args:
        name: the run's name, also its folder's.
        folder: where its files lie, or None where no folder could be written.
        config: the settings in force, JSON-serialisable.
        started: Unix seconds.
    """

    name: str
    folder: str | None
    config: Mapping[str, Any]
    started: float = field(default_factory=time.time)
