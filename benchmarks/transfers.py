"""Counts, in a real run, how often our code makes the training thread wait for the device."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

import seismograd
from benchmarks import grpo
from seismograd import watch
from seismograd.collectors.budget import PROBES
from seismograd.collectors.transfer import Transfer

STEPS = 4
_ROOM = Path(seismograd.__file__).parent.parent
_ROOMS = tuple(str(_ROOM / room) + "/" for room in ("seismograd", "collectors", "telemetry"))
_TORCH = str(Path(torch.__file__).parent) + "/"
_FETCH = str(_ROOM / "collectors" / "transfer.py")
# Calls of a tensor that bring its values to the host, or need them there to know a shape.
_WAITING = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "is_nonzero",
    "equal", "allclose", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
}  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """Transfers by step, the chain of our functions that led to one, and other waiting calls of ours by their place."""

    by_step: list[int]
    where: str
    others: dict[str, int]

    @property
    def usual(self) -> int:
        """The number that most steps have."""
        return Counter(self.by_step).most_common(1)[0][0]


def count(folder: Path) -> Counted:
    """A short watched run with all probes on every step."""
    trainer = grpo.trainer(folder, STEPS, seconds=120)
    by_step: Counter[int] = Counter()
    chains: Counter[str] = Counter()
    fetch = Transfer.fetch

    def counting(transfer: Transfer) -> Any:
        if transfer._tensors:
            by_step[trainer.state.global_step + 1] += 1
            chains[_chain()] += 1
        return fetch(transfer)

    with (
        patch.object(Transfer, "fetch", counting),
        watch(trainer, runs=folder, name="run", probes=dict.fromkeys(PROBES, 1)),
        Waiting() as waiting,
    ):
        trainer.train()
    # The last step's probes of moved weights are brought over when training has ended: in a step that is none.
    return Counted([by_step[step] for step in range(1, STEPS + 1)], chains.most_common(1)[0][0], dict(waiting.found))


class Waiting(TorchFunctionMode):
    """Counts waiting calls whose caller's file is in one of the rooms, the transfer itself left out."""

    def __init__(self, rooms: tuple[str, ...] = _ROOMS) -> None:
        super().__init__()
        self._rooms = rooms
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WAITING or (name == "__getitem__" and _by_mask(args[1])) or (name == "where" and len(args) == 1):
            caller = sys._getframe(1)
            while caller.f_back is not None and caller.f_code.co_filename.startswith(_TORCH):
                caller = caller.f_back
            path = str(Path(caller.f_code.co_filename).resolve())
            if path.startswith(self._rooms) and path != _FETCH:
                self.found[f"{Path(path).name}:{caller.f_lineno} {name}"] += 1
        return func(*args, **(kwargs or {}))


def _by_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _chain() -> str:
    """Our functions on the stack, outermost first, without the fetch itself."""
    ours = [frame for frame in _frames() if frame.filename.startswith(_ROOMS)]
    return " > ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in ours)


def _frames() -> Iterator[traceback.FrameSummary]:
    for frame in traceback.extract_stack():
        yield traceback.FrameSummary(str(Path(frame.filename).resolve()), frame.lineno, frame.name, lookup_line=False)
