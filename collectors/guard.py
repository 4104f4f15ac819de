"""The fence around each part of ours in the training thread, which also books the part's time."""

from __future__ import annotations

import time
from types import TracebackType

from seismograd.telemetry.faults import Fence


class Guard:
    """A fence that also books the time of its block, by the clock of the thread."""

    __slots__ = ("_fence", "_part", "_seconds", "_since")

    def __init__(self, fence: Fence, seconds: dict[str, float], part: str) -> None:
        self._fence, self._seconds, self._part = fence, seconds, part

    @property
    def failed(self) -> bool:
        return self._fence.failed

    def __enter__(self) -> Guard:
        self._since = time.thread_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + time.thread_time() - self._since
        return self._fence.__exit__(kind, error, trace)
