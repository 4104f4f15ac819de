"""The W&B sink against the real W&B, offline; the run's own file is read back."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

import seismograd.telemetry.hub as hub_module
from seismograd import Reading, Row, RunInfo, RunStore, watch
from seismograd.demo.faults import PlantedFault
from seismograd.demo.trainer import EngineGRPOTrainer
from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.sinks.wandb import AXIS, WandbSink
from tests import tiny
from tests.test_controls_hook import Shaking
from tests.test_plain import Loop, events, watched
from tests.test_trl import EVERY_STEP, same, trained

# W&B's own, in every row: not logged by anybody.
BOOKKEEPING = {"_runtime", "_step", "_timestamp"}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh W&B, offline, whose files lie in the folder."""
    settle(monkeypatch, tmp_path, WANDB_MODE="offline")
    yield tmp_path
    wandb.teardown()


def settle(monkeypatch: pytest.MonkeyPatch, folder: Path, **environment: str) -> None:
    wandb.teardown()  # the settings are read once a service
    places = {f"WANDB_{what}_DIR": str(folder / what) for what in ("CACHE", "CONFIG", "DATA")}
    for name, value in {"WANDB_DIR": str(folder), "WANDB_SILENT": "true", **places, **environment}.items():
        monkeypatch.setenv(name, value)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The records of the one run below the folder, in the order in which they were written."""
    (run,) = folder.glob("wandb/offline-run-*")
    out = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in out.stdout.splitlines()]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with W&B's own keys."""
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def split(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ours and the others, without W&B's own keys."""
    bare = [{key: value for key, value in row.items() if key not in BOOKKEEPING} for row in rows]
    return [row for row in bare if AXIS in row], [row for row in bare if AXIS not in row]


def stored(folder: Path, left_out: tuple[str, ...] = ("step", "trainer_metric")) -> list[dict[str, float]]:
    """What the run store holds, as W&B should have it."""
    with RunStore.read(folder / "run.db") as store:
        rows = [
            (row.step, {CATALOGUE[r.name].wandb_key(r.labels): r.value for r in row.readings if r.name not in left_out})
            for row in store.rows()
        ]
    return [{**values, AXIS: step} for step, values in rows if values]


def faults(folder: Path) -> list[Any]:
    with RunStore.read(folder / "run.db") as store:
        return [event for event in store.events("fault") if event.data["part"] == "sink:wandb"]


# -- beside the trainer's own callback --------------------------------------------------------------------------------


def test_no_row_is_lost_beside_the_trainer_s_own_callback(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, dict[str, Any]]] = []
    original = wandb.Run.log

    def noted(run: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.append((threading.current_thread().name, dict(data)))
        original(run, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", noted)
    trainer = tiny.trainer(offline, steps=4, report_to="wandb")
    with watch(trainer, runs=offline, name="run", probes=EVERY_STEP):
        trainer.train()
    assert wandb.run is not None  # the trainer's, which is not ours to finish
    wandb.finish()
    records = recorded(offline)
    ours, theirs = split(history(records))

    assert ours == stored(offline / "run")
    assert sorted({row[AXIS] for row in ours}) == [1, 2, 3, 4]
    assert sum("seismograd/step_seconds" in row for row in ours) == 4
    assert sum("seismograd/deployed_improvement" in row for row in ours) == 4

    # Every row that the trainer logged is there, from its own thread, with its own values.
    assert [data for thread, data in logged if thread == "seismograd-wandb"] == ours
    from_trainer = [data for thread, data in logged if thread == "MainThread"]
    assert len(ours) + len(from_trainer) == len(logged)
    assert [{key: row[key] for key in data} for row, data in zip(theirs, from_trainer, strict=True)] == from_trainer
    steps = {row["train/global_step"]: row for row in theirs if "train/loss" in row}
    for log in trainer.state.log_history[:4]:
        row = steps.pop(log["step"])
        assert all(row[f"train/{key}"] == value for key, value in log.items() if key != "step")
    assert not steps

    # Nor are the trainer's rows moved on its axis: those without a step have the last one that it logged.
    filled = [row["train/global_step"] for row in theirs]
    assert filled == sorted(filled)
    assert sum("train/global_step" not in data for data in from_trainer) > 4


def test_each_key_is_on_our_axis_beside_a_trainer_that_claims_all(offline: Path) -> None:
    trainer = tiny.trainer(offline, steps=2, report_to="wandb")
    with watch(trainer, runs=offline, name="run"):
        trainer.train()
    wandb.finish()
    axis: dict[str, str | None] = {}
    rows = 0
    for record in recorded(offline):
        if record["type"] == "metric":
            metric = record["metric"]
            assert "seismograd" not in metric.get("glob_name", "")  # of several patterns W&B takes any
            axis.setdefault(metric.get("name", metric.get("glob_name")), metric.get("step_metric"))
        elif record["type"] == "history" and AXIS in record["history"]["item"]:
            keys = [key for key in record["history"]["item"] if key.startswith("seismograd/")]
            assert {axis[key] for key in keys if key != AXIS} == {AXIS}  # defined before it was first logged
            # Where W&B takes a key for the trainer's, it puts the trainer's step into the row.
            assert "train/global_step" not in record["history"]["item"]
            rows += 1
    assert rows >= 2
    assert axis["*"] == "train/global_step"
    assert axis[AXIS] is None


def test_rows_of_two_threads_stay_apart(offline: Path) -> None:
    wandb.init(project="p")
    wandb.define_metric("*", step_metric="train/global_step", step_sync=True)
    sink = WandbSink()
    sink.open(RunInfo("run", None, {}))
    start = threading.Barrier(2)

    def write() -> None:
        start.wait()
        for step in range(200):
            sink.write(Row(step, 0.0, (Reading("loss_weight", step + 0.5, {"stat": "l2"}), Reading("snr", 2.0 * step))))

    thread = threading.Thread(target=write)
    thread.start()
    start.wait()
    for step in range(200):
        wandb.log({"train/loss": 1.0 / (step + 1), "train/global_step": step})
    thread.join()
    wandb.finish()
    rows = history(recorded(offline))
    ours, theirs = split(rows)
    assert [row["_step"] for row in rows] == list(range(400))
    assert ours == [{"seismograd/loss_weight/l2": s + 0.5, "seismograd/snr": 2.0 * s, AXIS: s} for s in range(200)]
    assert theirs == [{"train/loss": 1.0 / (s + 1), "train/global_step": s} for s in range(200)]


# -- alerts -----------------------------------------------------------------------------------------------------------


def test_spike_alerts_once_and_its_repeats_do_not(offline: Path) -> None:
    wandb.init(project="p")
    loop = watched(offline)
    with loop.run:  # type: ignore[union-attr]
        loop.train(20)
        loop.train(1, corrupt=9.0)
        loop.train(1)
        loop.train(1, corrupt=14.0)  # another one within the cool-down, larger still
    wandb.finish()
    spikes = [event for event in events(offline, "spike") if event.data["signal"] == "grad_norm"]
    assert [(event.step, event.data["repeat"]) for event in spikes] == [(21, False), (23, True)]
    alerts = [record["alert"] for record in recorded(offline) if record["type"] == "alert"]
    expected = [event for event in events(offline, "spike") if not event.data["repeat"]]
    assert [alert["text"] for alert in alerts] == [event.message for event in expected]
    (alert,) = [alert for alert in alerts if alert["title"] == "seismograd: grad_norm"]
    assert alert["level"] == "ERROR"
    assert alert["text"].startswith("step 21: The global gradient norm jumped.")
    (warning,) = [alert for alert in alerts if alert["title"] == "seismograd: log_ratio"]
    assert warning["level"] == "WARN"


def test_a_control_that_changes_its_state_alerts(offline: Path) -> None:
    wandb.init(project="p")
    loop = Shaking(at=18)
    loop.run = watch(model=loop.model, optimizer=loop.optimizer, runs=offline, name="run")
    with loop.run:
        loop.train(20)
    wandb.finish()
    (alert,) = [r["alert"] for r in recorded(offline) if r["type"] == "alert" and "layerclip" in r["alert"]["title"]]
    (change,) = events(offline, "control")
    assert (alert["title"], alert["text"], alert["level"]) == ("seismograd: layerclip is on", change.message, "WARN")
    assert change.step == 18


# -- a run of our own -------------------------------------------------------------------------------------------------


def test_own_run_is_started_with_the_trainer_s_metrics_and_finished_at_close(offline: Path) -> None:
    trainer = tiny.trainer(offline, steps=2)
    with watch(trainer, runs=offline, name="run", sinks="wandb"):
        assert wandb.run is None  # not before there is something to write
        trainer.train()
    assert wandb.run is None
    records = recorded(offline)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["project"], run["display_name"]) == ("seismograd", "run")
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [0]
    ours, theirs = split(history(records))
    assert not theirs
    assert ours == stored(offline / "run", left_out=("step",))
    losses = [row["seismograd/trainer_metric/loss"] for row in ours if "seismograd/trainer_metric/loss" in row]
    assert losses == [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_the_trainer_s_run_is_used_and_left_open_where_there_is_one(offline: Path) -> None:
    mine = wandb.init(project="p")
    loop = watched(offline, sinks="wandb", probes=tiny.NO_PROBES)
    with loop.run:  # type: ignore[union-attr]
        loop.train(2)
        loop.run.flush()  # type: ignore[union-attr]
        mine.finish()
        loop.train(1)  # the run has been ended by its owner: no other one is started in its place
    assert wandb.run is None
    assert split(history(recorded(offline)))[0] == [row for row in stored(offline / "run") if row[AXIS] <= 2]
    assert not faults(offline / "run")


def test_own_run_of_a_script_that_just_ends_is_complete(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
import time
run = watch(model=model, runs=".", name="run", sinks="wandb")
train(run, 1)
while getattr(sys.modules.get("wandb"), "run", None) is None:
    time.sleep(0.01)
import wandb
log = wandb.Run.log
wandb.Run.log = lambda *args: time.sleep(0.05) or log(*args)  # so that rows are still waiting at the end
train(run, 10)
found = {}
""",
        WANDB_MODE="offline",
    )
    records = recorded(tmp_path)
    assert split(history(records))[0] == stored(tmp_path / "run")
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [0]
    assert not faults(tmp_path / "run")


# -- without W&B, and with one that fails -----------------------------------------------------------------------------


def test_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "seismograd")
    settle(monkeypatch, tmp_path / "w", WANDB_MODE="disabled")
    plain, loop = Loop(), watched(tmp_path, sinks="wandb")
    with loop.run:  # type: ignore[union-attr]
        assert loop.train(4) == plain.train(4)
    wandb.teardown()
    assert not faults(tmp_path / "run")
    assert not [record for record in caplog.records if record.name == "seismograd"]
    assert {row[AXIS] for row in stored(tmp_path / "run")} == {1, 2, 3, 4}
    assert not list(tmp_path.glob("w/wandb/*run-*"))


SCRIPT = """
import json, logging, os, sys, torch

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("seismograd").addHandler(handler)
from seismograd import watch

def train(run, steps):
    for _ in range(steps):
        with run.step():
            model(torch.ones(1, 2)).sum().backward()
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""


def script(folder: Path, body: str, **environment: str) -> dict[str, Any]:
    """What a clean interpreter that imports neither transformers nor trl prints, with what seismograd said."""
    folder.mkdir(exist_ok=True)
    code = SCRIPT + body + "\nfound['lines'] = lines\nfound['weight'] = model.weight.tolist()\nprint(json.dumps(found))"
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "WANDB_DIR": str(folder), "WANDB_SILENT": "true", **environment},
    )
    result: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return result


def test_without_a_run_w_and_b_is_not_imported_and_without_w_and_b_one_line_says_so(tmp_path: Path) -> None:
    quiet = script(
        tmp_path / "auto",
        "with watch(model=model, runs='.', name='run', controls='observe') as run: train(run, 3)\n"
        "found = {'imported': sorted(name for name in sys.modules if name.split('.')[0] == 'wandb')}",
    )
    assert quiet["imported"] == quiet["lines"] == []
    # A folder that W&B left behind is importable, and is no W&B.
    for how in ("sys.modules['wandb'] = None", "sys.meta_path.insert(0, Without())"):
        absent = script(
            tmp_path / "absent",
            "class Without:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.split('.')[0] == 'wandb': return FOLDER\n"
            "from importlib.machinery import ModuleSpec\n"
            "FOLDER = ModuleSpec('wandb', None, is_package=True)\n"
            f"{how}\n"
            "with watch(model=model, runs='.', sinks='wandb', controls='observe') as run: train(run, 3)\n"
            "found = {'folder': str(run.folder)}",
        )
        said = {line.rpartition("training is not affected: ")[2] for line in absent["lines"]}
        assert len(said) == 1, said
        (line,) = said
        assert "pip install 'seismograd[wandb]'" in line
        assert "\n" not in line
        assert absent["weight"] == quiet["weight"]
        (fault,) = faults(Path(absent["folder"]))
        assert line in fault.message
        assert {row[AXIS] for row in stored(Path(absent["folder"]))} == {1, 2, 3}


def test_w_and_b_whose_service_is_killed(tmp_path: Path) -> None:
    found = script(
        tmp_path,
        """
import signal, wandb
wandb.init(project="p")
run = watch(model=model, runs=".", name="run")
train(run, 3)
assert run.flush()
for task in os.listdir("/proc/self/task"):
    for child in open(f"/proc/self/task/{task}/children").read().split():
        if "wandb-core" in open(f"/proc/{child}/cmdline").read():
            os.kill(int(child), signal.SIGKILL)
            killed = True
for steps in range(4, 104):  # until W&B's client has noticed
    train(run, 1)
    run.flush()
    if lines:
        break
train(run, 1)
run.close()
found = {"killed": killed, "steps": steps + 1}
""",
        WANDB_MODE="offline",
    )
    assert found["killed"]
    (fault,) = faults(tmp_path / "run")
    assert "training is not affected" in fault.message
    assert any("sink:wandb" in line for line in found["lines"])
    assert sorted({row[AXIS] for row in stored(tmp_path / "run")}) == list(range(1, found["steps"] + 1))


def test_w_and_b_that_raises(offline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "seismograd")
    monkeypatch.setattr(hub_module, "_RETRIES", (0.0, 0.0))
    honest = trained(tiny.trainer(offline / "honest", steps=3))
    wandb.init(project="p")
    tries: list[int] = []

    def broken(run: Any, data: dict[str, Any], **_: Any) -> None:
        tries.append(data[AXIS])
        raise RuntimeError("planted")

    trainer = tiny.trainer(offline / "watched", steps=3)
    with watch(trainer, runs=offline, name="run"):
        monkeypatch.setattr(wandb.Run, "log", lambda run, data, **_: broken(run, data))
        # TRL's own timings go to W&B as well, and are the user's to keep.
        monkeypatch.setattr("trl.extras.profiling.is_wandb_available", lambda: False)
        assert same(trained(trainer), honest)
    assert tries == [1, 1, 1]  # and muted since
    (fault,) = faults(offline / "run")
    assert "RuntimeError: planted" in fault.message
    assert any("planted" in record.getMessage() for record in caplog.records)
    with RunStore.read(offline / "run" / "run.db") as store:
        assert store.series("step") == [(1, 1), (2, 2), (3, 3)]


def test_w_and_b_that_hangs(offline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "seismograd")
    monkeypatch.setattr(hub_module.Hub.__init__, "__defaults__", (16, 4))
    wandb.init(project="p")
    release = threading.Event()
    original = wandb.Run.log
    written: queue.Queue[int] = queue.Queue()

    def hanging(run: Any, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        release.wait(60)
        original(run, data, *args, **kwargs)
        written.put(data[AXIS])

    monkeypatch.setattr(wandb.Run, "log", hanging)
    plain, loop = Loop(), watched(offline, probes=tiny.NO_PROBES)
    assert loop.train(12) == plain.train(12)
    assert loop.run is not None
    loop.run.close(timeout=0.5)
    assert any("still busy" in record.getMessage() for record in caplog.records)
    assert [row[AXIS] for row in stored(offline / "run")] == list(range(1, 13))
    with RunStore.read(offline / "run" / "run.db") as store:
        dropped = store.series("dropped_readings_total")
    assert dropped[0][1] == 0
    assert dropped[-1][1] > 0  # counted, and shown
    release.set()
    late = [written.get(timeout=30) for _ in range(3)]  # its queue of four held at least these
    wandb.finish()
    assert late == [1, 2, 3]
    assert [row[AXIS] for row in split(history(recorded(offline)))[0]][:3] == late


@pytest.mark.parametrize("every", [1, 5, 100])
@pytest.mark.parametrize("first", [0, 1])
def test_rows_that_a_loop_logs_with_its_own_step_are_all_there(offline: Path, every: int, first: int) -> None:
    """The loop's rows first of all; and ours, in the loop's rows where it logs and in rows of their own elsewhere."""
    loop = watched(offline)
    with wandb.init(project="p") as run, loop.run:  # type: ignore[union-attr]
        for step in range(first, first + 20):
            loop.train(1)
            loop.run.flush()  # type: ignore[union-attr]
            if (step - first) % every == 0:
                run.log({"mine": step}, step=step)
    rows = history(recorded(offline))
    assert [row["mine"] for row in rows if "mine" in row] == list(range(first, first + 20, every))
    ours = [row for row in rows if "seismograd/grad_norm/all/all" in row]
    assert [row[AXIS] for row in ours] == list(range(1, 21))
    norms = [row["seismograd/grad_norm/all/all"] for row in ours]
    assert norms == pytest.approx(loop.norms)
    improvements = [row for row in rows if "seismograd/deployed_improvement" in row]
    assert len(improvements) in (19, 20)  # each with the row after its own; the last two in one, if that is still open


def test_rows_that_a_loop_logs_while_ours_are_late(offline: Path) -> None:
    loop = watched(offline)
    with wandb.init(project="p") as run, loop.run:  # type: ignore[union-attr]
        for step in range(60):
            loop.train(1)
            run.log({"mine": step}, step=step)
    rows = history(recorded(offline))
    assert [row["mine"] for row in rows if "mine" in row] == list(range(60))
    ours = [row[AXIS] for row in rows if AXIS in row]
    assert ours == sorted(ours)
    assert ours[-1] == 60


# -- incidents --------------------------------------------------------------------------------------------------------


def tables(folder: Path) -> list[Any]:
    """The incident tables, in the order of the rows that they were logged in, from the run's own files."""
    (run,) = folder.glob("wandb/offline-run-*")
    files = (run / "files" / "media" / "table" / "seismograd").glob("incidents_*.table.json")
    return [json.loads(file.read_text()) for file in sorted(files, key=lambda file: int(file.name.split("_")[1]))]


@pytest.mark.parametrize("text", ["full", "none"])
def test_culprits_are_a_table_a_row_a_token(offline: Path, text: str) -> None:
    trainer = tiny.trainer(offline, steps=4, report_to="wandb", cls=EngineGRPOTrainer)
    trainer.fault = PlantedFault(step=3, after=1)
    with watch(trainer, runs=offline, name="run", gradloc="every", text=text):
        trainer.train()
    wandb.finish()
    with RunStore.read(offline / "run" / "run.db") as store:
        told = [(e.step, c) for e in store.events("incident") for c in e.data["culprits"]]
    assert told
    table = tables(offline)[-1]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["step"], row["row"], row["position"]) for row in rows] == [
        (step, c["row"], c["position"]) for step, c in told
    ]
    assert all((row["text"] is None) == (row["token_id"] is None) == (text == "none") for row in rows)
    assert faults(offline / "run") == []
    ours, _ = split(history(recorded(offline)))
    assert sum("seismograd/step_seconds" in row for row in ours) == 4
