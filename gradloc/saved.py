"""A step's micro-batches in a file beside its incident, to be localised again offline.

Tensors and plain values only, so that the file opens without running anything that is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seismograd.gradloc.verdict import Thresholds
from seismograd.telemetry.records import TokenBatch

SAVED_SCHEMA_VERSION = 1

_COLUMNS = (
    "mask", "logp", "input_ids", "attention_mask", "rollout_logp", "old_logp", "shadow_logp", "loss_weight",
    "advantage", "sequence",
)  # fmt: skip


class SavedError(Exception):
    """A file of saved micro-batches that cannot be read; the message names it and what can be done."""


def saved(
    batches: Sequence[TokenBatch], grad_scale: float, megabytes: float, thresholds: Thresholds
) -> dict[str, Any] | None:
    """What is written for the step: copies on the host. None where they are above `megabytes`, or have no input_ids."""
    held = [{name: getattr(b, name) for name in _COLUMNS if isinstance(getattr(b, name), Tensor)} for b in batches]
    size = sum(x.numel() * x.element_size() for columns in held for x in columns.values())
    if size > megabytes * 2**20 or not held or any("input_ids" not in columns for columns in held):
        return None
    return {
        "schema_version": SAVED_SCHEMA_VERSION,
        "step": batches[0].step,
        "grad_scale": grad_scale,
        "thresholds": dict(vars(thresholds)),
        "temperature": [b.temperature for b in batches],
        # A column may be a view of something far larger, which a file would hold as well.
        "batches": [{name: x.detach().cpu().clone() for name, x in columns.items()} for columns in held],
    }


def write_saved(content: Mapping[str, Any], path: Path) -> None:
    """Write what `saved` gave.

    Raises:
        OSError: it cannot be written.
    """
    torch.save(dict(content), path)


def read_saved(path: Path) -> tuple[list[TokenBatch], float, Thresholds]:
    """The micro-batches, without a replay, their grad_scale, and the thresholds that the run judged with.

    Raises:
        SavedError: there is no such file, it is damaged, or of a newer version.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        version = content["schema_version"]
        if version > SAVED_SCHEMA_VERSION:
            raise SavedError(
                f"{path}: schema version {version}, this seismograd reads {SAVED_SCHEMA_VERSION}; update it"
            )
        names = {f.name for f in fields(TokenBatch)}
        batches = [
            replace(
                TokenBatch(step=content["step"], micro_batch=i, rank=0, **{k: x for k, x in b.items() if k in names}),
                temperature=content["temperature"][i],
            )
            for i, b in enumerate(content["batches"])
        ]
        limits = {k: x for k, x in content.get("thresholds", {}).items() if k in vars(Thresholds())}
        return batches, float(content["grad_scale"]), Thresholds.of(limits)
    except FileNotFoundError as e:
        raise SavedError(f"{path}: no such file; saved micro-batches are RUNS/NAME/incidents/step-NNNNNN.pt") from e
    except SavedError:
        raise
    except Exception as e:  # torch raises what its pickle reader does
        raise SavedError(f"{path}: damaged, or no saved micro-batches ({type(e).__name__})") from e
