"""An incident as one HTML file that needs nothing else: no scripts, no requests, light and dark.

Tokens, contexts, names and notes come from models and users. Every text goes through `visible` and Jinja's escaping,
in elements and in attributes, and the page forbids all loading and scripting by its own content security policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from seismograd.gradloc import story
from seismograd.gradloc.heat import Heat, heat
from seismograd.telemetry.incidents import Incident, SequenceShares
from seismograd.telemetry.visible import NOT_KNOWN, number, percent, visible

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
# Height of the tallest bar, in em.
_TALLEST = 2.0


@dataclass(frozen=True)
class Token:
    """One token of a sequence, with its bar.

    Args:
        text: of the token, or its position where texts are not known.
        title: position, share and log-ratio.
        kind: CSS class of the bar: "up" raises the gradient norm, "down" lowers it, "bad" is not finite, "" is none.
        height: of the bar, em.
        guilty: whether it is a culprit.
        ends: whether a line of the text ends here.
    """

    text: str
    title: str
    kind: str
    height: float
    guilty: bool
    ends: bool


@dataclass(frozen=True)
class Sequence:
    """A sequence as the template draws it."""

    where: str
    share: str
    known: bool
    tokens: tuple[Token, ...]


def incident_page(incident: Incident) -> str:
    """The whole page. Write it as UTF-8."""
    sequences = [s for s in incident.sequences if s.positions]
    largest = max((abs(x) for s in sequences for x in s.shares if math.isfinite(x)), default=0.0)
    guilty = {(c.rank, c.micro_batch, c.row, c.position) for c in incident.culprits}
    return _template().render(
        incident=incident,
        story=story,
        not_known=NOT_KNOWN,
        largest=largest,
        sequences=[_sequence(s, largest, guilty) for s in sequences],
        heats=_heats(incident),
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(number=number, percent=percent)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _shown(x: Any) -> Any:
    """Applied to all that the template prints, so that no text is forgotten. Macros give markup, already escaped."""
    return visible(x) if isinstance(x, str) and not isinstance(x, Markup) else x


def _sequence(s: SequenceShares, largest: float, guilty: set[tuple[int, int, int, int]]) -> Sequence:
    texts = s.texts if s.texts is not None and len(s.texts) == len(s.positions) else None
    ratios = s.log_ratios if s.log_ratios is not None and len(s.log_ratios) == len(s.positions) else None
    tokens = []
    for i, (position, share) in enumerate(zip(s.positions, s.shares, strict=False)):
        text = str(position) if texts is None else texts[i]
        title = f"position {position}, share {percent(share)}"
        if ratios is not None:
            title += f", log-ratio {number(ratios[i])} nats"
        kind, height = _bar(share, largest)
        at = (s.rank, s.micro_batch, s.row, position)
        tokens.append(Token(text, title, kind, height, at in guilty, texts is not None and "\n" in text))
    where = f"rank {s.rank}, micro-batch {s.micro_batch}, row {s.row}"
    return Sequence(where, percent(s.share), texts is not None, tuple(tokens))


def _bar(share: float, largest: float) -> tuple[str, float]:
    """CSS class and height of a share's bar. Shares too small to be seen have none."""
    if not math.isfinite(share):
        return "bad", _TALLEST
    height = round(_TALLEST * abs(share) / largest, 2) if largest > 0 else 0.0
    return ("", 0.0) if height < 0.02 else ("up" if share > 0 else "down", height)


def _heats(incident: Incident) -> list[tuple[str, Heat]]:
    """The worst culprit beside the step, then each other culprit by itself."""
    known = [c for c in incident.culprits if c.norms]
    tables: list[list[tuple[str, Any]]] = [[("this token", c.norms)] for c in known] or [[]]
    tables[0].append(("whole step", incident.norms))
    captions = [f"{c.where}: {story.token(c)}" for c in known] or ["Gradient norms of the whole step"]
    made = [(caption, heat(table)) for caption, table in zip(captions, tables, strict=True)]
    return [(caption, drawn) for caption, drawn in made if drawn is not None]
