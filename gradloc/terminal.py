"""An incident as plain text for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from seismograd.gradloc import story
from seismograd.telemetry.incidents import Culprit, Incident, SequenceShares
from seismograd.telemetry.visible import NOT_KNOWN, columns, number, percent, visible

_BARS = " ▁▂▃▄▅▆▇█"
# Shares below 0 are drawn as one level: terminals have no blocks that hang from the top.
_LOWERS, _BAD = "░", "!"
# Layers named for a culprit.
_LAYERS = 5
_WIDEST_NAME = 28


def incident_text(incident: Incident, width: int = 100) -> str:
    """The incident in lines of at most `width` characters (no fewer than 40) that are all printable.

    Whatever the tokens hold, no escape sequence reaches the terminal.
    """
    width = max(width, 40)
    return "\n".join(_lines(incident, width)) + "\n"


def _lines(incident: Incident, width: int) -> Iterator[str]:
    kind, meaning = story.verdict_words(incident)
    run = f", run {incident.run}" if incident.run else ""
    head = f"step {incident.step}: {incident.verdict} {kind}{run}, {story.when(incident)}"
    yield from _wrapped(head, width, "", "  ")
    if meaning:
        yield from _wrapped(meaning, width, "  ")
    yield from _wrapped(f"What to do: {incident.advice or 'not known'}", width, "", "  ")
    yield from _listed("evidence", incident.evidence, width)
    spike = story.spike_sentence(incident.spike)
    yield from _pairs("key numbers", [*([("spike", spike)] if spike else []), *story.key_numbers(incident)], width)
    if incident.culprits:
        yield from _title("culprits, worst first", width)
        for place, culprit in enumerate(incident.culprits, 1):
            yield from _culprit(place, culprit, width)
    yield from _sequences(incident, width)
    yield from _layers(incident, width)
    told = [(name, ", ".join(f"{k} {v}" for k, v in done) or "not known") for name, done in story.controls(incident)]
    yield from _pairs("controls: what they did, or would have done", told, width)
    yield from _pairs("parts of the gradient norm", story.parts(incident), width)
    yield from _pairs("methods that were tried", [(a[0], _attempt(*a[1:])) for a in story.attempts(incident)], width)
    yield from _listed("what could not be done, and why", incident.notes, width)
    yield from _pairs("environment", list(incident.environment.items()), width)


def _attempt(outcome: str, completeness: str, passes: str, detail: str) -> str:
    return f"{outcome}; completeness {completeness}, passes {passes}" + (f", {detail}" if detail else "")


def _culprit(place: int, c: Culprit, width: int) -> Iterator[str]:
    before, after = visible(c.before or "")[-30:], visible(c.after or "")[:30]
    text = f"{before}[[{visible(story.token(c))}]]{after}"
    yield from _wrapped(f"{place}. {percent(c.share)}  {text}", width, "  ", "     ")
    values = ((name, column(c)) for name, column in story.CULPRIT_COLUMNS.items())
    known = [f"{name} {value}" for name, value in values if value != NOT_KNOWN and name != "share"]
    yield from _wrapped("; ".join(known), width, "     ")


def _sequences(incident: Incident, width: int) -> Iterator[str]:
    drawn = [s for s in incident.sequences if s.positions]
    largest = max((abs(x) for s in drawn for x in s.shares if math.isfinite(x)), default=0.0)
    if drawn:
        legend = f"bars under the text: share of the gradient norm, █ {percent(largest)}, {_LOWERS} below 0"
        yield from _title(legend, width)
    for s in drawn:
        where = f"rank {s.rank}, micro-batch {s.micro_batch}, row {s.row}"
        yield from _wrapped(f"{where}: share {percent(s.share)}", width, "  ")
        yield from _sequence(s, largest, width - 4)


def _sequence(s: SequenceShares, largest: float, width: int) -> Iterator[str]:
    """Each line of the text that has a bar, and the bars; the others are counted."""
    withheld = s.texts is None or len(s.texts) != len(s.positions)
    texts = [f"{p} " for p in s.positions] if withheld else [visible(t) for t in s.texts or ()]
    text = bars = ""
    passed = 0
    for shown, share in [*zip(texts, s.shares, strict=False), (None, 0.0)]:
        if shown is None or columns(text) + columns(shown) > width:
            if bars.strip():
                if passed:
                    yield f"    … {passed} columns without a bar"
                yield from (f"    {text}", f"    {bars.rstrip()}")
                passed = 0
            else:
                passed += columns(text)
            text = bars = ""
        if shown is not None:
            shown = shown if columns(shown) <= width else shown[: width // 2 - 1] + "…"
            text += shown
            bars += _bar(share, largest) * columns(shown)
    if passed:
        yield f"    … {passed} columns without a bar"


def _bar(share: float, largest: float) -> str:
    if not math.isfinite(share):
        return _BAD
    level = round(8 * abs(share) / largest) if largest > 0 else 0
    return _LOWERS if share < 0 and level else _BARS[level]


def _layers(incident: Incident, width: int) -> Iterator[str]:
    """Where the worst culprit's own gradient is largest, beside the step's."""
    worst = next((c for c in incident.culprits if c.norms), None)
    norms = worst.norms if worst is not None and worst.norms else incident.norms
    all_known = [(layer, group, x) for layer, groups in norms.items() if layer != "all" for group, x in groups.items()]
    found = [x for x in all_known if x[1] != "all"] or all_known
    if not found:
        return
    # NaN and inf first: they are the finding.
    found.sort(key=lambda x: x[2] if math.isfinite(x[2]) else math.inf, reverse=True)
    whose = f"{worst.where}, largest" if worst is not None else "the step, largest"
    pairs = []
    for layer, group, value in found[:_LAYERS]:
        step = incident.norms.get(layer, {}).get(group)
        beside = f" (step: {number(step)})" if worst is not None and step is not None else ""
        pairs.append((f"layer {layer}, {group}", f"{number(value)}{beside}"))
    yield from _pairs(f"gradient norms by layer and module, {whose}", pairs, width)


def _pairs(title: str, pairs: story.Pairs, width: int) -> Iterator[str]:
    if not pairs:
        return
    yield from _title(title, width)
    names = [visible(name) for name, _ in pairs]
    pad = min(max(map(columns, names)), _WIDEST_NAME)
    for name, (_, value) in zip(names, pairs, strict=True):
        space = " " * max(pad - columns(name), 0)
        yield from _wrapped(f"{name}{space}  {visible(value)}", width, "  ", " " * (pad + 4))


def _listed(title: str, sentences: tuple[str, ...], width: int) -> Iterator[str]:
    if sentences:
        yield from _title(title, width)
    for sentence in sentences:
        yield from _wrapped(f"- {sentence}", width, "  ", "    ")


def _title(title: str, width: int) -> list[str]:
    return ["", *_wrapped(title, width)]


def _wrapped(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Lines of a text made visible. Runs of spaces are kept: they may be a token."""
    return textwrap.wrap(
        visible(text),
        width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
