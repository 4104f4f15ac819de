"""The processes that share the steps, as far as they can be reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from seismograd.collectors.guard import Guard
from seismograd.telemetry.ranks import Alone, Ranks

T = TypeVar("T")


class Meeting:
    """They meet when the first step begins; who cannot reach the others goes on alone.

    Args:
        meet: the processes; all of them call it at the same time.
        guard: fences a block and books its time under a part.
    """

    def __init__(self, meet: Callable[[], Ranks], guard: Callable[[str], Guard]) -> None:
        self._meet, self._guard = meet, guard
        self._ranks: Ranks | None = None

    def begin(self) -> None:
        """Meet, where that has not been done."""
        if self._ranks is None:
            with self._guard("ranks"):
                self._ranks = self._meet()

    @property
    def ranks(self) -> Ranks:
        """Those that are here. Asked anew after each `shared`, in which the others may have been lost."""
        return Alone() if self._ranks is None else self._ranks

    def shared(self, item: T) -> list[T]:
        """Everybody's; one's own where the others cannot be reached, from then on."""
        if self._ranks is None or isinstance(self._ranks, Alone):
            return [item]
        with self._guard("ranks"):
            return self._ranks.gather(item)
        self._ranks = Alone()
        return [item]
