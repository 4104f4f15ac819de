"""The benchmarks run, and say what they are asked. What they measure is not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.overhead import Alternation, OwnTime, bootstrap, by_part, of_pairs, of_share, of_times
from benchmarks.report import Finding, Parts, Report, machine
from benchmarks.small import EngineTrainer
from benchmarks.transfers import Waiting
from tests import tiny
from tests.commands import ROOT, python


@pytest.mark.slow
def test_overhead_runs_and_writes_its_table(tmp_path: Path) -> None:
    out = python("-m", "benchmarks.overhead", "--quick", "--threads", "1", "--out", tmp_path / "results")
    text = (tmp_path / "results" / "overhead.md").read_text()
    assert text.strip() in out.stdout
    found = json.loads((tmp_path / "results" / "overhead.json").read_text())
    for key in ("date", "cpu", "cores", "threads", "versions"):
        assert found["machine"][key]
    verdicts = {f["what"]: f["verdict"] for f in found["findings"]}
    assert len(verdicts) == 8
    assert set(verdicts.values()) <= {"PASS", "FAIL"}
    assert all(what in text for what in verdicts)
    share, _, _, cpu, *_, transfers = found["findings"]
    assert {"worker", "transfer", "detect", "handover", "sink_store", "sink_prometheus"} <= {
        *share["values"]["mean_seconds_by_part"]
    }
    assert share["values"]["share"] > 0
    assert len(cpu["values"]["ratios"]) >= 2
    # The one figure that no machine changes.
    assert transfers["values"]["by_step"] == [1] * 4
    assert transfers["verdict"] == "PASS"
    assert str(tmp_path) not in text.replace(str(tmp_path / "results"), "")


@pytest.mark.slow
def test_gradloc_runs_and_writes_its_table(tmp_path: Path) -> None:
    out = python("-m", "benchmarks.gradloc", "--quick", "--out", tmp_path, seconds=1200)
    assert (tmp_path / "gradloc.md").read_text().strip() in out.stdout
    parts = json.loads((tmp_path / "gradloc.json").read_text())["parts"]
    assert [*parts] == ["bank", "curve", "cost", "memory", "dormant"]
    found = {f["what"]: f for part in parts.values() for f in part["findings"]}
    assert len(found) == 15
    # No machine's either: freed memory goes back to the system at once.
    for what in ("1 micro-batch", "2 micro-batches"):
        above = found[f"peak memory of a step with a localisation over one without, {what}"]
        assert above["verdict"] == "PASS", above
        assert above["values"]["parameters"] > 400
    # What no machine changes: the incidents are made from seeds.
    for what in ("planted tokens that |G| loses 10% without, named", "named tokens that are guilty", "verdict right"):
        assert found[what]["verdict"] == "PASS", found[what]
        assert found[what]["values"]["whole"] > 30
    assert found["tokens named on steps without a guilty one"]["values"] == {"named": []}
    assert found["passes of bisection over those of attribution"]["verdict"] == "PASS"


def test_one_part_is_measured_anew_and_the_others_stay(tmp_path: Path) -> None:
    title = "A report"
    first = Report(title, "first", machine={**machine(), "load": 0.5})
    first.findings.append(Finding("a", "b", "c", True, {"x": 1.0}))
    first.tables.append("table of first")
    Parts(title, {"one": first, "two": Report(title, "first", notes=["kept"], machine=first.machine)}).write(
        tmp_path, "r"
    )
    again = Parts.read(title, tmp_path, "r")
    assert again.parts["one"] == first
    assert (again.markdown() + "\n") == (tmp_path / "r.md").read_text()
    again.parts["two"] = Report(title, "second", notes=["new"])
    again.write(tmp_path, "r")
    text = (tmp_path / "r.md").read_text()
    assert "one: `first`" in text
    assert "two: `second`" in text
    assert "table of first" in text
    assert "kept" not in text


def test_share_is_held_against_a_quiet_step() -> None:
    steps = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 50.0])
    cost = OwnTime({"worker": np.full(6, 0.004), "probe_shadow": np.array([0, 0, 0.036, 0, 0, 0])}, steps, 0.0)
    assert cost.share()[0] == pytest.approx(0.01)
    assert of_share("x", cost, 0.01).verdict == "PASS"
    assert of_share("x", cost, 0.009).verdict == "FAIL"
    assert cost.runs("probe_shadow") == 1
    assert "| probe_shadow | training | 6.00" in by_part(cost)
    assert "| worker       | own      | 4.00" in by_part(cost)


def test_pairs_contradict_a_share_that_is_too_small() -> None:
    cost = OwnTime({"worker": np.full(8, 0.01)}, np.ones(8), 0.0)
    assert of_pairs("x", np.array([0.98, 1.01, 1.04, 1.0]), cost).verdict == "PASS"
    assert of_pairs("x", np.full(20, 1.03), cost).verdict == "FAIL"
    low, high = bootstrap(np.arange(101.0), np.median)
    assert 30 < low < 50 < high < 70


def test_median_or_tail_is_judged() -> None:
    times = np.array([1.0] * 90 + [200.0] * 10)
    assert of_times("x", times, 100, "ms").verdict == "PASS"
    assert of_times("x", times, 100, "ms", "p95").verdict == "FAIL"
    assert "max 200.0 ms" in of_times("x", times, 100, "ms").measured


def test_every_other_step_is_watched(tmp_path: Path) -> None:
    from seismograd import RunStore, watch

    class Trainer(EngineTrainer):
        def get_batch_samples(self, *args: object, **kwargs: object) -> object:
            alternation()
            return super().get_batch_samples(*args, **kwargs)

    trainer = tiny.trainer(tmp_path, steps=9, cls=Trainer)
    with watch(trainer, runs=tmp_path, name="run") as run:
        alternation = Alternation(run)
        trainer.train()
    watched = [step for step, (was, _, _) in enumerate(alternation.steps, 1) if was]
    assert sorted(1 + (step - 1) // 2 for step in watched) == [1, 2, 3, 4]  # one of each pair
    with RunStore.read(tmp_path / "run" / "run.db") as store:
        stored = [step for step, _ in store.series("step_seconds")]
    assert [step for step in stored if step < 9] == watched


def test_calls_that_wait_for_a_device_are_counted() -> None:
    x = torch.arange(4.0)
    with Waiting((str(ROOT / "tests") + "/",)) as waiting:
        x.sum().item()
        if (x > 1).any():
            x = x[x > 1]
        x = torch.where(x > 0, x, -x)[1:]
        x.unique()
        float(x[0])
    names = sorted(place.split()[1] for place in waiting.found.elements())
    assert names == ["__bool__", "__float__", "__getitem__", "item", "unique"]
    with Waiting() as elsewhere:
        x.sum().item()
    assert not elsewhere.found
