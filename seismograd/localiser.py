"""Joins GradLoc to a run: which spikes are explained, and what of the text may be told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from seismograd.gradloc import Incident, Thresholds, localize
from seismograd.gradloc.saved import saved
from seismograd.telemetry.incidents import Culprit, Explained, SequenceShares
from seismograd.telemetry.ranks import Ranks
from seismograd.telemetry.records import Spike, TokenBatch

When = Literal["auto", "off", "every"]
WHEN: tuple[When, ...] = ("auto", "off", "every")
Text = Literal["full", "none"]
TEXT: tuple[Text, ...] = ("full", "none")

T = TypeVar("T", Culprit, SequenceShares)

_CONTEXT = 24  # tokens before a culprit, and half as many after it


class GradLoc:
    """Explains a step's spikes by `seismograd.gradloc.localize`.

    Args:
        model: the trained model.
        when: "auto" explains the first spike of each signal within its cool-down, "every" every step (to try it out).
        text: "none" leaves texts and ids out of the incident.
        decode: token ids to text, or None where the loop has given none.
        run: its name.
        save: megabytes of micro-batches that may be kept beside an incident; 0 for none.
        thresholds: of the verdict.
    """

    def __init__(
        self,
        model: nn.Module,
        when: When,
        text: Text,
        decode: Callable[[Sequence[int]], str] | None,
        run: str,
        save: float = 0.0,
        thresholds: Thresholds | None = None,
    ) -> None:
        self._limits = thresholds or Thresholds()
        self._model, self._when, self._text, self._run, self._save = model, when, text, run, save
        self._decode = decode if text == "full" else None

    def wants(self, spikes: Sequence[Spike]) -> bool:
        """Whether they are to be explained."""
        return self._when == "every" or (self._when == "auto" and any(not spike.repeat for spike in spikes))

    def explain(
        self, step: int, batches: Sequence[TokenBatch], spikes: Sequence[Spike], ranks: Ranks, scale: float
    ) -> Explained:
        """The incident of this step, from gradients that have not been clipped yet."""
        everybody = ranks.gather((all(batch.replay is not None for batch in batches), self._text == "full"))
        replayable = all(can for can, _ in everybody)
        told = all(may for _, may in everybody)  # what one rank withholds no other may write
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's model, which has said it before
            incident = localize(
                batches,
                self._model if replayable else None,
                grad_scale=scale / max(ranks.size, _averaged_over()),
                thresholds=self._limits,
                ranks=ranks,
                told=told,
            )
        first = next((s for s in spikes if not s.repeat), spikes[0] if spikes else None)
        incident = replace(
            incident,
            step=step,
            run=self._run,
            evidence=(*incident.evidence, *_return_to_usual(incident, spikes)),
            spike=None if first is None else asdict(first),
            culprits=self._everybody(ranks, incident.culprits, lambda c: self._told(c, batches, told)),
            sequences=self._everybody(ranks, incident.sequences, lambda s: self._told_sequence(s, batches, told)),
        )
        notes = [f"norms are multiplied by the loss scale, {scale:g}"] if scale != 1 else []
        grad_scale = scale / max(ranks.size, _averaged_over())
        kept = saved(batches, grad_scale, self._save, self._limits) if self._save > 0 and told else None
        if self._save > 0 and kept is None:
            notes.append(f"the micro-batches were not saved: above {self._save:g} MB, no ids, or text is withheld")
        incident = _of_all_weights(incident, spikes)
        return Explained(replace(incident, notes=(*incident.notes, *notes)), kept)

    def _everybody(self, ranks: Ranks, items: Sequence[T], tell: Callable[[T], T]) -> tuple[T, ...]:
        """Each item as told by the rank that has its text."""
        mine = [tell(item) if item.rank == ranks.rank else None for item in items]
        told = ranks.gather(mine)
        return tuple(told[item.rank][i] for i, item in enumerate(items))

    def _told(self, c: Culprit, batches: Sequence[TokenBatch], told: bool) -> Culprit:
        if not told:
            return replace(c, token_id=None, text=None, before=None, after=None)
        ids = _ids(batches, c.micro_batch)
        if self._decode is None or ids is None or c.token_id is None:
            return c
        row = ids[c.row].tolist()
        return replace(
            c,
            text=self._text_of([c.token_id]),
            before=self._text_of(row[max(0, c.position - _CONTEXT) : c.position]),
            after=self._text_of(row[c.position + 1 : c.position + 1 + _CONTEXT // 2]),
        )

    def _told_sequence(self, s: SequenceShares, batches: Sequence[TokenBatch], told: bool) -> SequenceShares:
        ids = _ids(batches, s.micro_batch) if told else None
        if self._decode is None or ids is None or ids.shape[0] <= s.row or ids.shape[1] <= max(s.positions, default=0):
            return s
        row = ids[s.row].tolist()
        return replace(s, texts=tuple(self._text_of([row[p]]) or "" for p in s.positions))

    def _text_of(self, ids: Sequence[int]) -> str | None:
        """None where the tokenizer refuses: a model's vocabulary may be padded beyond the tokenizer's."""
        assert self._decode is not None
        with suppress(Exception):
            return self._decode(ids)
        return None


def _averaged_over() -> int:
    """Processes that average their gradients, also where this one looks at its tokens alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _of_all_weights(incident: Incident, spikes: Sequence[Spike]) -> Incident:
    """A step in which no token stands out among the others, and all weigh more than in any step before, is no D."""
    heavy = next((s for s in spikes if s.signal == "loss_weight"), None)
    if incident.verdict != "D" or heavy is None:
        return incident
    sentence = f"the largest |dL/dlogp| is {heavy.value:.3g}, where up to {heavy.baseline:.3g} is usual in this run"
    advice = "Check the loss's normaliser and reward scaling: all of the step's weights are larger than usual."
    return replace(incident, verdict="W", evidence=(*incident.evidence, sentence), advice=advice)


def _return_to_usual(incident: Incident, spikes: Sequence[Spike]) -> tuple[str, ...]:
    """Whether the norm is its usual one without the culprits that were verified."""
    whole = next((s for s in spikes if s.signal == "grad_norm"), None)
    if whole is None or incident.without_culprits is None or not incident.culprits:
        return ()
    sentence = f"without the verified culprits |G| would be {incident.without_culprits:.4g}"
    return (f"{sentence}, where up to {whole.baseline:.4g} is usual",)


def _ids(batches: Sequence[TokenBatch], i: int) -> Tensor | None:
    ids = batches[i].input_ids
    return None if ids is None or ids.dim() != 2 else ids.detach().cpu()


def decoder(trainer: Any) -> Callable[[Sequence[int]], str] | None:
    """The trainer's tokenizer as a function of ids, or None where it has none."""
    processing = getattr(trainer, "processing_class", None)
    decode = getattr(processing, "decode", None) or getattr(getattr(processing, "tokenizer", None), "decode", None)
    return None if decode is None else lambda ids: str(decode(list(ids)))
