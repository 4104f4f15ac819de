"""What watching costs: time in our own code, with against without the hook, hand-over, scrape, transfers.

python -m benchmarks.overhead                # under ten minutes; writes benchmarks/results/overhead.md and .json
python -m benchmarks.overhead --quick        # a minute or two, to see that it runs
python -m benchmarks.overhead --threads 1    # on a machine that others use too
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import grpo, transfers
from benchmarks.report import Finding, Report, table
from seismograd import Reading, Row, Run, RunInfo, RunStore, watch
from seismograd.collectors.budget import PROBES
from seismograd.telemetry.sinks.prometheus import PrometheusSink

Array = NDArray[np.float64]

DISCARDED = 5  # steps at the beginning of a run: first calls into torch, first use of each part
SCALARS, SERIES = 1_000, 3_000


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    steps_free: int = 45
    steps_probes: int = 95
    pairs: int = 70
    handovers: int = 400
    scrapes: int = 60
    seconds: float = 120.0
    """At most, for each of the first two parts; twice that for the pairs."""


FULL = Size()
QUICK = Size(steps_free=DISCARDED + 5, steps_probes=DISCARDED + 5, pairs=4, handovers=60, scrapes=10, seconds=25)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: the figures mean little")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--threads", type=int, help="torch's threads; all cores where not given")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    size = QUICK if args.quick else FULL
    given = sys.argv[1:] if argv is None else list(argv)
    shown = [word for i, word in enumerate(given) if "--out" not in (word, given[i - 1] if i else "")]
    report = Report("What watching costs", " ".join(["python -m benchmarks.overhead", *shown]))
    with tempfile.TemporaryDirectory() as folder:
        measure(size, Path(folder), report)
    if args.quick:
        report.notes.insert(0, "A quick run: too few steps for its figures to mean much.")
    report.write(args.out, "overhead")
    print(report.markdown())
    failed = [f.what for f in report.findings if f.passed is False]
    print(f"\n{'every target is met' if not failed else 'MISSED: ' + '; '.join(failed)}; written to {args.out}")


def measure(size: Size, folder: Path, report: Report) -> None:
    """All parts, into the report."""
    say("always-on signals only")
    free = own_time(size.steps_free, size.seconds, folder / "free", probes=dict.fromkeys(PROBES, 0))
    say("with the default probe budget")
    default = own_time(size.steps_probes, size.seconds, folder / "default", probes=None)
    say("with and without, interleaved")
    wall, cpu = paired(size, folder / "paired")
    say("transfers")
    counted = transfers.count(folder / "transfers")
    say("hand-over")
    of_step, of_log = handover(size.handovers, folder / "handover")
    say("scrape")
    scrapes = scrape(size.scrapes)

    report.findings += [
        of_share("own code over step time, always-on signals only", free, 0.01),
        of_share("own code over step time, default probe budget", default, 0.02),
        of_pairs("step time with / without the hook, interleaved", wall, default),
        of_pairs("CPU time with / without the hook, interleaved", cpu, default),
        of_times(f"hand-over of a step with {SCALARS:,} series, training thread", of_step * 1e6, 100, "µs"),
        of_times(f"hand-over of a log of {SCALARS:,} scalars, training thread", of_log * 1e6, 100, "µs"),
        of_times(f"scrape of {SERIES:,} series over HTTP", scrapes * 1e3, 100, "ms", "p95"),
        of_transfers(counted),
    ]
    report.tables += [
        f"By part, always-on signals only ({len(free.steps)} steps):\n\n{by_part(free)}",
        f"By part, default probe budget ({len(default.steps)} steps; {probe_runs(default)}):\n\n{by_part(default)}",
    ]
    report.notes += notes(default, free, counted)


def say(what: str) -> None:
    print(f"measuring: {what} ...", file=sys.stderr, flush=True)


# -- time in our own code ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnTime:
    """What a run's store says of its cost: (n,) seconds by step and part, and (n,) seconds of the steps."""

    parts: dict[str, Array]
    steps: Array
    with_first: float
    """Our time over step time, no step left out."""

    @property
    def total(self) -> Array:
        return np.sum(list(self.parts.values()), axis=0)

    @property
    def plain(self) -> float:
        """Our time over step time, whatever else the machine did."""
        return float(self.total.sum() / self.steps.sum())

    @property
    def quiet(self) -> float:
        """Seconds of a step when nobody else uses the machine much, so that a busy one flatters no share."""
        return float(np.quantile(self.steps, 0.25))

    def share(self) -> tuple[float, float, float]:
        """Mean of our time over a quiet step, and its bootstrap 95% interval."""
        low, high = bootstrap(self.total, np.mean)
        return float(self.total.mean() / self.quiet), low / self.quiet, high / self.quiet

    def runs(self, part: str) -> int:
        """Steps on which the part took any time."""
        return int((self.parts.get(part, np.zeros(0)) > 0).sum())


def own_time(steps: int, seconds: float, folder: Path, probes: dict[str, int] | None) -> OwnTime:
    """Train watched, with store and Prometheus, and read the store."""
    trainer = grpo.trainer(folder, steps, seconds)
    with watch(trainer, runs=folder, name="run", probes=probes, prometheus=0):
        trainer.train()
    return read_cost(folder / "run" / "run.db")


def read_cost(path: Path) -> OwnTime:
    """Of a run's store."""
    with RunStore.read(path) as store:
        rows = [{(r.name, *r.labels.values()): r.value for r in row.readings} for row in store.rows()]
    rows = [row for row in rows if ("step_seconds",) in row]
    names = sorted({key[1] for row in rows for key in row if key[0] == "hook_seconds"})
    parts = {name: np.array([row.get(("hook_seconds", name), 0.0) for row in rows]) for name in names}
    steps = np.array([row["step_seconds",] for row in rows])
    total = sum(seconds.sum() for seconds in parts.values())
    return OwnTime({name: x[DISCARDED:] for name, x in parts.items()}, steps[DISCARDED:], float(total / steps.sum()))


def probe_runs(cost: OwnTime) -> str:
    """How often each probe ran."""
    return ", ".join(f"{probe} on {cost.runs(f'probe_{probe}')}" for probe in PROBES)


def by_part(cost: OwnTime) -> str:
    """Where our time goes."""
    rows = []
    for name, seconds in sorted({**cost.parts, "all": cost.total}.items(), key=lambda item: -item[1].mean()):
        own = name == "worker" or name.startswith("sink_")
        low, median, high = np.quantile(seconds, [0.025, 0.5, 0.975]) * 1e3
        thread = "all" if name == "all" else "own" if own else "training"
        share = f"{seconds.mean() / cost.quiet:.3%}"
        rows.append((name, thread, f"{seconds.mean() * 1e3:.2f}", f"{median:.2f} [{low:.2f}, {high:.2f}]", share))
    return table(("part", "thread", "mean, ms", "median [95% of steps], ms", "mean over a step"), rows)


# -- with and without -------------------------------------------------------------------------------------------------


class Alternation:
    """Watches every other step of a trainer and times each, in pairs whose order is drawn.

    A watched step lasts until its row is written, so that what the worker does late counts.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._draw = run, np.random.default_rng(0)
        self._watched, self._first = True, True
        self.steps: list[tuple[bool, float, float]] = []
        """Watched or not, wall seconds and CPU seconds of the process."""
        self._since: tuple[float, float] | None = None

    def __call__(self) -> None:
        """Between two steps."""
        if self._since is not None:
            if self._watched:
                self._run.flush()
            wall, cpu = self._since
            self.steps.append((self._watched, time.perf_counter() - wall, time.process_time() - cpu))
        if len(self.steps) % 2 == 0:
            self._first = bool(self._draw.integers(2))
        self._watch(self._first if len(self.steps) % 2 == 0 else not self._first)
        self._since = time.perf_counter(), time.process_time()

    def _watch(self, want: bool) -> None:
        adapter: Any = self._run._adapter
        if want and not self._watched:
            adapter.attach(self._run._monitor, self._run._hub)
        elif self._watched and not want:
            adapter.detach()
        self._watched = want


def paired(size: Size, folder: Path) -> tuple[Array, Array]:
    """(pairs,) with / without the hook: wall time, CPU time. The first pairs warm up and are left out."""
    trainer = grpo.trainer(folder, 2 * (size.pairs + DISCARDED // 2) + 1, 2 * size.seconds)
    with watch(trainer, runs=folder, name="run", prometheus=0) as run:
        trainer.between = alternation = Alternation(run)
        trainer.train()
    steps = alternation.steps[DISCARDED // 2 * 2 : len(alternation.steps) // 2 * 2]
    ratios = []
    for pair in zip(steps[::2], steps[1::2], strict=True):
        (_, *without), (_, *with_) = sorted(pair)
        ratios.append(np.divide(with_, without))
    wall, cpu = np.array(ratios).T
    return wall, cpu


# -- hand-over and scrape ---------------------------------------------------------------------------------------------


class _Block(torch.nn.Module):
    """The least that has a norm for its attention, its MLP and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = (torch.nn.Linear(1, 1, bias=False) for _ in range(3))


class _Deep(torch.nn.Module):
    """A model of so many layers that a step has a thousand series."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([_Block() for _ in range(SCALARS // 4)])


def handover(times: int, folder: Path) -> tuple[Array, Array]:
    """Seconds of the training thread, by its own clock, of handing a step over and of handing a log over."""
    model = _Deep()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    values = {f"metric_{i}": float(i) for i in range(SCALARS)}
    of_log = []
    with watch(model=model, runs=folder, name="steps") as run:
        for i in range(times):
            with run.step():
                run.clip_grad_norm_(1.0)
            if i % 8 == 7:  # the worker must not fall behind: what finds the queue full is not handed over
                run.flush()
        run.flush()
        for i in range(times):
            since = time.thread_time_ns()
            run._monitor.log(i, values)
            of_log.append((time.thread_time_ns() - since) / 1e9)
            if i % 8 == 7:
                run.flush()
    with RunStore.read(folder / "steps" / "run.db") as store:
        series = [sum(r.name == "grad_norm" for r in row.readings) for row in store.rows()]
        seconds = [seconds for _, seconds in store.series("hook_seconds", part="handover")]
    assert max(series) >= SCALARS
    return np.array(seconds)[DISCARDED:times], np.array(of_log)[DISCARDED:]


def scrape(times: int) -> Array:
    """Seconds of a GET of /metrics, the body read."""
    sink = PrometheusSink(0)
    sink.open(RunInfo("overhead", None, {}))
    labels = [{"layer": str(layer), "group": group} for layer in range(SERIES // 4) for group in ("all", "a", "b", "c")]
    sink.write(Row(1, 0.0, tuple(Reading("grad_norm", 0.1 * i, label) for i, label in enumerate(labels))))
    seconds = []
    for _ in range(times):
        since = time.perf_counter()
        with urlopen(sink.url, timeout=30) as answer:
            text = answer.read()
        seconds.append(time.perf_counter() - since)
    sink.close()
    assert sum(not line.startswith(b"#") for line in text.splitlines()) == SERIES
    return np.array(seconds)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def bootstrap(values: Array, statistic: Callable[..., Any]) -> tuple[float, float]:
    """95% interval of a statistic over resamples of the values."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.quantile(statistic(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


def of_share(what: str, cost: OwnTime, target: float) -> Finding:
    share, low, high = cost.share()
    measured = (
        f"{share:.2%} [{low:.2%}, {high:.2%}] of a quiet step of {cost.quiet:.2f} s; {cost.plain:.2%} of all steps"
    )
    values = {
        "share": share,
        "interval": [low, high],
        "share_of_all_steps": cost.plain,
        "step_seconds": cost.quiet,
        "steps": len(cost.steps),
        "mean_seconds_by_part": {name: float(seconds.mean()) for name, seconds in cost.parts.items()},
    }
    return Finding(what, f"at most {target:.0%}", measured, share <= target, values)


def of_pairs(what: str, ratios: Array, cost: OwnTime) -> Finding:
    median = float(np.median(ratios))
    low, high = bootstrap(ratios, np.median)
    expected = 1 + cost.share()[0]
    measured = f"{median:.4f} [{low:.4f}, {high:.4f}], {len(ratios)} pairs"
    values = {"ratio": median, "interval": [low, high], "expected": expected, "ratios": ratios.tolist()}
    return Finding(what, f"interval not above {expected:.4f}", measured, low <= expected, values)


def of_times(what: str, times: Array, target: float, unit: str, judged: str = "median") -> Finding:
    """Judged by the median, or by "p95", which one hiccup of a shared machine does not move; the largest is shown."""
    p95, p99 = np.quantile(times, [0.95, 0.99])
    values = {"median": np.median(times), "p95": p95, "p99": p99, "max": times.max()}
    values = {name: float(value) for name, value in values.items()}
    measured = ", ".join(f"{name} {value:.1f}" for name, value in values.items()) + f" {unit}"
    passed = values[judged] <= target
    return Finding(
        what, f"{judged} at most {target} {unit}", measured, passed, {"unit": unit, "n": len(times), **values}
    )


def of_transfers(counted: transfers.Counted) -> Finding:
    measured = f"{counted.usual} a step: {counted.where}"
    passed = counted.usual == 1 and not counted.others
    values = {"by_step": counted.by_step, "where": counted.where, "other_synchronising_calls": counted.others}
    return Finding("transfers from the device", "1 a step", measured, passed, values)


def notes(default: OwnTime, free: OwnTime, counted: transfers.Counted) -> list[str]:
    """What one must know to read the figures."""
    low, high = np.quantile(free.steps, [0.1, 0.9])
    others = ", ".join(f"{place} x{n}" for place, n in counted.others.items())
    said = [
        f"Workload: TRL's GRPOTrainer, FP32, a random Qwen3 of 12.6 million parameters, {grpo.COMPLETIONS} completions "
        f"of {grpo.TOKENS} tokens a step, rollout log-probs from a BF16 forward; run store and /metrics on.",
        "Own code is timed by the clock of the thread that runs it, worker and sinks included: `hook_seconds` of the "
        "run store. It is held against a quiet step, the first quartile of step times, so that a busy machine "
        "flatters no share; intervals of shares are bootstrapped over steps. A scrape runs on the server's thread and "
        "is not in it: see its own line.",
        f"The first {DISCARDED} steps of each run are left out. They hold torch's and our own first calls, and the "
        "first probes, which are paid back before the next. With them, the run with the default budget spent "
        f"{default.with_first:.2%} in own code from its first step on.",
        "With / without: the hook is put on and taken off between the steps of one run, in pairs whose order is drawn, "
        "probes on their budget; a watched step ends when its row is written. Median of the pairs' ratios with its "
        "bootstrap 95% interval, which says little of probes, since few steps have one; the target is that it does not "
        "contradict the share above. CPU time is the process'.",
        f"Hand-over: a model whose gradients have {SCALARS:,} series or more, and a log of {SCALARS:,} numbers, by the "
        "training thread's clock. In the GRPO run, with cold caches and one of each a step, it is the part `handover`.",
        "Transfers: calls of `Transfer.fetch` by step, and beside them calls in our files that make the host wait for "
        "a device (`.item()`, `.cpu()`, a mask as an index, ...), counted at torch's Python interface with all probes "
        f"on every step: {others or 'none'}.",
    ]
    if high > 1.5 * low:
        said.append(
            f"The machine was busy: a tenth of the steps took over {high:.2f} s, a tenth under {low:.2f} s. Take "
            "--threads 1 where others use the machine too."
        )
    return said


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
