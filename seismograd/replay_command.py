"""``seismograd replay``: localises saved micro-batches again, with the weights of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seismograd.gradloc.terminal import incident_text
from seismograd.incident_command import say

if TYPE_CHECKING:
    from torch import Tensor, nn

    from seismograd.gradloc.verdict import Thresholds
    from seismograd.telemetry.incidents import Incident
    from seismograd.telemetry.records import TokenBatch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them on the command's parser."""
    add = parser.add_argument
    add(
        "path",
        type=Path,
        metavar="FILE",
        help="RUNS/NAME/incidents/step-NNNNNN.pt, written with save_batches=MEGABYTES",
    )
    add("--model", required=True, metavar="FOLDER", help="a checkpoint of the step before, as Transformers saves it")
    add("--method", choices=("auto", "attribution", "jvp", "bisect"), default="auto", help="see docs/gradloc.md")
    add("--json", type=Path, metavar="FILE", help="also write the incident")


def replay(args: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 2 where something could not be read or written."""
    from seismograd.gradloc.saved import SavedError, read_saved

    try:
        batches, scale, thresholds = read_saved(args.path)
        model = _model(args.model)
    except (SavedError, OSError, ImportError, ValueError) as e:
        print(f"seismograd replay: {str(e).splitlines()[0]}", file=sys.stderr)
        return 2
    incident = replayed(model, batches, scale, args.method, thresholds)
    say(incident_text(incident))
    if args.json is not None:
        try:
            args.json.write_text(incident.to_json() + "\n", encoding="utf-8")
        except OSError as e:
            print(f"seismograd replay: {args.json}: cannot be written ({e.strerror})", file=sys.stderr)
            return 2
    return 0


def replayed(
    model: nn.Module, batches: list[TokenBatch], scale: float, method: Any, thresholds: Thresholds
) -> Incident:
    """The incident from the saved micro-batches, with their gradient at the model's weights."""
    from seismograd.gradloc import localize

    batches = [replace(batch, replay=partial(_logp, model, batch)) for batch in batches]
    model.zero_grad(set_to_none=True)
    off = 0.0
    for batch in batches:
        assert batch.replay is not None
        logp = batch.replay()
        known = batch.mask & batch.logp.isfinite()
        if known.any():
            off = max(off, float((logp.detach() - batch.logp)[known].abs().median()))
        if batch.loss_weight is not None:
            weighty = batch.loss_weight != 0
            (logp[weighty] * batch.loss_weight[weighty] * scale).sum().backward()  # type: ignore[no-untyped-call]
    # Held against the checkpoint's own log-probs: how far these are from the recorded ones is said once, below.
    batches = [replace(batch, logp=_detached(batch)) for batch in batches]
    incident = localize(batches, model, method=method, grad_scale=scale, thresholds=thresholds)
    note = f"the checkpoint's log-probabilities are {off:.2g} nats off the recorded ones, in the median"
    if off > 0.01:
        note += ": other weights than the step's, or another forward"
    return replace(incident, notes=(*incident.notes, note))


def _logp(model: nn.Module, batch: TokenBatch) -> Tensor:
    """(B, T-1) log-probs, as a language model of Transformers gives them."""
    import torch

    assert batch.input_ids is not None
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1].float()
    log_probs = torch.log_softmax(logits / batch.temperature, -1)
    return log_probs.gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)


def _detached(batch: TokenBatch) -> Tensor:
    import torch

    assert batch.replay is not None
    with torch.no_grad():
        return batch.replay()


def _model(folder: str) -> nn.Module:
    """In float32 and evaluation mode.

    Raises:
        OSError, ValueError: there is none there.
        ImportError: Transformers is not installed.
    """
    if not Path(folder).is_dir():
        raise OSError(f"{folder}: no such folder; give a checkpoint that save_pretrained or the trainer has written")
    import torch
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()
