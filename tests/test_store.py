"""The run store: what is written is read back, whatever happens to the process or the disk."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from seismograd import Event, Reading, Row, RunInfo, RunStore, StoreError
from seismograd.telemetry.sinks.store import StoreSink

INFO = RunInfo("run", "runs/run", {"budget": 0.01}, started=1.0)


def row(step: int, *extra: Reading) -> Row:
    return Row(step, 100.0 + step, (Reading("step", step), Reading("kl", step / 3, {"estimator": "k3"}), *extra))


def test_round_trip(tmp_path: Path) -> None:
    nan = Reading("grad_norm", math.nan, {"layer": "all", "group": "all"})
    rows = [row(1), row(2, Reading("snr", math.inf)), row(3), row(4, nan)]
    event = Event("spike", "jumped", 2, 5.0, {"signal": "grad_norm", "value": 3.5})
    with RunStore.create(tmp_path / "run.db", INFO) as store:
        for r in rows:
            store.write(r)
        store.event(event)
    with RunStore.read(tmp_path / "run.db") as store:
        assert list(store.rows())[:3] == rows[:3]
        assert math.isnan(list(store.rows())[3].readings[-1].value)
        assert list(store.rows(after=2)) != []
        assert store.series("kl", estimator="k3") == [(i, i / 3) for i in range(1, 5)]
        assert store.events() == [event]
        assert store.events("gap") == []
        assert store.meta() == {"schema_version": 1, "name": "run", "started": 1.0, "config": {"budget": 0.01}}


def test_readable_while_it_is_written(tmp_path: Path) -> None:
    writer = RunStore.create(tmp_path / "run.db", INFO)
    writer.write(row(1))
    with RunStore.read(tmp_path / "run.db") as reader:
        assert len(list(reader.rows())) == 1
        writer.write(row(2))
        assert [r.step for r in reader.rows(after=1)] == [2]
    writer.close()


def test_never_writes_into_another_run_s_store(tmp_path: Path) -> None:
    RunStore.create(tmp_path / "run.db", INFO).close()
    with pytest.raises(FileExistsError):
        RunStore.create(tmp_path / "run.db", INFO)


def test_missing_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such run store"):
        RunStore.read(tmp_path / "run.db")


@pytest.mark.parametrize("content", [b"", b"not a database" * 100])
def test_corrupt_store(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"run\.db") as error:
        RunStore.read(path)
    assert "\n" not in str(error.value)


def test_store_of_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    RunStore.create(path, INFO).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    with pytest.raises(StoreError, match="update seismograd"):
        RunStore.read(path)


def test_blocks_are_the_rows(tmp_path: Path) -> None:
    """Many rows at once, from several layouts: the same values, numbers and times as one by one."""
    rows = [row(i, *([Reading("snr", i / 7)] if i % 3 == 0 else [])) for i in range(1, 31)]
    with RunStore.create(tmp_path / "run.db", INFO) as store:
        assert (store.step_range(), store.last_row(), store.last_event(), store.blocks()) == (None, 0, None, [])
        for r in rows:
            store.write(r)
        event = Event("note", "x", 3, 5.0, {"a": 1})
        store.event(event)
    with RunStore.read(tmp_path / "run.db") as store:
        found: dict[int, Row] = {}
        after = 0
        while blocks := store.blocks(after, limit=7):
            assert sum(len(block.ids) for block in blocks) <= 7
            for block in blocks:
                for number, step, time, values in zip(block.ids, block.steps, block.times, block.values, strict=True):
                    readings = tuple(
                        Reading(name, value, {"estimator": labels[0]} if labels else {})
                        for (name, *labels), value in zip(block.series, values.tolist(), strict=True)
                    )
                    found[int(number)] = Row(int(step), float(time), readings)
            after = max(int(block.ids[-1]) for block in blocks)
        assert [found[i] for i in range(1, 31)] == rows == list(store.rows())
        assert store.step_range() == (1, 30)
        assert store.last_row() == 30
        assert store.last_event() == event
        assert store.counts() == {"note": 1}
        assert store.known_series() == [("step",), ("kl", "k3"), ("snr",)]
        assert store.numbered_events() == [(1, event)]
        assert store.numbered_events(after=1) == []


def test_reading_a_finished_run_leaves_no_trace(tmp_path: Path) -> None:
    """SQLite would put files beside a store that it opens, and could not where nothing may be written."""
    with RunStore.create(tmp_path / "run.db", INFO) as store:
        store.write(row(1))
    with RunStore.read(tmp_path / "run.db") as store:
        assert len(list(store.rows())) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["run.db"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.db"]


LOOP = """
import sys, time, torch
sys.path.insert(0, {top!r})
from tests.tiny import PlainModel
from seismograd import watch

torch.manual_seed(0)
model = PlainModel()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
run = watch(model=model, optimizer=optimizer, runs={runs!r}, name="run")
for step in range(1, 100_000):
    ids = torch.randint(0, 20, (4, 9))
    with run.step():
        logp = model(ids)
        run.tokens(logp=logp, rollout_logp=logp.detach() + 0.01, advantage=torch.randn(4))
        (-logp.mean()).backward()
        run.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    print(step, time.time(), flush=True)
"""


def loop(runs: Path) -> list[str]:
    top = str(Path(__file__).parent.parent)
    return [sys.executable, "-c", textwrap.dedent(LOOP).format(top=top, runs=str(runs))]


@pytest.mark.parametrize("after_steps", [3, 40])
def test_kill_9(tmp_path: Path, after_steps: int) -> None:
    """The store opens, and lacks no more than one step or one second, whichever is longer."""
    process = subprocess.Popen(loop(tmp_path), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line.split())
        if len(printed) == after_steps:
            os.kill(process.pid, signal.SIGKILL)
            break
    printed += [line.split() for line in process.stdout]
    assert process.wait(30) == -signal.SIGKILL
    # Only whole lines of the loop's own: other packages print at import, and the kill may cut the last one.
    ended = {int(line[0]): float(line[1]) for line in printed if len(line) == 2 and line[0].isdigit()}
    with RunStore.read(tmp_path / "run" / "run.db") as store:
        stored = {r.step for r in store.rows()}
        assert store.meta()["name"] == "run"
    last = max(ended)
    assert stored <= set(range(1, last + 2))
    lacking = set(ended) - stored - {last}
    assert all(ended[last] - ended[step] <= 1.0 for step in lacking), lacking
    assert stored == set(range(1, max(stored) + 1)) or not stored


def test_full_disk(tmp_path: Path) -> None:
    """Past a limit on the size of files, writes fail as on a full disk: training goes on, and one line says so."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))
{loop(tmp_path)[2].replace("range(1, 100_000)", "range(1, 60)")}
print("trained", flush=True)
run.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "which is muted" in line]
    assert len(lines) == 1, done.stderr
    assert "training is not affected" in lines[0]
    assert "run.db" in lines[0]
    assert "SEISMOGRAD_RUNS" in lines[0]
    with RunStore.read(tmp_path / "run" / "run.db") as store:
        steps = [r.step for r in store.rows()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) < 59


@pytest.mark.parametrize(
    ("raised", "advice"),
    [
        (sqlite3.OperationalError, "free space"),
        (sqlite3.IntegrityError, "free space"),
        (sqlite3.DatabaseError, ".recover"),
    ],
)
def test_error_of_the_file_names_the_fix(tmp_path: Path, raised: type[sqlite3.Error], advice: str) -> None:
    sink = StoreSink(tmp_path / "run.db")
    sink.open(RunInfo("run", None, {}))

    class Broken:
        def event(self, _: Event) -> None:
            raise raised("broken")

        def close(self) -> None: ...

    sink._store.close()  # type: ignore[union-attr]
    sink._store = Broken()  # type: ignore[assignment]
    with pytest.raises(OSError, match=advice):
        sink.event(Event("note", "x"))


@pytest.mark.parametrize("name", ["exp#1", "a?b", "50%25", "a b"])
def test_path_with_signs_of_urls(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with RunStore.create(tmp_path / name / "run.db", INFO) as store:
        store.write(row(1))
    with RunStore.read(tmp_path / name / "run.db") as store:
        assert [r.step for r in store.rows()] == [1]
    assert [path.name for path in tmp_path.iterdir()] == [name]
