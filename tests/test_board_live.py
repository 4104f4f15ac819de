"""The board and the alert on a real run: the tiny demo, a real Prometheus, and the values of Grafana's variables."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from seismograd.dashboards.generated import checkout
from seismograd.dashboards.prometheus.rules import alert_name
from tests.conftest import require

pytestmark = pytest.mark.slow

ROOT = checkout()
BOARD: dict[str, Any] = json.loads((ROOT / "dashboards/boards/run.json").read_text())
EVERY = [inner for panel in BOARD["panels"] for inner in (panel, *panel.get("panels", []))]
PANELS = [panel for panel in EVERY if panel["type"] != "row"]

DEMO = "import sys; from seismograd.cli import main; sys.exit(main(sys.argv[1:]))"
HOLD_SECONDS = 300
"""How long the demo would keep /metrics up; it is ended as soon as the tests are done."""
FAULT_WITHIN_SECONDS = 180
ALERT_WITHIN_SECONDS = 30
SCRAPE = "500ms"


@dataclass
class Live:
    """A Prometheus that has scraped a run with a planted fault, and still does.

    Args:
        url: of Prometheus.
        start: Unix seconds at which it started.
        chosen: each of the board's variables with all its values.
    """

    url: str
    start: float
    chosen: dict[str, list[str]] = field(default_factory=dict)

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of Prometheus' HTTP API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def series(self, expr: str) -> list[dict[str, Any]]:
        """What Grafana would draw: the series of a range query over the whole run, those with a value only."""
        end = time.time()
        found = self.get("query_range", query=expr, start=f"{self.start:.3f}", end=f"{end:.3f}", step="1")["result"]
        return [series for series in found if any(not math.isnan(float(value)) for _, value in series["values"])]

    def filled_in(self, text: str, **repeated: str) -> str:
        """`text` with Grafana's variables replaced; those of a repeated panel have one value."""
        values = {
            "__rate_interval": "4s",
            "__range": f"{math.ceil(time.time() - self.start)}s",
            **{name: found[0] for name, found in self.chosen.items() if name in ("job", "run")},
            "layer": next(v["allValue"] for v in BOARD["templating"]["list"] if v["name"] == "layer"),
            # Grafana escapes the values of variables that may have several.
            **{name: re.escape(value).replace("\\", "\\\\") for name, value in repeated.items()},
        }
        return re.sub(r"\$(\w+)", lambda found: values.get(found[1], found[0]), text)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Prometheus first, then the run, until the planted fault has been scraped."""
    prometheus = require("prometheus")
    for package in ("trl", "reasoning_gym"):
        pytest.importorskip(package, reason=f"the demo needs {package}")
    folder = tmp_path_factory.mktemp("live")
    run_port, port = _free_port(), _free_port()
    config = yaml.safe_load((ROOT / "dashboards/provisioning/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE}
    config["rule_files"] = [str(ROOT / "dashboards/prometheus/seismograd.rules.yml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{run_port}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    server = [
        prometheus,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    demo = ["demo", "--tiny", "--port", str(run_port), "--runs", str(folder / "runs"), "--hold", str(HOLD_SECONDS)]
    found = Live(f"http://127.0.0.1:{port}", time.time())
    with (
        _running(server, folder, "prometheus") as scraper,
        _running([sys.executable, "-c", DEMO, *demo], folder, "demo") as run,
    ):

        def spiked() -> bool:
            scraper.check()
            run.check()
            # Some seconds old, so that the points of a range query lie behind it too.
            spikes = 'seismograd_spikes_total{signal="grad_norm"} offset 3s > 0'
            return bool(found.get("query", query=spikes)["result"])

        _wait("the planted fault", FAULT_WITHIN_SECONDS, spiked)
        for variable in BOARD["templating"]["list"]:
            if variable["type"] == "query":
                found.chosen[variable["name"]] = _label_values(found, variable["query"]["query"])
        yield found


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_every_query_of_the_panel_finds_data(live: Live, panel: dict[str, Any]) -> None:
    repeated: str | None = panel.get("repeat")
    for value in live.chosen[repeated] if repeated else [""]:
        for target in panel["targets"]:
            expr = live.filled_in(target["expr"], **({repeated: value} if repeated else {}))
            found = live.series(expr)
            assert found, f"no data for {expr}"
            names = [re.sub(r"\{\{(\w+)\}\}", lambda m: s["metric"][m[1]], target["legendFormat"]) for s in found]  # noqa: B023
            assert len(set(names)) == len(names), f"two series of one name: {names}"


def test_every_variable_has_values(live: Live) -> None:
    assert live.chosen["job"] == ["seismograd"]
    assert len(live.chosen["run"]) == 1
    assert len(live.chosen["layer"]) >= 3
    assert "all" not in live.chosen["layer"]
    assert live.chosen["ratio"]
    assert len(live.chosen["trainer_metric"]) > 5


def test_layers_are_in_their_order(live: Live) -> None:
    for panel in PANELS:
        if panel["type"] == "heatmap":
            found = live.series(live.filled_in(panel["targets"][0]["expr"]))
            layers = [series["metric"]["layer"] for series in found]
            assert layers == sorted(layers)
            assert len(layers) == len(live.chosen["layer"])
            assert layers[:2] == ["000", "001"]


def test_the_spike_is_marked(live: Live) -> None:
    (mark,) = BOARD["annotations"]["list"]
    signals = {series["metric"]["signal"] for series in live.series(live.filled_in(mark["target"]["expr"]))}
    assert "grad_norm" in signals


def test_the_alert_fires_and_honest_signals_stay_quiet(live: Live) -> None:
    def firing() -> dict[str, dict[str, Any]]:
        alerts = live.get("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}

    _wait("the alert", ALERT_WITHIN_SECONDS, lambda: alert_name("grad_norm") in firing())
    alert = firing()[alert_name("grad_norm")]
    assert alert["labels"]["severity"] == "critical"
    assert alert["labels"]["run"] == live.chosen["run"][0]
    assert live.chosen["run"][0] in alert["annotations"]["summary"]
    assert not {alert_name(signal) for signal in ("nonfinite", "alpha_floor", "beta")} & set(firing())


def test_prometheus_evaluates_every_rule(live: Live) -> None:
    rules = [rule for group in live.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]


def test_the_scrape_has_no_errors(live: Live) -> None:
    (target,) = live.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")


def _label_values(live: Live, query: str) -> list[str]:
    """Grafana's label_values(SELECTOR, LABEL)."""
    selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
    found: list[str] = live.get(f"label/{label}/values", **{"match[]": live.filled_in(selector)})
    return found


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class _running:
    """A process of one's own, ended by its own handle however the block ends."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            environment = {**os.environ, "WANDB_MODE": "disabled"}
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment)

    def check(self) -> None:
        """Fails where the process has ended before its time, with what it said."""
        if self._process.poll() is not None:
            pytest.fail(f"it ended early:\n{self._log.read_text()[-4000:]}")

    def __enter__(self) -> _running:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _wait(what: str, seconds: float, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if done():
                return
        except OSError:  # not listening yet
            pass
        time.sleep(0.5)
    pytest.fail(f"{what} did not come within {seconds:.0f} s")
