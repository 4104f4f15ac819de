"""A sink that draws the run on the console: a bar and a live line on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from seismograd.demo.seen import CELLS, GRAD_NORM, Seen, cell
from seismograd.telemetry.records import Event, Row, RunInfo

_LOUD = {
    "spike": "bold white on red",
    "incident": "bold red",
    "fault": "bold red",
    "control": "bold green",
    "action": "green",
    "degraded": "yellow",
    "gap": "yellow",
    "note": "dim",
}


class ConsoleSink:
    """Shows each step as it arrives, on its own thread. What other threads print on the console goes above the bar.

    Args:
        out: where to draw.
        steps: of the whole run.
    """

    name = "console"

    def __init__(self, out: Console, steps: int) -> None:
        self.seen = Seen()
        self._out = out
        self._steps = steps
        self._line = Text("waiting for the first step", no_wrap=True, overflow="ellipsis")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, auto_refresh=False)
        self._task = self._progress.add_task("training", total=steps)
        self._live: Live | None = None

    def open(self, run: RunInfo) -> None:
        if self._out.is_terminal:
            self._live = Live(Group(self._progress, self._line), console=self._out, refresh_per_second=2)
            self._live.start()

    def write(self, row: Row) -> None:
        self.seen.add(row)
        if not any(reading.name == "step_seconds" for reading in row.readings):
            return  # what the trainer logged after the step; it is shown with the next
        line = live_line(self.seen, row.step, self._steps)
        if self._live is None:
            self._out.print(line)
        else:
            self._line.plain = line
            self._progress.update(self._task, completed=row.step)

    def event(self, event: Event) -> None:
        if event.kind == "spike":
            self.seen.spikes.append(event)
            signal = event.data.get("signal", "")
            self._out.print(f"SPIKE {signal}  {event.message}", style=_LOUD["spike"])
        elif event.kind == "incident":
            self.seen.incidents.append(event)
            self._out.print(f"INCIDENT {event.message}", style=_LOUD["incident"])
        elif event.kind == "control":
            self.seen.changes.append(event)
            self._out.print(f"CONTROL {event.message}", style=_LOUD["control"])
        elif event.kind == "action":
            self._out.print(f"ACTION {event.message}", style=_LOUD["action"])
        elif event.kind in _LOUD:
            self._out.print(f"{event.kind}: {event.message}", style=_LOUD[event.kind])

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def live_line(seen: Seen, step: int, steps: int) -> str:
    """The main signals of a step in one line; "-" for what was not measured (SNR where beta is 0, say)."""
    cells = "  ".join(f"{name} {percent(seen.last(*cell(name)))}" for name in CELLS)
    parts = (
        f"step {step:>3}/{steps}",
        f"alpha {number(seen.last('alpha_abs_mean'))}",
        f"beta {number(seen.last('beta_abs_mean'))}",
        f"SNR {number(seen.last('snr'))}",
        cells,
        f"|G| {number(seen.last(*GRAD_NORM))}",
        f"reward {number(seen.last('trainer_metric', 'reward'))}",
        f"overhead {percent(seen.last('overhead_ratio'))}",
    )
    return "  ".join(parts)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
