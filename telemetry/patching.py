"""Methods of one object replaced for a while, and put back exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


class Patch:
    """Sets an attribute on an instance; `undo` restores what was there, or takes the attribute away again.

    Args:
        owner: the instance.
        name: of the method.
        replacement: takes the method's arguments. A function: a module set on a module would become its child.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        self._before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Where somebody has replaced the method once more since, theirs stays."""
        if vars(self._owner).get(self._name) is not self._replacement:
            return
        if self._before is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


@contextmanager
def patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """The method replaced for the length of a block."""
    patch = Patch(owner, name, replacement)
    try:
        yield
    finally:
        patch.undo()
