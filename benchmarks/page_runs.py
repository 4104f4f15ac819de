"""Runs for the page's benchmark: stores of any size, and a loop that is watched by turns."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from seismograd import Event, Reading, Row, RunInfo, RunStore, watch

SERIES = 200
CELLS = ("legitimate", "phantom", "hidden", "open")


def series() -> list[tuple[str, ...]]:
    """200 series as a run of 45 layers has them."""
    fixed: list[tuple[str, ...]] = [
        *[("trainer_metric", name) for name in ("reward", "loss", "entropy")],
        *[(name,) for name in ("alpha_abs_mean", "beta_abs_mean", "snr", "overhead_ratio", "step_seconds")],
        ("kl", "k3"),
        *[("clip_fraction", cell, "ppo") for cell in CELLS],
        *[("log_ratio", stat) for stat in ("mean", "min", "max")],
        *[("sequence_log_ratio", stat) for stat in ("mean", "min", "max")],
        ("loss_weight", "abs_max"),
        ("grad_norm", "all", "all"),
    ]
    layers = [("grad_norm", str(i), group) for i in range(60) for group in ("all", "attention", "mlp", "norm")]
    return [*fixed, *layers][:SERIES]


def write_run(folder: Path, steps: int) -> None:
    """A finished run of that many steps, written as the sink writes it but for one commit in all."""
    folder.mkdir(parents=True)
    columns = series()
    random = np.random.default_rng(steps)
    with RunStore.create(
        folder / "run.db", RunInfo(folder.name, str(folder), {}, started=time.time() - steps)
    ) as store:
        layout = store._layout(tuple(columns))
        store._db.execute("BEGIN")
        for first in range(0, steps, 1000):
            values = np.exp(random.normal(scale=0.3, size=(min(1000, steps - first), SERIES)))
            rows = [(first + i + 1, time.time(), layout, row.tobytes()) for i, row in enumerate(values)]
            store._db.executemany("INSERT INTO steps (step, time, layout, row) VALUES (?, ?, ?, ?)", rows)
        store._db.execute("COMMIT")
        store.event(Event("run_end", "ended"))


def write_small(folder: Path) -> None:
    """A run of 3 steps, as many as a list needs."""
    folder.mkdir(parents=True)
    with RunStore.create(folder / "run.db", RunInfo(folder.name, str(folder), {})) as store:
        for step in range(1, 4):
            store.write(
                Row(step, time.time(), (Reading("kl", 0.01, {"estimator": "k3"}), Reading("step_seconds", 1.0)))
            )
        store.event(Event("run_end", "ended"))


@dataclass(frozen=True)
class Watched:
    """A block of steps with the page's server at work beside one with it stopped, pair by pair.

    Args:
        wall, cpu: (P,) time of the training thread with the page over without, by wall clock and by its own clock.
        sink: (P,) the same of the store's sink, on its own thread.
    """

    wall: NDArray[np.float64]
    cpu: NDArray[np.float64]
    sink: NDArray[np.float64]


def train_watched(runs: Path, server: int, pairs: int, steps: int = 40) -> Watched:
    """A plain loop of about 20 ms a step. The server, a process with a reader on its stream, is stopped in every other
    block; which of a pair comes first alternates.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(12)])
    head = torch.nn.Linear(256, 50)
    both = torch.nn.ModuleList([model, head])
    optimizer = torch.optim.SGD(both.parameters(), 1e-3)
    inputs, ids = torch.randn(8, 33, 256), torch.randint(0, 50, (8, 33))
    run = watch(model=both, optimizer=optimizer, runs=str(runs), name="watched")

    def block() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            with run.step():
                logp = head(model(inputs[:, :-1])).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
                run.tokens(logp=logp, rollout_logp=logp.detach() + 0.01, advantage=torch.ones(8), input_ids=ids)
                (-logp.mean()).backward()
                run.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return (time.perf_counter() - wall) / steps, (time.thread_time() - cpu) / steps

    block()
    found = []
    marks = []
    try:
        for i in range(pairs):
            measured: dict[bool, tuple[float, float]] = {}
            for with_page in (i % 2 == 0, i % 2 == 1):
                os.kill(server, signal.SIGCONT if with_page else signal.SIGSTOP)
                time.sleep(0.6)  # what came meanwhile is read before the block begins
                measured[with_page] = block()
                marks.append(with_page)
            found.append([a / b for a, b in zip(measured[True], measured[False], strict=True)])
    finally:
        os.kill(server, signal.SIGCONT)
    run.close()
    assert run.store_path is not None
    with RunStore.read(run.store_path) as store:
        sink = np.array([value for _, value in store.series("hook_seconds", part="sink_store")])
    blocks = [sink[(1 + i) * steps : (2 + i) * steps].mean() for i in range(2 * pairs)]
    with_page = np.array([b for b, m in zip(blocks, marks, strict=True) if m])
    without = np.array([b for b, m in zip(blocks, marks, strict=True) if not m])
    ratios = np.array(found)
    return Watched(ratios[:, 0], ratios[:, 1], with_page / without)
