"""The fence around everything of ours: a fault is caught, counted and shown, and never reaches the training loop."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from seismograd.telemetry.records import Event
from seismograd.telemetry.visible import visible

log = logging.getLogger("seismograd")

_GIVE_UP_AFTER = 3


def warn(message: str) -> None:
    """One line on the log. A logging handler of the user's that raises must not stop training by way of ours."""
    with suppress(Exception):
        log.warning("seismograd: %s", message)


def announce(message: str) -> None:
    """One line for the console, on stderr: what is no warning, but what whoever starts a run wants to know."""
    with suppress(Exception):
        print(f"seismograd: {message}", file=sys.stderr, flush=True)


def reason(error: BaseException, told: bool) -> str:
    """An exception in one line, that can be shown.

    Args:
        error: that was raised.
        told: whether what it says may be shown: its type and first line; else its type and where it was raised, since
            any exception may hold text of the user's data.
    """
    name = type(error).__name__
    if told:
        with suppress(Exception):
            return visible(f"{name}: {error}".splitlines()[0])
        return name
    frames = [*traceback.walk_tb(error.__traceback__)]
    return f"{name} at {_place(*frames[-1])}" if frames else name


def trace(error: BaseException, told: bool) -> str:
    """An exception's traceback; without what it says, and without source lines, where that may not be `told`."""
    if told:
        return "".join(traceback.format_exception(error))
    places = [_place(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return "\n".join([*places, type(error).__name__])


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


class Faults:
    """Counts faults by part. A part that asks whether it is `working` is switched off after three faults in a row; the
    others go on.

    Safe to use from several threads.

    Args:
        report: is given an event for the first fault of a part and when it is switched off.
        told: whether what an exception says may be shown; it may hold text of the user's data.
    """

    def __init__(self, report: Callable[[Event], None], told: bool = True) -> None:
        self._report, self._told = report, told
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._switched: set[str] = set()  # parts that ask whether they still work

    def fence(self, part: str) -> Fence:
        """``with faults.fence("norms") as fence:`` swallows any Exception in the block; `fence.failed` says whether."""
        self._counts.setdefault(part, 0)  # so that its count shows from 0
        return Fence(self, part)

    def working(self, part: str) -> bool:
        """False once the part has been switched off. Only a part that asks is."""
        self._switched.add(part)
        return self._in_a_row[part] < _GIVE_UP_AFTER

    def counts(self) -> dict[str, int]:
        """Faults so far by part."""
        with self._lock:
            return dict(self._counts)

    def count(self, part: str, error: BaseException, consequence: str | None = None) -> None:
        """Record one fault of a part.

        Args:
            part: that failed.
            error: of which one line is shown, see `reason`.
            consequence: what becomes of the part, for those that are not switched off by the count.
        """
        with self._lock:
            self._counts[part] += 1
            self._in_a_row[part] += 1
            first = self._counts[part] == 1
            last = self._in_a_row[part] == _GIVE_UP_AFTER and consequence is None and part in self._switched
        if not (first or last):
            return
        what = reason(error, self._told)
        message = f"fault in {part}{consequence or ''}, training is not affected: {what}"
        if last:
            message = f"{part} is switched off after {_GIVE_UP_AFTER} faults in a row, training is not affected: {what}"
        warn(message)
        self._report(Event("fault", message, data={"part": part, "traceback": trace(error, self._told)}))

    def succeed(self, part: str) -> None:
        """Record that the part has worked."""
        if self._in_a_row[part]:
            self._in_a_row[part] = 0


class Fence:
    """See `Faults.fence`."""

    __slots__ = ("_faults", "_part", "failed")

    def __init__(self, faults: Faults, part: str) -> None:
        self._faults, self._part, self.failed = faults, part, False

    def __enter__(self) -> Fence:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            self._faults.succeed(self._part)
            return False
        if not isinstance(error, Exception):  # KeyboardInterrupt and SystemExit are the user's
            return False
        self.failed = True
        self._faults.count(self._part, error)
        return True
