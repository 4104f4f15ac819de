"""How long a block keeps its device busy."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch


class Stopwatch:
    """``with Stopwatch(device) as watch: ...``, then `seconds`.

    On CUDA a block's work has only been launched when the block ends; there the time between two events of the stream
    is taken, which is known once the device has been synchronised with (by the step's transfer), and not before.

    Args:
        device: that the block's work runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def __enter__(self) -> Stopwatch:
        self._since = time.perf_counter()
        if self._cuda:
            event: Any = torch.cuda.Event  # has no types
            self._first, self._last = event(enable_timing=True), event(enable_timing=True)
            self._first.record()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._cuda:
            self._last.record()
        self._host = time.perf_counter() - self._since

    def seconds(self) -> float | None:
        """The device's time or the host's, whichever is longer; None where the device is not done yet."""
        if not self._cuda:
            return self._host
        if not self._last.query():
            return None
        on_device: float = self._first.elapsed_time(self._last) / 1000
        return max(self._host, on_device)
