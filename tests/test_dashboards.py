"""The generated files: up to date, complete, and valid for promtool. Grafana itself is not run here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from seismograd.dashboards.__main__ import main
from seismograd.dashboards.boards.queries import metrics_in, series
from seismograd.dashboards.boards.run import run_board
from seismograd.dashboards.generated import GENERATED, Generated, checkout
from seismograd.dashboards.prometheus.rules import alert_name, alerts
from seismograd.telemetry.baselines import Above
from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.rules import RULES, Rule, Selection, on_probe, promql
from tests.conftest import require

ROOT = checkout()
BOARD: dict[str, Any] = json.loads((ROOT / "dashboards/boards/run.json").read_text())
RULES_FILE = ROOT / "dashboards/prometheus/seismograd.rules.yml"
RULES_TEST = ROOT / "dashboards/prometheus/seismograd.rules.test.yml"
PROMETHEUS = ROOT / "dashboards/provisioning/prometheus.yml"
GRAFANA = ROOT / "dashboards/provisioning/grafana"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


EVERY = [inner for panel in BOARD["panels"] for inner in (panel, *panel.get("panels", []))]
PANELS = [panel for panel in EVERY if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
MARKS = [annotation["target"]["expr"] for annotation in BOARD["annotations"]["list"]]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [require("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


# -- generated files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", GENERATED, ids=lambda file: file.path)
def test_committed_file_is_up_to_date(file: Generated) -> None:
    assert not file.stale(ROOT), f"{file.path} is stale: run python -m seismograd.dashboards"


def test_the_door_finds_stale_files_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("seismograd.dashboards.__main__.checkout", lambda: tmp_path)
    for file in GENERATED:
        (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
    assert main(["--check"]) == 1
    assert "docs/metrics.md is stale" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))
    assert main([]) == 0
    assert main(["--check"]) == 0
    (tmp_path / "docs/metrics.md").write_text("edited by hand")
    assert main(["--check"]) == 1


def test_only_the_board_needs_the_grafana_sdk() -> None:
    code = (
        "import sys, seismograd.dashboards.__main__, seismograd.dashboards.prometheus.promtool as p,"
        "seismograd.dashboards.metrics_doc as d; p.rules_test_file(); d.metrics_page();"
        "sys.exit('grafana_foundation_sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_metrics_page_names_every_metric() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    for spec in CATALOGUE.values():
        assert f"## {spec.prometheus_name}\n\n{spec.help}" in page


# -- the board ---------------------------------------------------------------------------------------------------------


def test_the_board_shows_every_metric_and_no_other() -> None:
    shown = {spec.name for expr in QUERIES for spec in metrics_in(expr)}
    assert shown == set(CATALOGUE)


def test_marks_and_variables_name_metrics_of_the_catalogue() -> None:
    variables = [v["query"]["query"] for v in BOARD["templating"]["list"] if v["type"] == "query"]
    for expr in MARKS + variables:
        assert metrics_in(expr)


def test_queries_are_about_the_chosen_run() -> None:
    for expr in QUERIES + MARKS:
        assert expr.count("seismograd_") == expr.count('{job="$job",run="$run"'), expr


def test_a_query_outside_the_catalogue_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="not in the catalogue"):
        series("alpha_abs_meen")
    with pytest.raises(ValueError, match="none of its labels"):
        series("clip_fraction", 'cel="phantom"')


def test_variables_used_are_variables_defined() -> None:
    defined = {variable["name"] for variable in BOARD["templating"]["list"]}
    text = json.dumps(BOARD)
    # $1 is label_replace's group, $__name is Grafana's own.
    used = {name for name in re.findall(r"\$\{?(\w+)", text) if not name.startswith("__") and not name.isdigit()}
    assert used <= defined
    assert {"datasource", "job", "run", "layer"} <= defined


def test_legends_name_labels_that_the_series_have() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            labels = {label for spec in metrics_in(target["expr"]) for label in spec.labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, panel["title"]
            assert target["legendFormat"] or panel["type"] == "stat", panel["title"]


def test_every_panel_is_described_and_has_the_data_source() -> None:
    for panel in PANELS:
        assert panel["title"]
        assert panel["datasource"] == DATASOURCE
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            for spec in metrics_in(target["expr"]):
                assert spec.help in panel["description"], panel["title"]
        ids = [target["refId"] for target in panel["targets"]]
        assert len(set(ids)) == len(ids)
    for variable in BOARD["templating"]["list"]:
        assert variable["type"] == "datasource" or variable["datasource"] == DATASOURCE


def test_units_follow_the_catalogue() -> None:
    for panel in PANELS:
        units = {spec.unit for target in panel["targets"] for spec in metrics_in(target["expr"])[:1]}
        shown = panel["fieldConfig"]["defaults"]["unit"]
        assert len(units) == 1 or shown in ("none", "short"), panel["title"]
        assert (shown == "s") == (units == {"seconds"}), panel["title"]
        if "nats" in units:
            assert shown in ("none", "sci"), panel["title"]


def test_bounds_are_those_of_the_rule_table() -> None:
    bound = {rule.signal: getattr(rule.baseline, "bound", None) for rule in RULES}
    steps = {
        panel["title"]: [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        for panel in PANELS
        if "thresholds" in panel["fieldConfig"]["defaults"]
    }
    assert steps["SNR"] == [None, bound["snr"]]
    assert steps["Phantom clipping"] == [None, bound["phantom_fraction"]]


def test_panels_do_not_overlap() -> None:
    for group in (BOARD["panels"], *(row["panels"] for row in BOARD["panels"] if row.get("panels"))):
        places = [(panel["gridPos"], panel.get("title")) for panel in group]
        for place, title in places:
            assert place["x"] + place["w"] <= 24, title
        for (a, first), (b, second) in combinations(places, 2):
            apart = (
                a["x"] + a["w"] <= b["x"]
                or b["x"] + b["w"] <= a["x"]
                or a["y"] + a["h"] <= b["y"]
                or b["y"] + b["h"] <= a["y"]
            )
            assert apart, (first, second)


def test_the_board_keeps_its_identity() -> None:
    assert BOARD["uid"] == "seismograd-run"
    assert BOARD["title"] == "seismograd: run"
    assert BOARD["schemaVersion"] == 42
    assert sorted(panel["id"] for panel in EVERY) == list(range(1, len(EVERY) + 1))
    assert run_board() == run_board()


def test_every_query_parses(tmp_path: Path) -> None:
    values = {"$__rate_interval": "1m", "$__range": "1h"}
    rules = []
    for i, expr in enumerate(QUERIES + MARKS):
        for variable, value in values.items():
            expr = expr.replace(variable, value)
        rules.append({"record": f"q{i}", "expr": expr})
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


# -- alert rules -------------------------------------------------------------------------------------------------------


def test_every_rule_has_its_alert() -> None:
    written = {rule["alert"]: rule for rule in yaml.safe_load(RULES_FILE.read_text())["groups"][0]["rules"]}
    assert len(written) == len(RULES)
    for rule in RULES:
        alert = written[alert_name(rule.signal)]
        assert alert["expr"] == promql(rule)
        assert alert["labels"] == {"severity": rule.severity, "signal": rule.signal}
        assert rule.advice in alert["annotations"]["description"]
        assert rule.summary.rstrip(".") in alert["annotations"]["summary"]


def test_only_what_is_measured_on_every_step_has_a_duration_in_time() -> None:
    by_signal = {alert.signal: alert for alert in alerts()}
    for rule in RULES:
        if on_probe(rule):
            assert by_signal[rule.signal].hold == "0m"
    free = Rule(
        "cost", Selection("overhead_ratio"), Above(0.02), "worker", "warning", "It costs much.", "Look.", hold="5m"
    )
    (alert,) = alerts([free])
    assert alert.hold == "5m"
    assert "above 0.02 for 5m" in alert.description


def test_runbooks_exist() -> None:
    for alert in alerts():
        file, anchor = alert.annotations["runbook"].split("#")
        page = (ROOT / file).read_text()
        assert re.search(rf"(?m)^#+ .*\b{anchor}\b", page), f"{file} has no heading {anchor}"


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES_FILE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_fire_on_faults_and_stay_quiet_on_honest_series() -> None:
    done = promtool("test", "rules", RULES_TEST)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("broken", ["vector(0) > 1", "vector(1) > 0"], ids=["never", "always"])
def test_the_rules_test_notices_each_broken_alert(tmp_path: Path, broken: str) -> None:
    rules = yaml.safe_load(RULES_FILE.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = broken
    (tmp_path / RULES_FILE.name).write_text(yaml.safe_dump(rules))
    (tmp_path / RULES_TEST.name).write_text(RULES_TEST.read_text())
    done = promtool("test", "rules", tmp_path / RULES_TEST.name)
    assert done.returncode != 0
    noticed = set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))
    assert noticed == {alert.name for alert in alerts()}


# -- the stack ---------------------------------------------------------------------------------------------------------


def test_promtool_accepts_the_configuration() -> None:
    done = promtool("check", "config", PROMETHEUS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_images_are_pinned() -> None:
    for name, service in COMPOSE["services"].items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name


def test_servers_listen_on_loopback_only() -> None:
    for service in COMPOSE["services"].values():
        # On the host's network nothing is published, and the servers bind what they are told to.
        assert service["network_mode"] == "host"
        assert "ports" not in service
    command = COMPOSE["services"]["prometheus"]["command"]
    assert any(argument.startswith("--web.listen-address=127.0.0.1:") for argument in command)
    assert COMPOSE["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_there_is_no_default_password() -> None:
    password = COMPOSE["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert re.fullmatch(r"\$\{GRAFANA_ADMIN_PASSWORD:\?[^}]+\}", password)


def test_mounts_and_provisioning_agree() -> None:
    mounts = {}
    for name, service in COMPOSE["services"].items():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                assert (ROOT / source).is_dir(), source
                assert volume.endswith(":ro"), volume
            else:
                assert source in COMPOSE["volumes"], volume
            mounts[name, target] = source
    command = COMPOSE["services"]["prometheus"]["command"]
    config = next(a for a in command if a.startswith("--config.file=")).removeprefix("--config.file=")
    inside = ROOT / mounts["prometheus", "/etc/seismograd"] / Path(config).relative_to("/etc/seismograd")
    assert inside.resolve() == PROMETHEUS

    scrape = yaml.safe_load(PROMETHEUS.read_text())
    assert scrape["scrape_configs"][0]["job_name"] == "seismograd"
    source = yaml.safe_load((GRAFANA / "datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    variable = re.search(r"127\.0\.0\.1:\$\{(\w+)\}", source["url"])
    assert variable is not None
    assert variable[1] in COMPOSE["services"]["grafana"]["environment"]
    provider = yaml.safe_load((GRAFANA / "dashboards/seismograd.yml").read_text())["providers"][0]
    assert (ROOT / mounts["grafana", provider["options"]["path"]] / "run.json").is_file()
    assert (ROOT / mounts["grafana", "/etc/grafana/provisioning"]).resolve() == GRAFANA
