"""Series at the resolution of a screen: of each bucket of steps the smallest and the largest value, so that a spike of
one step is seen at any width.

Buckets lie on a grid of steps whose width is a power of two, the same for all series of an answer: what a live page
adds to its last bucket is what it would get by opening the run again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seismograd.dashboards.page.columns import Columns, Rows, Series
from seismograd.telemetry.catalogue import CATALOGUE

_NAMED_STEPS = 100
"""Steps with non-finite values that are named for each series; beyond, they are only counted."""


class QueryError(ValueError):
    """The message names the parameter and what it takes."""


@dataclass(frozen=True)
class Window:
    """Which steps, and how many buckets at most; 0 for every step by itself."""

    first: int | None = None
    last: int | None = None
    points: int = 600


@dataclass(frozen=True)
class Selector:
    """Series by name and label values, None for any."""

    metric: str
    labels: tuple[str | None, ...] | None = None

    def accepts(self, series: Series) -> bool:
        if series[0] != self.metric:
            return False
        return self.labels is None or all(
            want is None or want == have for want, have in zip(self.labels, series[1:], strict=True)
        )


def selector(text: str) -> Selector:
    """`kl` for all series of a metric, `["kl", "k3"]` for one, `["grad_norm", null, "all"]` for any layer.

    Raises:
        QueryError: it is neither, or the catalogue has no such metric.
    """
    parts: Any = [text]
    if text.startswith("["):
        try:
            parts = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise QueryError(f'select: not JSON ({e}); write it as ["grad_norm", null, "all"]') from e
    name, *labels = parts or [None]
    if not isinstance(name, str) or not all(x is None or isinstance(x, str) for x in labels):
        raise QueryError('select: needs a name and label values or null, as in ["grad_norm", null, "all"]')
    if name not in CATALOGUE:
        raise QueryError(f"select: the catalogue has no metric {name!r}; see /api/v1/metrics")
    if len(parts) == 1:
        return Selector(name)
    expected = CATALOGUE[name].labels
    if len(labels) != len(expected):
        raise QueryError(f"select: {name} has the labels {list(expected)}; give a value or null for each")
    return Selector(name, tuple(labels))


def selected(columns: Columns, selectors: Sequence[Selector]) -> list[Series]:
    """The run's series that a selector accepts, in the order of the selectors."""
    known = catalogued(columns.series)
    return list(dict.fromkeys(s for chosen in selectors for s in known if chosen.accepts(s)))


def catalogued(known: Iterable[Series]) -> list[Series]:
    """Those that this version's catalogue describes."""
    return [s for s in known if s[0] in CATALOGUE and len(s) == 1 + len(CATALOGUE[s[0]].labels)]


def series(columns: Columns, selectors: Sequence[Selector], window: Window) -> dict[str, Any]:
    """The answer of /series, JSON-serialisable; docs/api.md says what its fields mean."""
    rows = columns.all_rows()
    first, last, width = grid(rows, window)
    wanted = selected(columns, selectors)
    found: dict[Series, tuple[NDArray[np.int64], Buckets]] = {}
    for group, members in columns.groups(wanted):
        low, high = np.searchsorted(group.steps, (first, last + 1))
        buckets = group.steps[low:high] // width
        if len(buckets):
            starts = np.flatnonzero(np.diff(buckets, prepend=buckets[0] - 1))
            at = buckets[starts]
            for name, values in members:
                found[name] = at, _reduced(values[low:high], group.steps[low:high], starts, window.points == 0)
    grids = [at for at, _ in found.values()]
    shared = np.unique(np.concatenate(grids)) if grids else np.zeros(0, dtype=np.int64)
    return {
        "from": first,
        "to": last,
        "width": width,
        "row": columns.last,
        "step": np.maximum(shared * width, first).tolist(),
        "time": _times(rows, shared, width).tolist(),
        "series": [named(name) | _aligned(shared, *found[name]) for name in wanted if name in found],
    }


def named(name: Series) -> dict[str, Any]:
    """A series' name and labels."""
    return {"metric": name[0], "labels": dict(zip(CATALOGUE[name[0]].labels, name[1:], strict=True))}


def grid(rows: Rows, window: Window) -> tuple[int, int, int]:
    """(first step, last step, width of a bucket in steps) of a window on these rows."""
    if len(rows.steps) == 0:
        return 0, 0, 1
    first = int(rows.steps[0]) if window.first is None else window.first
    last = int(rows.steps[-1]) if window.last is None else window.last
    last = max(first, last)
    if window.points == 0:
        return first, last, 1
    width = 1
    while last // width - first // width + 1 > window.points:
        width *= 2
    return first, last, width


@dataclass(frozen=True)
class Buckets:
    """Of each bucket the smallest and largest finite value, NaN where it has none; and what was not finite."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    nonfinite: dict[str, Any] | None


def _reduced(
    values: NDArray[np.float64], steps: NDArray[np.int64], starts: NDArray[np.int64], last_of_step: bool
) -> Buckets:
    finite = np.isfinite(values)
    nonfinite = None
    if not finite.all():
        bad = np.flatnonzero(~finite)
        named = [[int(steps[i]), str(float(values[i]))] for i in bad[:_NAMED_STEPS]]
        nonfinite = {"count": len(bad), "steps": named}
        values = np.where(finite, values, np.nan)
    if len(starts) == len(values):
        return Buckets(values, values, nonfinite)
    if last_of_step:
        ends = np.append(starts[1:], len(values)) - 1
        return Buckets(values[ends], values[ends], nonfinite)
    return Buckets(np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts), nonfinite)


def _aligned(shared: NDArray[np.int64], at: NDArray[np.int64], buckets: Buckets) -> dict[str, Any]:
    """On the answer's common buckets: `value` where each holds one value, else `min` and `max`."""
    where = np.searchsorted(shared, at)
    fields: dict[str, Any] = {}
    single = buckets.low is buckets.high or np.array_equal(buckets.low, buckets.high, equal_nan=True)
    for key, values in (("value", buckets.low),) if single else (("min", buckets.low), ("max", buckets.high)):
        whole = np.full(len(shared), np.nan)
        whole[where] = values
        fields[key] = plain(whole)
    if buckets.nonfinite is not None:
        fields["nonfinite"] = buckets.nonfinite
    return fields


def plain(values: NDArray[np.float64]) -> list[float | None]:
    """For JSON: None where there is no finite value."""
    return [x if math.isfinite(x) else None for x in values.tolist()]


def _times(rows: Rows, shared: NDArray[np.int64], width: int) -> NDArray[np.float64]:
    """Unix seconds of each bucket's last row."""
    if len(shared) == 0:
        return np.zeros(0)
    ends = np.searchsorted(rows.steps, (shared + 1) * width) - 1
    return rows.times[np.clip(ends, 0, len(rows.times) - 1)]


def rows_after(columns: Columns, selectors: Sequence[Selector], after: int) -> dict[str, Any]:
    """The rows that follow row number `after`, as they are: what a live page adds to what it has."""
    wanted = selected(columns, selectors)
    everything = columns.all_rows()
    new = np.sort(everything.ids[everything.ids > after])
    place = np.argsort(everything.ids)[len(everything.ids) - len(new) :]
    found = []
    for group, members in columns.groups(wanted):
        fresh = np.flatnonzero(group.ids > after)
        if len(fresh):
            at = np.searchsorted(new, group.ids[fresh])
            for name, values in members:
                whole: list[float | str | None] = [None] * len(new)
                for i, x in zip(at.tolist(), values[fresh].tolist(), strict=True):
                    whole[i] = x if math.isfinite(x) else str(x)
                found.append(named(name) | {"value": whole})
    return {
        "row": columns.last,
        "step": everything.steps[place].tolist(),
        "time": everything.times[place].tolist(),
        "series": found,
    }
