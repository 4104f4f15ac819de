"""Gradient norms by layer and module group as a table of coloured cells, on a logarithmic scale."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from seismograd.telemetry.incidents import LayerNorms
from seismograd.telemetry.visible import number

LEVELS = 10
# Norms further below the largest than this share the palest colour, so that one tiny norm does not flatten the rest.
_DECADES = 5.0

_GROUPS = ("attention", "mlp", "norm", "embedding", "head", "other")
_BEFORE, _AFTER = ("embedding",), ("norm", "head", "other", "all")


@dataclass(frozen=True)
class Cell:
    """One norm.

    Args:
        short: about two digits, for the cell.
        title: where it is and the norm to four digits.
        kind: CSS class: "h0" to "h9", "bad" for NaN and inf, "none" where there is no such norm.
    """

    short: str
    title: str
    kind: str


@dataclass(frozen=True)
class Heat:
    """Several tables of norms side by side, over the same layers.

    Args:
        names: of the tables.
        groups: column heads of each table.
        rows: (layer, cells), the cells of all tables one after the other.
    """

    names: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def heat(tables: Sequence[tuple[str, LayerNorms | None]]) -> Heat | None:
    """The named tables that have norms, each on its own colour scale; None where none has."""
    known = [(name, norms) for name, norms in tables if norms]
    if not known:
        return None
    layers = sorted({layer for _, norms in known for layer in norms}, key=_depth)
    groups = tuple(_columns(norms) for _, norms in known)
    scales = [_scale(norms) for _, norms in known]
    rows = []
    for layer in layers:
        cells = [
            _cell(f"{name}, layer {layer}, {group}", norms.get(layer, {}).get(group), scale)
            for (name, norms), columns, scale in zip(known, groups, scales, strict=True)
            for group in columns
        ]
        rows.append((layer, tuple(cells)))
    return Heat(tuple(name for name, _ in known), groups, tuple(rows))


def _columns(norms: LayerNorms) -> tuple[str, ...]:
    """The groups worth a column: one that only names a layer of its own ("head") says what that layer's "all" says."""
    found = {group for groups in norms.values() for group in groups}
    needed = {
        group
        for group in found
        if any(group in groups and not (layer == group and "all" in groups) for layer, groups in norms.items())
    }
    named = [group for group in _GROUPS if group in needed]
    rest = sorted(needed - {*_GROUPS, "all"})
    return (*named, *rest, *(["all"] if "all" in needed else []))


def _scale(norms: LayerNorms) -> tuple[float, float]:
    """log10 of the norms of the palest and of the strongest colour. The whole model's norm has no part in it."""
    logs = [
        math.log10(value)
        for layer, groups in norms.items()
        if layer != "all"
        for value in groups.values()
        if _finite(value) and value > 0
    ]
    return (max(min(logs), max(logs) - _DECADES), max(logs)) if logs else (0.0, 0.0)


def _cell(where: str, value: float | None, scale: tuple[float, float]) -> Cell:
    if value is None:
        return Cell("", f"{where}: none", "none")
    title = f"{where}: {number(value)}"
    if not _finite(value):
        return Cell(number(value), title, "bad")
    low, high = scale
    at = 0.0 if value <= 0 else 1.0 if high <= low else (math.log10(value) - low) / (high - low)
    return Cell(_short(value), title, f"h{min(max(int(at * LEVELS), 0), LEVELS - 1)}")


def _short(value: float) -> str:
    """Two digits, or a whole number where that is as short."""
    return f"{value:.0f}" if 100 <= abs(value) < 10000 else number(value, 2)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _depth(layer: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Sorts as data flows: the embedding, numbered layers by number, the rest, the whole model."""
    place = 0 if layer in _BEFORE else 2 + _AFTER.index(layer) if layer in _AFTER else 1
    pieces = [piece for piece in re.split(r"(\d+)", layer) if piece]
    return place, [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in pieces]
