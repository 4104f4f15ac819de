"""The demo's last words: what the run was, what spiked and why, what it cost, where to look."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from seismograd.demo.console import number, percent
from seismograd.demo.faults import Planted, PlantedLayer
from seismograd.demo.seen import CELLS, GRAD_NORM, Seen, cell
from seismograd.telemetry.incidents import VERDICTS
from seismograd.telemetry.records import Event
from seismograd.telemetry.rules import RULES
from seismograd.telemetry.visible import visible

_ADVICE = {rule.signal: rule.advice for rule in RULES}


def print_summary(
    out: Console,
    seen: Seen,
    faults: Sequence[Planted | PlantedLayer],
    steps: int,
    seconds: float,
    store: Path | None,
    url: str | None,
) -> None:
    """Print it.

    Args:
        out: where to.
        seen: what the console sink has collected.
        faults: those that were planted. Their steps are left out of the run's medians and means.
        steps: optimizer steps done.
        seconds: of training.
        store: the run store's file, None where none was written.
        url: of /metrics, None where it is off.
    """
    but = [fault.step for fault in faults]
    alpha, beta, snr, norm = (
        number(seen.over_run(*s, but=but)) for s in (("alpha_abs_mean",), ("beta_abs_mean",), ("snr",), GRAD_NORM)
    )
    cells = (f"{name} {percent(seen.over_run(*cell(name), by=statistics.fmean, but=but))}" for name in CELLS)
    out.print()
    out.print("Summary", style="bold")
    out.print(f"  {steps} steps in {seconds:.0f} s" + (" (figures below without the faulty ones)" if faults else ""))
    out.print(f"  |alpha| {alpha}  what the policy changed since the rollout, nats, median")
    out.print(f"  |beta|  {beta}  the gap of precision, FP32 training against BF16 rollout, nats, median")
    out.print(f"  SNR     {snr}  |alpha| / |beta|, median")
    out.print(f"  |G|     {norm}  gradient norm before clipping, median")
    out.print(f"  tokens  {'  '.join(cells)}  (mean)")
    out.print("          legitimate: clipped by the actual and the clean ratio; phantom: only by the actual one,")
    out.print("          precision noise took the gradient; hidden: only by the clean one; open: by neither")
    _spikes(out, seen.spikes, faults)
    _incidents(out, seen.incidents, faults)
    _controls(out, seen.changes)
    _cost(out, seen)
    out.print("Where to look", style="bold")
    if url is not None:
        out.print(f"  metrics    curl {url} while it runs; --hold 600 keeps it up for ten minutes more")
    if store is not None:
        out.print(f"  run        {store.parent}")
        for event in seen.incidents:
            if event.data.get("path"):
                out.print(f"  incident   seismograd incident {event.data['path']}, or the .html beside it in a browser")
        out.print(f"  spikes     sqlite3 {store} \"select step, message from events where kind = 'spike'\"")


def _spikes(out: Console, spikes: list[Event], faults: Sequence[Planted | PlantedLayer]) -> None:
    out.print("Spikes", style="bold")
    if not spikes:
        out.print("  none")
    for step, group in itertools.groupby(sorted(spikes, key=lambda e: e.step), key=lambda e: e.step):
        events = list(group)
        planted = next((fault for fault in faults if fault.step == step), None)
        out.print(f"  step {step}" + (": not planted, the run's own" if planted is None else ": planted by the demo"))
        for event in events:
            signal = event.data.get("signal", "")
            out.print(f"    {signal}: {event.message.removeprefix(f'step {step}: ')}")
        if planted is not None:
            out.print(f"    why: {planted.why()}")
        signals = [str(event.data.get("signal", "")) for event in events]
        out.print(f"    look at: {_ADVICE.get(signals[0], '')}")
    for fault in faults:
        if not any(event.step == fault.step for event in spikes):
            out.print(f"  NOTHING fired on the planted fault of step {fault.step}", style="bold red")


def _incidents(out: Console, incidents: list[Event], faults: Sequence[Planted | PlantedLayer]) -> None:
    """What GradLoc found, from the gradients of the same step."""
    out.print("Incidents", style="bold")
    if not incidents:
        out.print("  none")
    for event in incidents:
        data = event.data
        out.print(f"  step {event.step}: {data['verdict']}, {VERDICTS[data['verdict']]}")
        for culprit in data["culprits"][:3]:
            text = visible(f"...{culprit['before'] or ''}[{culprit['text']}]{culprit['after'] or ''}...")
            ours = any(names(event, fault, culprit) for fault in faults)
            out.print(
                f"    row {culprit['row']}, position {culprit['position']}, {culprit['share']:.0%} of |G|"
                + (": what the demo planted" if ours else "")
            )
            out.print(f"      {text}", markup=False)
        for sentence in data["evidence"]:
            out.print(f"    because {sentence}")
        out.print(f"    cure: {data['advice']}")
        sums = "" if data["completeness"] is None else f", the tokens' shares add up to {data['completeness']:.4f} |G|"
        out.print(f"    by {data['method']}, in {data['seconds']:.2f} s{sums}")


def _controls(out: Console, changes: list[Event]) -> None:
    """What protected the run, and since when."""
    out.print("Controls", style="bold")
    if not changes:
        out.print("  none was switched on")
    for event in changes:
        out.print(f"  {event.message}")


def names(event: Event, planted: Planted | PlantedLayer, culprit: Mapping[str, Any]) -> bool:
    """Whether the culprit is what was planted."""
    return event.step == planted.step and planted.guilty(culprit["row"], culprit["position"])


def _cost(out: Console, seen: Seen) -> None:
    out.print("What it cost", style="bold")
    parts = sorted(seen.last_by_label("hook_seconds").items(), key=lambda part: -part[1])
    out.print(f"  {percent(seen.last('overhead_ratio'))} of the step time, its probes included")
    out.print("  last step, ms: " + ", ".join(f"{part} {1000 * s:.3g}" for part, s in parts))
