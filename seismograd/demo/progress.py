"""A progress bar on a terminal, a few plain lines where the output is a file or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[float, str], None]
"""Takes the share that is done, 0 to 1, and what is being done now."""


def console() -> Console:
    """The console of the demo: text is printed as it is, without markup or line breaks of rich's own."""
    return Console(highlight=False, markup=False, soft_wrap=True)


@contextmanager
def bar(out: Console, title: str) -> Iterator[Advance]:
    """A bar that lives as long as the context; elsewhere than on a terminal, one line for each new text.

    Args:
        out: where to draw.
        title: what is in progress.
    """
    if not out.is_terminal:
        said: set[str] = set()

        def say(share: float, text: str) -> None:
            if text not in said:
                said.add(text)
                out.print(f"{title}: {text} ({share:.0%})")

        yield say
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda share, text: progress.update(task, completed=share, description=f"{title}: {text}")
