"""The live page: how long until it shows a run, how long its queries take, its memory, what being watched costs.

python -m benchmarks.page            # some ten minutes; needs chromium; writes benchmarks/results/page.md and .json
python -m benchmarks.page --quick    # two minutes, to see that it runs
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, sync_playwright

from benchmarks.overhead import bootstrap
from benchmarks.page_runs import SERIES, train_watched, write_run, write_small
from benchmarks.report import Finding, Report, table

STEPS = (1_000, 10_000, 100_000)
SELECT = "&".join(
    f"select={urllib.request.quote(text)}"
    for text in (
        '["trainer_metric","reward"]', '["trainer_metric","loss"]', '["kl","k3"]', "alpha_abs_mean", "beta_abs_mean",
        "snr", "clip_fraction", "log_ratio", '["grad_norm","all","all"]', "step_seconds",
    )
)  # fmt: skip
EVERYTHING = f"{SELECT}&select=grad_norm"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    paints: int = 7
    queries: int = 15
    runs: int = 1000
    pairs: int = 40


FULL, QUICK = Size(), Size(paints=2, queries=3, runs=100, pairs=4)


@dataclass
class Server:
    """`seismograd serve` in a process of its own."""

    process: subprocess.Popen[str]
    url: str

    def get(self, path: str) -> float:
        """Seconds until the whole answer is there."""
        start = time.perf_counter()
        with urllib.request.urlopen(f"{self.url}api/v1{path}", timeout=120) as answer:
            answer.read()
        return time.perf_counter() - start

    @property
    def memory(self) -> float:
        """Resident MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert match is not None
        return int(match[1]) / 1024


@contextmanager
def serving(runs: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "seismograd", "serve", str(runs), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = re.search(r"http://[\d.:]+/", process.stdout.readline())
        assert match is not None
        yield Server(process, match[0])
    finally:
        process.terminate()
        process.wait(30)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions: the figures mean little")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    size = QUICK if args.quick else FULL
    chromium = shutil.which("chromium")
    if chromium is None:
        parser.error("needs chromium (Debian: apt-get install chromium)")
    report = Report("The live page", "python -m benchmarks.page" + (" --quick" if args.quick else ""))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        measure(size, Path(folder), browser, report)
        browser.close()
    print(report.markdown())
    report.write(args.out, "page")


def measure(size: Size, folder: Path, browser: Browser, report: Report) -> None:
    runs = folder / "runs"
    for steps in STEPS:
        write_run(runs / f"n{steps}", steps)
    rows = []
    for steps in STEPS:
        cold = np.array([first_paint(browser, runs, steps) for _ in range(size.paints)])
        with serving(runs) as server:
            paint(browser, server, steps)
            warm = np.array([paint(browser, server, steps) for _ in range(size.paints)])
            rows.append((f"{steps:,}", *query_times(server, steps, size)))
        for what, times in (("a server just started", cold), ("again", warm)):
            report.findings.append(painted(f"headline, {steps:,} steps, {what}", times[:, 0]))
            report.findings.append(painted(f"all charts, {steps:,} steps, {what}", times[:, 1]))
    report.tables.append(f"Queries, ms, median over {size.queries}, JSON over HTTP ({SERIES} series a step):")
    head = (
        "steps",
        "10 charts",
        f"all {SERIES} series",
        "10 charts, 1,000 steps of it",
        "headline and settings",
    )
    report.tables.append(table(head, rows))
    report.findings += many_runs(size, folder / "many", browser)
    report.findings += being_watched(size, folder / "live")
    report.notes.append(
        "Headline and charts: from the navigation until they are drawn, in Chromium on loopback, by performance.mark. "
        "A server just started has read nothing of the run yet; the operating system has it in its cache."
    )


def first_paint(browser: Browser, runs: Path, steps: int) -> tuple[float, float]:
    with serving(runs) as server:
        return paint(browser, server, steps)


def paint(browser: Browser, server: Server, steps: int) -> tuple[float, float]:
    """Seconds from navigation to the headline, and to all charts."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.url}runs/n{steps}", wait_until="commit")
    entry = page.wait_for_function("() => performance.getEntriesByName('charts-drawn')[0]?.startTime", timeout=60_000)
    drawn = float(entry.json_value())
    headline = float(page.evaluate("() => performance.getEntriesByName('headline-shown')[0].startTime"))
    context.close()
    return headline / 1000, drawn / 1000


def painted(what: str, times: Any) -> Finding:
    median = float(np.median(times))
    measured = f"median {median:.2f}, largest {times.max():.2f} s of {len(times)}"
    return Finding(what, "median at most 1 s", measured, median <= 1.0, {"seconds": times.tolist()})


def query_times(server: Server, steps: int, size: Size) -> tuple[str, ...]:
    run = f"/runs/n{steps}"
    middle = steps // 2
    paths = (
        f"{run}/series?{SELECT}",
        f"{run}/series?{EVERYTHING}",
        f"{run}/series?{SELECT}&from={max(1, middle - 500)}&to={middle + 499}&points=1000",
        run,
    )
    return tuple(f"{1000 * float(np.median([server.get(path) for _ in range(size.queries)])):.0f}" for path in paths)


def many_runs(size: Size, runs: Path, browser: Browser) -> list[Finding]:
    for i in range(size.runs):
        write_small(runs / f"run-{i:04d}")
    with serving(runs) as server:
        empty = server.memory
        first = server.get("/runs")
        again = float(np.median([server.get("/runs") for _ in range(size.queries)]))
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url, wait_until="commit")
        count = "(n) => document.querySelectorAll('tbody tr').length === n && performance.now()"
        shown = float(page.wait_for_function(count, arg=size.runs).json_value()) / 1000
        context.close()
        memory = server.memory
    listed = f"first {first:.2f} s, then {1000 * again:.0f} ms; in the browser after {shown:.2f} s"
    values = {"first": first, "again": again, "shown": shown}
    grown = f"{memory:.0f} MiB, {empty:.0f} before the first request"
    held = {"before": empty, "after": memory}
    return [
        Finding(f"list of {size.runs:,} runs", "in the browser within 1 s", listed, shown <= 1.0, values),
        Finding(f"server's memory with {size.runs:,} runs", "reported", grown, None, held),
    ]


def being_watched(size: Size, runs: Path) -> list[Finding]:
    with serving(runs) as server:
        reader = subprocess.Popen([sys.executable, "-c", _READER, f"{server.url}api/v1/runs/watched"])
        try:
            found = train_watched(runs, server.process.pid, size.pairs)
        finally:
            reader.terminate()
            reader.wait(30)
    return [
        ratio("training thread, its own clock, watched / not", found.cpu),
        ratio("training step, wall clock, watched / not", found.wall),
        ratio("the store's sink, its own clock, watched / not", found.sink),
    ]


_READER = f"""
import sys, time, urllib.request
while True:
    try:
        with urllib.request.urlopen(sys.argv[1] + "/live?cursor=0-0&{EVERYTHING}", timeout=60) as stream:
            for line in stream:
                pass
    except OSError:
        time.sleep(0.2)
"""
"""A page's stream, read in a process of its own."""


def ratio(what: str, ratios: Any) -> Finding:
    median = float(np.median(ratios))
    low, high = bootstrap(ratios, np.median)
    measured = f"{median:.4f} [{low:.4f}, {high:.4f}], {len(ratios)} pairs"
    values = {"ratio": median, "interval": [low, high], "ratios": ratios.tolist()}
    return Finding(what, "1 within the interval", measured, low <= 1.0 <= high or median < 1.0, values)


if __name__ == "__main__":
    main()
