"""Untrusted text and any number, made readable for people. Page and terminal show both through these functions.

A token may hold anything: control characters, a mark that reverses the reading direction, nothing that can be seen.
"""

from __future__ import annotations

import math
import unicodedata

NOT_KNOWN = "not known"

_SIGNS = {"\n": "↵", "\t": "→"}
# Characters that Unicode counts as printable and that show nothing: fillers, the joiner, the blank Braille pattern.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")


def visible(text: str) -> str:
    """The text in one line, with every character to be seen: a newline as ↵, a tab as →, others as ⟨U+202E⟩.

    The result holds printable characters only, and can be encoded (lone surrogates are spelled out too).
    """
    shown = "".join(_SIGNS.get(c) or (c if _shows(c) else f"⟨U+{ord(c):04X}⟩") for c in text)
    # An accent at the start would sit on whatever stands before the text.
    return f"◌{shown}" if shown and unicodedata.category(shown[0]) in ("Mn", "Me") else shown


def columns(text: str) -> int:
    """Width of visible text on a terminal, in columns."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def number(value: object, digits: int = 4) -> str:
    """A number to `digits` significant digits; what is no number is shown as it is."""
    if value is None:
        return NOT_KNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) < 10**9:
        return str(value)
    if not isinstance(value, (int, float)):
        return visible(str(value))
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return f"{value:.{digits}g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def percent(value: object) -> str:
    """A share of 1 as a percentage."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return f"{number(100.0 * value, 3)}%"
    return number(value)


def _shows(c: str) -> bool:
    return c.isprintable() and c not in _BLANK and not ("\ufe00" <= c <= "\ufe0f" or "\U000e0100" <= c <= "\U000e01ef")
