"""The experiments of docs/experiments run, and what the documents say is what their results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seismograd import RunStore
from seismograd.telemetry.rules import RULES
from tests.commands import ROOT, python

RESULTS = ROOT / "docs" / "experiments" / "phantom_clipping.json"
VERDICT = "Precision mismatch: phantom clipping"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished ``--quick``: the runs, and the report."""
    folder = tmp_path_factory.mktemp("quick")
    python(ROOT / "examples" / "phantom_clipping.py", "--quick", "--runs", folder, cwd=folder)
    return folder


def run_of(folder: Path, key: str) -> RunStore:
    (store,) = folder.glob(f"quick/{key}-*/run.db")
    return RunStore.read(store)


def called(store: RunStore) -> bool:
    return any(event.data["summary"].startswith(VERDICT) for event in store.events("spike"))


def test_the_rule_calls_the_mismatched_run_and_no_other(quick: Path) -> None:
    for key, expected in (("B", True), ("A", False), ("G", False)):
        with run_of(quick, key) as store:
            assert called(store) == expected, key


def test_quick_runs_show_what_each_is_made_for(quick: Path) -> None:
    def largest(key: str, metric: str, **labels: str) -> float:
        with run_of(quick, key) as store:
            values = [value for _, value in store.series(metric, **labels)]
        assert len(values) == 10, "measured at each step"
        return max(values)

    phantom = {"cell": "phantom", "ratio": "ppo"}
    assert largest("A", "beta_abs_mean") == 0, "both sides round alike"
    assert largest("B", "beta_abs_mean") > 0.01
    assert largest("B", "clip_fraction", **phantom) > 0.05
    assert largest("A", "clip_fraction", **phantom) == largest("G", "clip_fraction", **phantom) == 0
    with run_of(quick, "B") as store:
        floor = [value for _, value in store.series("alpha_floor")]
    assert max(floor) < 0.005, "at equal weights the engine rounds as the shadow does"


def test_report_judges_the_stored_metrics_as_the_run_itself_did(quick: Path) -> None:
    recorded = json.loads((quick / "phantom_clipping.json").read_text())["parts"]["quick"]["runs"]
    for run in recorded:
        with run_of(quick, run["key"]) as store:
            live = [e.step for e in store.events("spike") if e.data["summary"].startswith(VERDICT)]
        assert run["called"] == min(live, default=None), run["key"]


def test_quick_report_is_written(quick: Path) -> None:
    page = (quick / "phantom_clipping.md").read_text()
    assert "python examples/phantom_clipping.py --quick" in page.splitlines()[2], "the command stands on top"
    assert "phantom_clipping_quick.svg" in page
    assert (quick / "phantom_clipping_quick.svg").read_text().startswith("<?xml")


def test_advice_has_the_published_remedies_in_their_order() -> None:
    rule = next(rule for rule in RULES if rule.signal == "phantom_fraction")
    assert rule.summary.startswith(VERDICT)
    places = [rule.advice.index(remedy) for remedy in ("Match the precisions", "clean ratio", "widen the clip")]
    assert places == sorted(places)


def runs(part: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["parts"][part]["runs"]
    return found


def test_recorded_runs_are_all_that_the_experiment_asks_for() -> None:
    small = runs("small")
    for key in ("A", "B", "F", "G", "wide", "detach", "FP16"):
        assert {run["seed"] for run in small if run["key"] == key} >= {1, 2, 3}, key
    assert 0.2 in {run["eps"] for run in small if run["key"] == "B"}, "the published width too"
    assert {run["key"] for run in runs("smollm2")} == {"A", "B", "G"}


def test_recorded_small_runs_are_called_as_they_should_be() -> None:
    small = runs("small")
    main = next(run["eps"] for run in small if run["key"] == "B")
    for run in small:
        if run["eps"] in (None, main):
            assert (run["called"] is not None) == (run["key"] == "B"), (run["key"], run["seed"])
