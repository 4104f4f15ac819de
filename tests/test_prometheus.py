"""/metrics: real scrapes of a real run, judged by promtool."""

from __future__ import annotations

import multiprocessing
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from seismograd import CATALOGUE, Run, watch
from seismograd.telemetry.records import Reading, Row, RunInfo
from seismograd.telemetry.sinks.prometheus import PrometheusSink
from tests import tiny
from tests.conftest import require


def train(run: Run, model: tiny.PlainModel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        ids = torch.randint(0, 20, (4, 9))
        with run.step():
            logp = model(ids)
            rollout = logp.detach() + 0.01 * torch.randn_like(logp)
            advantage = torch.randn(4)
            run.tokens(
                logp=logp, rollout_logp=rollout, advantage=advantage, staleness=0, replay=lambda ids=ids: model(ids)
            )
            (-((logp - rollout).exp() * advantage[:, None]).mean()).backward()
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    torch.manual_seed(0)
    model = tiny.PlainModel()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with watch(model=model, optimizer=optimizer, runs=tmp_path, prometheus=0, probes=tiny.EVERY_STEP) as watched:
        train(watched, model, optimizer, 12)
        assert watched.flush()
        yield watched


def scrape(url: str | None) -> str:
    assert url is not None
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def test_promtool_finds_nothing_to_say(run: Run) -> None:
    text = scrape(run.prometheus_url)
    done = subprocess.run(
        [require("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_metric_of_the_catalogue_is_there(run: Run) -> None:
    text = scrape(run.prometheus_url)
    absent = {name for name, spec in CATALOGUE.items() if f"\n{spec.prometheus_name}{{" not in text}
    # A plain loop has no trainer that logs, and nothing spiked.
    assert absent == {"trainer_metric", "gradloc_seconds", "gradloc_completeness_ratio"}
    for spec in CATALOGUE.values():
        if spec.name not in absent:
            assert f"# HELP {spec.prometheus_name} {spec.help}" in text
            assert f"# TYPE {spec.prometheus_name} {spec.kind}" in text
    assert f'run="{run.name}"' in text


def test_loopback_unless_told_otherwise(run: Run) -> None:
    assert run.prometheus_url is not None
    assert run.prometheus_url.startswith("http://127.0.0.1:")
    sink = PrometheusSink(0, "0.0.0.0")
    assert sink._server.server_address[0] == "0.0.0.0"
    sink.close()


def test_port_in_use_is_one_clear_line_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = PrometheusSink(0)
    model = tiny.PlainModel()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with watch(model=model, optimizer=optimizer, runs=tmp_path, prometheus=taken.port) as run:
        train(run, model, optimizer, 2)
        assert run.prometheus_url is None
    taken.close()
    (line,) = [r.getMessage() for r in caplog.records if "metrics" in r.getMessage()]
    assert f"127.0.0.1:{taken.port}" in line
    assert "SEISMOGRAD_PROMETHEUS" in line
    assert "\n" not in line


def test_port_is_free_again_after_close(tmp_path: Path) -> None:
    model = tiny.PlainModel()
    run = watch(model=model, runs=tmp_path, prometheus=0)
    port = int(str(run.prometheus_url).rsplit(":", 1)[1].split("/")[0])
    run.close()
    again = PrometheusSink(port)
    again.close()


def test_last_value_of_a_series_stays_until_the_next() -> None:
    sink = PrometheusSink(0)
    sink.open(RunInfo("r", None, {}))
    sink.write(Row(1, 0.0, (Reading("snr", 2.0), Reading("step", 1))))
    sink.write(Row(2, 0.0, (Reading("step", 2),)))
    text = scrape(sink.url)
    sink.close()
    assert 'seismograd_snr{run="r"} 2.0' in text
    assert 'seismograd_step{run="r"} 2.0' in text


def test_port_is_free_again_though_a_forked_child_lives_on() -> None:
    """As persistent workers of a DataLoader do."""
    sink = PrometheusSink(0)
    ready, done = multiprocessing.get_context("fork").Event(), multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=lambda: (ready.set(), done.wait(60)))
    child.start()
    try:
        assert ready.wait(30)
        sink.close()
        PrometheusSink(sink.port).close()
    finally:
        done.set()
        child.join(30)
