"""What GradLoc costs while nothing spikes: training steps with it against steps without it, interleaved one by one."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import bank
from benchmarks.overhead import Array, bootstrap
from benchmarks.report import Finding, Report
from seismograd import Run, watch
from seismograd.telemetry.forward_state import ForwardState

ROWS, LENGTH = 4, 32
WARM_UP = 20  # pairs


def measure(report: Report, pairs: int, times: int) -> None:
    """The pairs, and what our own code takes by the thread's clock."""
    with tempfile.TemporaryDirectory() as folder:
        wall, cpu, seconds = paired(pairs, Path(folder))
    report.findings += [
        _of_ratios("dormant: step time, gradloc=auto / off, interleaved", wall, "reported", None),
        _of_ratios(
            "dormant: training thread's time a step, gradloc=auto / off, interleaved", cpu, "at most 1.01", 1.01
        ),
        own_code(times),
    ]
    report.notes.append(
        f"Dormant: a plain loop on the bank's qwen3 ({ROWS} sequences of {LENGTH} tokens, one micro-batch, AdamW, "
        f"steps of {seconds * 1e3:.0f} ms), watched throughout. In pairs whose order is drawn, one with gradloc=auto, "
        "which never fires, and one with gradloc=off and without the state of the random numbers, which only replays "
        f"need. Medians of {pairs} pairs' ratios with their bootstrap 95% interval."
    )


class _Switch:
    """Puts GradLoc, and what it needs beforehand, into a run and takes it out."""

    def __init__(self, run: Run) -> None:
        self._detection: Any = run._monitor._detection
        self._localiser = self._detection._localiser
        self._take = ForwardState.__dict__["take"]
        kept = ForwardState.take(torch.device("cpu"))
        self._instead = classmethod(lambda cls, device: kept)

    def __call__(self, on: bool) -> None:
        self._detection._localiser = self._localiser if on else None
        ForwardState.take = self._take if on else self._instead  # type: ignore[method-assign]


def paired(pairs: int, folder: Path) -> tuple[Array, Array, float]:
    """(pairs,) with / without GradLoc: wall time, CPU time of the training thread; and the median step, seconds."""
    torch.manual_seed(0)
    model = bank.model("qwen3", 0).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    draw = np.random.default_rng(0)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with watch(model=model, optimizer=optimizer, runs=folder, name="run", gradloc="auto", sinks=[]) as run:
        switch = _Switch(run)
        try:
            for _ in range(WARM_UP + pairs):
                first = bool(draw.integers(2))
                for on in (first, not first):
                    ids = torch.randint(2, bank.VOCABULARY, (ROWS, LENGTH + 1))
                    switch(on)
                    since = time.perf_counter(), time.thread_time()
                    _step(model, optimizer, run, ids)
                    found[on].append((time.perf_counter() - since[0], time.thread_time() - since[1]))
                    run.flush()  # what the worker does late is no part of the next step
        finally:
            switch(True)
    assert not (folder / "run" / "incidents").exists(), "a spike fired, so that a step was not dormant"
    with_, without = (np.array(found[on])[WARM_UP:] for on in (True, False))
    ratios = with_ / without
    return ratios[:, 0], ratios[:, 1], float(np.median(without[:, 0]))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, ids: Tensor) -> None:
    with run.step():
        logp = bank.logp_of(model, ids, LENGTH)
        rollout = logp.detach() + 0.02 * torch.randn_like(logp)
        advantage = torch.tensor([[1.0], [-1.0]]).repeat(ROWS // 2, 1)
        run.tokens(
            logp=logp,
            rollout_logp=rollout,
            advantage=advantage,
            input_ids=ids,
            replay=lambda: bank.logp_of(model, ids, LENGTH),
        )
        ratio = (logp - rollout).exp()
        (-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).mean().backward()
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def own_code(times: int) -> Finding:
    """What GradLoc needs before anything has spiked: the random numbers' state at each training forward."""
    seconds = []
    for _ in range(times):
        since = time.thread_time_ns()
        ForwardState.take(torch.device("cpu"))
        seconds.append((time.thread_time_ns() - since) / 1e3)
    low, median, high = (float(x) for x in np.quantile(seconds, [0.025, 0.5, 0.975]))
    return Finding(
        "dormant: training thread's time a micro-batch", "at most 100 µs",
        f"{median:.1f} µs [{low:.1f}, {high:.1f}]", median <= 100, {"median": median, "range": [low, high]},
    )  # fmt: skip


def _of_ratios(what: str, ratios: Array, target: str, bound: float | None) -> Finding:
    median = float(np.median(ratios))
    low, high = bootstrap(ratios, np.median)
    measured = f"{median:.4f} [{low:.4f}, {high:.4f}], {len(ratios)} pairs"
    values = {"ratio": median, "interval": [low, high], "pairs": len(ratios)}
    return Finding(what, target, measured, None if bound is None else high <= bound, values)
