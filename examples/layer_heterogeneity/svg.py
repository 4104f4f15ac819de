"""Line and scatter charts as SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#888888", "#111111", "#d62728", "#1f77b4", "#17a2b8", "#ff7f0e", "#9467bd")
WIDTH, HEIGHT, LEFT, TOP, BELOW = 520, 320, 52, 34, 40


@dataclass(frozen=True)
class Series:
    """One arm's points, joined or not."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """A panel.

    Args:
        title, x, y: its words.
        series: each in its colour, by its place.
        joined: as lines, else as dots.
        log_x: decades along x.
        y_range: the values at the bottom and at the top.
    """

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    joined: bool
    log_x: bool
    y_range: tuple[float, float]

    def draw(self, at: float) -> str:
        """SVG elements, moved to the right by `at`."""
        xs = [self._place(x) for s in self.series for x in s.x]
        low, high = min(xs), max(xs)
        bottom, top = self.y_range

        def px(x: float) -> float:
            return LEFT + (self._place(x) - low) / ((high - low) or 1) * (WIDTH - LEFT - 16)

        def py(y: float) -> float:
            inside = min(max(y, bottom), top)
            return TOP + (top - inside) / (top - bottom) * (HEIGHT - TOP - BELOW)

        parts = [_text(LEFT, 20, self.title, "start", bold=True), _text(WIDTH / 2, HEIGHT - 6, self.x)]
        parts.append(_text(-(HEIGHT / 2), 13, self.y, turn=True))
        for k in range(5):
            y = bottom + k * (top - bottom) / 4
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{py(y):.1f}" y2="{py(y):.1f}" stroke="#ddd"/>')
            parts.append(_text(LEFT - 6, py(y) + 4, f"{y:.2f}", "end"))
        for x in self._ticks(low, high):
            parts.append(_text(px(x), HEIGHT - 24, f"{x:g}"))
        for i, s in enumerate(self.series):
            colour = COLOURS[i % len(COLOURS)]
            points = [(px(x), py(y)) for x, y in zip(s.x, s.y, strict=True)]
            if self.joined:
                line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
            else:
                parts += [
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}" fill-opacity="0.55"/>'
                    for x, y in points
                ]
        return f'<g transform="translate({at} 0)">' + "".join(parts) + "</g>"

    def _place(self, x: float) -> float:
        return math.log10(x) if self.log_x else x

    def _ticks(self, low: float, high: float) -> list[float]:
        if self.log_x:
            return [10.0**k for k in range(math.ceil(low), math.floor(high) + 1)]
        return [low + k * (high - low) / 4 for k in range(5)]


def page(charts: Sequence[Chart]) -> str:
    """The charts side by side over one legend, as an SVG document. All have the same arms."""
    width, rows = WIDTH * len(charts), []
    names = [s.name for s in charts[0].series]
    for i, name in enumerate(names):
        x, y = LEFT + (i % 4) * 240, HEIGHT + 18 + 20 * (i // 4)
        rows.append(f'<rect x="{x}" y="{y - 9}" width="14" height="9" fill="{COLOURS[i % len(COLOURS)]}"/>')
        rows.append(_text(x + 20, y, name, "start"))
    height = HEIGHT + 20 * math.ceil(len(names) / 4) + 16
    body = "".join(chart.draw(i * WIDTH) for i, chart in enumerate(charts)) + "".join(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _text(x: float, y: float, words: str, anchor: str = "middle", bold: bool = False, turn: bool = False) -> str:
    more = ' font-weight="bold"' if bold else ""
    more += ' transform="rotate(-90)"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'
