"""The page's server, asked as a script would: a real server, real stores."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seismograd import CATALOGUE, Reading, RunStore
from seismograd.cli import main
from seismograd.dashboards.page import band
from seismograd.dashboards.page.safety import Access
from seismograd.dashboards.page.story import _SUBJECTS
from seismograd.telemetry.baselines import Envelope
from seismograd.telemetry.rules import RULES
from tests.pages import HOSTILE, Client, Writer, logged, serve

GRAD = json.dumps(["grad_norm", "all", "all"])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def client(runs: Path) -> Iterator[Client]:
    with serve(runs) as server:
        yield Client(server)


# -- values ---------------------------------------------------------------------------------------------------------


def test_every_step_equals_the_store(runs: Path, client: Client) -> None:
    Writer(runs, "a").steps(50).finish()
    selects = [("select", name) for name in ("kl", "clip_fraction", "grad_norm", "trainer_metric")]
    answer = client.run("a", "/series", *selects, ("points", 0))
    assert answer["width"] == 1
    assert answer["step"] == list(range(1, 51))
    assert len(answer["series"]) == 1 + 4 + 9 + 3
    with RunStore.read(runs / "a" / "run.db") as store:
        for series in answer["series"]:
            expected = store.series(series["metric"], **series["labels"])
            assert list(zip(answer["step"], series["value"], strict=True)) == expected


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    st.integers(1, 64),
    st.integers(1, 320),
    st.integers(1, 320),
)
def test_buckets_hold_the_extremes(values: list[float], points: int, first: int, last: int) -> None:
    """Against a computation by hand: every value lies within its bucket, and each bucket's ends are values."""
    from seismograd.dashboards.page import queries
    from seismograd.dashboards.page.columns import Columns
    from seismograd.telemetry.store import Block

    columns = Columns(Path("unused"))
    n = len(values)
    steps = np.arange(1, n + 1)
    columns._add(Block((("snr",),), steps, steps, steps + 0.5, np.array(values)[:, None]))
    answer = queries.series(columns, [queries.selector("snr")], queries.Window(first, last, points))
    last = max(first, last)
    width = answer["width"]
    inside = {step: value for step, value in zip(steps.tolist(), values, strict=True) if first <= step <= last}
    by_bucket: dict[int, list[float]] = {}
    for step, value in inside.items():
        by_bucket.setdefault(step // width, []).append(value)
    assert width & (width - 1) == 0
    assert len(by_bucket) <= points
    assert width == 1 or last // (width // 2) - first // (width // 2) + 1 > points, "no wider than needed"
    assert answer["step"] == [max(bucket * width, first) for bucket in by_bucket]
    if inside:
        (found,) = answer["series"]
        assert found.get("min", found.get("value")) == [min(x) for x in by_bucket.values()]
        assert found.get("max", found.get("value")) == [max(x) for x in by_bucket.values()]


def test_a_spike_of_one_step_survives_100_000_steps(runs: Path, client: Client) -> None:
    writer = Writer(runs, "long")
    writer.store._layout((("grad_norm", "all", "all"),))
    norms = np.random.default_rng(0).uniform(1, 2, 100_000)
    norms[77_776] = 1234.5  # step 77,777
    writer.store._db.execute("BEGIN")
    writer.store._db.executemany(
        "INSERT INTO steps (step, time, layout, row) VALUES (?, ?, 0, ?)",
        [(i + 1, float(i), x.tobytes()) for i, x in enumerate(norms)],
    )
    writer.store._db.execute("COMMIT")
    writer.finish()
    answer = client.run("long", "/series", ("select", GRAD), ("points", 500))
    (series,) = answer["series"]
    assert len(answer["step"]) <= 500
    assert max(series["max"]) == 1234.5
    start = answer["step"][series["max"].index(1234.5)]
    assert start <= 77_777 < start + answer["width"]
    assert min(series["min"]) == norms.min()
    closer = client.run("long", "/series", ("select", GRAD), ("from", 77_700), ("to", 77_800))
    assert closer["width"] == 1
    assert closer["series"][0]["value"] == norms[77_699:77_800].tolist()


def test_what_is_not_finite_is_listed(runs: Path, client: Client) -> None:
    Writer(runs, "a").steps(20, {5: math.nan, 9: math.inf, 10: -math.inf}).finish()
    (series,) = client.run("a", "/series", ("select", GRAD), ("points", 4))["series"]
    assert series["nonfinite"] == {"count": 3, "steps": [[5, "nan"], [9, "inf"], [10, "-inf"]]}
    assert all(math.isfinite(x) for x in series["max"])
    (whole,) = client.run("a", "/series", ("select", GRAD), ("points", 0))["series"]
    assert [i + 1 for i, x in enumerate(whole["value"]) if x is None] == [5, 9, 10]


def test_steps_counted_anew(runs: Path, client: Client) -> None:
    """After a restart at step 3 both values of a step are within its bucket, and the later one is the step's."""
    writer = Writer(runs, "a").steps(5)
    for step in (3, 4):
        writer.step(step, 100.0 + step)
    (both,) = client.run("a", "/series", ("select", GRAD))["series"]
    assert both["max"][2:4] == [103.0, 104.0]
    assert all(x < 3 for x in both["min"])
    answer = client.run("a", "/series", ("select", GRAD), ("points", 0))
    assert answer["step"] == [1, 2, 3, 4, 5]
    assert answer["series"][0]["value"][2:4] == [103.0, 104.0]


def test_rows_of_several_layouts_are_one_series(runs: Path, client: Client) -> None:
    writer = Writer(runs, "a")
    for step in range(1, 9):
        writer.step(step, float(step), (Reading("heterogeneity", step / 2),) if step % 3 == 0 else ())
    answer = client.run("a", "/series", ("select", GRAD), ("select", "heterogeneity"), ("points", 0))
    grad, odd = answer["series"]
    assert grad["value"] == [float(step) for step in range(1, 9)]
    assert odd["value"] == [None, None, 1.5, None, None, 3.0, None, None]


def test_new_rows_are_read_while_the_run_is_written(runs: Path, client: Client) -> None:
    writer = Writer(runs, "a").steps(3)
    assert client.run("a", "/series", ("select", "kl"))["step"] == [1, 2, 3]
    writer.step(4)
    assert client.run("a", "/series", ("select", "kl"))["step"] == [1, 2, 3, 4]
    # Another run in its place is another run.
    writer.store.close()
    for file in (runs / "a").iterdir():
        file.unlink()
    (runs / "a").rmdir()
    Writer(runs, "a").steps(2)
    assert client.run("a", "/series", ("select", "kl"))["step"] == [1, 2]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "select"),
        ("select=nothing", "no metric"),
        ("select=[", "JSON"),
        ('select=["kl"', "JSON"),
        ('select=["kl","k3","k1"]', "labels"),
        ('select=["kl",3]', "select"),
        ("select=[]", "select"),
        ("select=kl&points=-1", "points"),
        ("select=kl&points=1e9", "points"),
        ("select=kl&from=x", "from"),
        ("select=kl&to=99999999999999999999", "to"),
    ],
)
def test_bad_parameters_are_named(runs: Path, client: Client, query: str, says: str) -> None:
    Writer(runs, "a").steps(2)
    status, _, body = client.ask(f"/api/v1/runs/a/series?{quote(query, safe='=&')}")
    assert status == 400
    assert says in json.loads(body)["error"]


def test_window_outside_of_the_run(runs: Path, client: Client) -> None:
    Writer(runs, "a").steps(5)
    answer = client.run("a", "/series", ("select", "kl"), ("from", 100), ("to", 200))
    assert (answer["step"], answer["series"]) == ([], [])
    Writer(runs, "empty")
    assert client.run("empty", "/series", ("select", "kl"))["step"] == []
    assert client.run("empty", "/baseline")["step"] == []
    assert client.run("empty")["headline"] == "waiting for the first step"


# -- baseline and story ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.floats(0, 1e4), st.sampled_from([math.nan, math.inf, -1.0, 0.0, 500.0])), max_size=60))
def test_the_band_is_what_was_judged(values: list[float]) -> None:
    rule = Envelope(factor=3.0, half_life=20.0, warmup=5, floor=0.5)
    levels, thresholds = band.envelope(np.array(values), rule)
    state = rule.state(1)
    for value, level, threshold in zip(values, levels, thresholds, strict=True):
        verdict = state.judge(np.array([value]))
        assert np.array_equal(verdict.baseline, [level], equal_nan=True)
        assert verdict.threshold[0] == (math.inf if math.isnan(threshold) else threshold)


def test_the_band_on_the_buckets_of_the_series(runs: Path, client: Client) -> None:
    Writer(runs, "a").steps(100, {60: 50.0}).finish()
    series = client.run("a", "/series", ("select", GRAD), ("points", 30))
    found = client.run("a", "/baseline", ("points", 30))
    assert found["width"] == series["width"] == 4
    assert found["step"] == series["step"]
    assert found["level"][0] is None
    assert found["threshold"][14] == pytest.approx(3 * found["level"][14])


def test_headline_of_an_explained_spike(runs: Path, client: Client) -> None:
    writer = Writer(runs, "a").steps(24)
    writer.spike(24)
    writer.spike(24, "kl", score=900.0)
    writer.incident(24)
    about = client.run("a")
    assert about["headline"] == "gradient norm spiked 38x at step 24: 1 token (A.1, token mismatch)"
    (finding,) = about["findings"]
    assert (finding["incident"], finding["also"], finding["advice"]) == ("step-000024", ["kl"], "Cap the ratio.")
    assert about["incidents"] == [{"step": 24, "name": "step-000024", "page": True}]


def test_headline_of_phantom_clipping(runs: Path, client: Client) -> None:
    writer = Writer(runs, "a")
    for step in range(1, 31):
        share = 0.17 if step > 5 else 0.0
        cells = {"legitimate": 0.0, "phantom": share, "hidden": 0.0, "open": 1 - share}
        readings = tuple(Reading("clip_fraction", x, {"cell": cell, "ratio": "ppo"}) for cell, x in cells.items())
        writer.store.write(type(_row(step))(step, float(step), readings))
    writer.spike(10, "phantom_fraction", value=0.17, baseline=0.05, severity="warning")
    says = "phantom clipping takes 17% of tokens: training and rollout precision differ"
    assert client.run("a")["headline"] == says


def _row(step: int):  # type: ignore[no-untyped-def]
    from seismograd import Row

    return Row(step, 0.0, ())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.signal)
@pytest.mark.parametrize("value", [38.0, "nan", 0.3])
def test_every_rule_has_a_sentence(runs: Path, client: Client, rule, value: object) -> None:  # type: ignore[no-untyped-def]
    writer = Writer(runs, "a").steps(3)
    writer.spike(2, rule.signal, key=f'{rule.selection.metric}{{layer="11",where="logp"}}', value=value, score=value)
    (finding,) = client.run("a")["findings"]
    assert finding["signal"] == rule.signal
    assert "2" in finding["text"]
    assert rule.signal in _SUBJECTS or rule.signal.split("_")[0] in finding["text"] or "not finite" in finding["text"]
    assert "_" not in finding["text"], "words, not identifiers"


def test_a_quiet_run_says_so(runs: Path, client: Client) -> None:
    Writer(runs, "a").steps(12)
    assert client.run("a")["headline"] == "quiet: no rule has fired in 12 steps"


# -- the list -------------------------------------------------------------------------------------------------------


def test_states_and_last_values(runs: Path, client: Client) -> None:
    live = Writer(runs, "live").steps(7)
    Writer(runs, "finished", ago=1e6).steps(3).finish()
    Writer(runs, "died", ago=1000.0).steps(3)
    Writer(runs, "starting", ago=1000.0)
    Writer(runs, "never", ago=4000.0)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.db").write_bytes(b"no database at all" * 100)
    (runs / "no-run").mkdir()
    live.spike(3)
    found = {run["name"]: run for run in client.get("/runs")["runs"]}
    states = {name: run["state"] for name, run in found.items()}
    assert states == {
        "live": "live", "finished": "finished", "died": "died", "starting": "live", "never": "died",
        "broken": "unreadable",
    }  # fmt: skip
    assert "run.db" in found["broken"]["problem"]
    assert (found["live"]["step"], found["live"]["spikes"]) == (7, 1)
    with RunStore.read(runs / "live" / "run.db") as store:
        assert found["live"]["values"]["kl"] == store.series("kl", estimator="k3")[-1][1]
        assert found["live"]["values"]["reward"] == store.series("trainer_metric", name="reward")[-1][1]
    live.step(8)
    assert client.run("live")["summary"]["step"] == 8


def test_a_slow_run_is_not_dead(runs: Path, client: Client) -> None:
    """Its steps take 200 s: nothing for 1,000 s is no sign."""
    writer = Writer(runs, "slow", ago=1000.0)
    writer.store.write(type(_row(1))(1, writer.start, (Reading("step_seconds", 200.0),)))
    assert client.get("/runs")["runs"][0]["state"] == "live"


@pytest.mark.slow
def test_a_thousand_runs(runs: Path, client: Client) -> None:
    for i in range(1000):
        Writer(runs, f"run-{i:04d}").steps(1).finish()
    assert len(client.get("/runs")["runs"]) == 1000
    assert {run["step"] for run in client.get("/runs")["runs"]} == {1}


def test_the_folder_of_one_run(runs: Path) -> None:
    Writer(runs, "a").steps(2)
    Writer(runs, "b").steps(2)
    with serve(runs / "a") as server:
        client = Client(server)
        assert [run["name"] for run in client.get("/runs")["runs"]] == ["a"]
        assert client.run("a")["last_step"] == 2
        assert client.ask("/api/v1/runs/b")[0] == 404


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with serve(tmp_path / "later") as server:
        client = Client(server)
        assert client.get("/runs")["runs"] == []
        Writer(tmp_path / "later", "a").steps(1)
        assert len(client.get("/runs")["runs"]) == 1


# -- live -----------------------------------------------------------------------------------------------------------


def test_the_stream_takes_up_where_it_broke_off(runs: Path, client: Client) -> None:
    writer = Writer(runs, "a").steps(5)
    cursor = client.run("a")["cursor"]
    assert cursor == "10-0"
    writer.step(6)
    writer.spike(6)
    path = f"/runs/a/live?select={quote(GRAD)}&cursor={cursor}"
    (first, kind, rows), (second, also, events), (_, state, summary) = client.stream(path, 3)
    assert (kind, also, state) == ("rows", "events", "state")
    assert (first, second) == ("12-0", "12-1")
    assert rows["step"] == [6, 6]
    with RunStore.read(runs / "a" / "run.db") as store:
        assert rows["series"][0]["value"] == [store.series("grad_norm", layer="all", group="all")[-1][1], None]
    assert events[0]["data"]["signal"] == "grad_norm"
    assert summary["state"] == "live"
    writer.step(7, math.nan)
    # The header of a browser that connects again goes before the cursor in the address.
    again = client.stream(path, 1, {"Last-Event-ID": second})
    assert again[0][2]["step"] == [7, 7]
    assert again[0][2]["series"][0]["value"] == ["nan", None]


def test_who_is_far_behind_reads_again(runs: Path, client: Client) -> None:
    writer = Writer(runs, "a")
    writer.store._db.execute("BEGIN")
    for step in range(1, 1102):
        writer.step(step)
    writer.store._db.execute("COMMIT")
    assert client.stream("/runs/a/live?select=kl&cursor=5-0", 1)[0][1] == "reset"
    assert client.stream("/runs/a/live?select=kl&cursor=999999-0", 1)[0][1] == "reset"
    assert client.ask("/api/v1/runs/a/live?select=kl&cursor=x")[0] == 400
    assert client.ask("/api/v1/runs/a/live?cursor=0-0")[0] == 400
    assert client.ask("/api/v1/runs/b/live?select=kl")[0] == 404


def test_new_rows_come_into_an_open_stream(runs: Path, client: Client) -> None:
    writer = Writer(runs, "a").steps(2)
    thread = threading.Timer(1.0, lambda: writer.step(3))
    thread.start()
    events = client.stream("/runs/a/live?select=kl&cursor=4-0", 2)
    thread.join()
    assert [kind for _, kind, _ in events] == ["state", "rows"]
    assert set(events[1][2]["step"]) == {3}


# -- safety ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1234", "[::1]:80", "LOCALHOST:9", "127.5.5.5"])
def test_hosts_of_this_machine(client: Client, host: str) -> None:
    assert client.ask("/api/v1/runs", {"Host": host})[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.com", "localhost.evil.com", "127.0.0.1.evil.com", "evil.com@localhost", "", "localhost/x", "0.0.0.0",
             "192.168.1.7", "[::2]", "localhost:x"]
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/v1/runs", "/static/run.js"])
def test_foreign_hosts_are_refused(client: Client, host: str, path: str) -> None:
    status, headers, body = client.ask(path, {"Host": host})
    assert status in (400, 421)
    assert b"runs" not in body
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "origin", ["http://evil.com", "null", "http://localhost:1", "https://evil.com:8686", "file://"]
)
def test_foreign_origins_are_refused(client: Client, origin: str) -> None:
    assert client.ask("/api/v1/runs", {"Origin": origin})[0] == 403
    assert client.ask("/api/v1/runs", {"Origin": f"http://127.0.0.1:{client.port}"})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_read_only(client: Client, method: str) -> None:
    status, headers, _ = client.ask("/api/v1/runs", method=method)
    assert status == 405
    assert "access-control-allow-origin" not in headers


def test_nothing_is_written_into_a_run(runs: Path, client: Client) -> None:
    Writer(runs, "a").steps(5).finish()
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(runs.rglob("*"))}
    client.run("a")
    client.get("/runs")
    client.run("a", "/series", ("select", "kl"))
    client.run("a", "/events")
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(runs.rglob("*"))} == before


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2fsecret", "%2fetc", "a%2f..%2f..%2fsecret", "link", "a%00", "%5c..%5csecret", ".", "~"],
)
@pytest.mark.parametrize("rest", ["", "/series?select=kl", "/events", "/incidents/step-000001", "/live?select=kl"])
def test_paths_outside_of_the_folder(runs: Path, client: Client, name: str, rest: str) -> None:
    Writer(runs, "a").steps(1)
    secret = Writer(runs.parent, "secret").steps(1)
    secret.incident(1)
    os.symlink(runs.parent / "secret", runs / "link")
    status, _, body = client.ask(f"/api/v1/runs/{name}{rest}")
    assert status in (400, 404)
    assert b"step" not in body or b"no run" in body
    assert [run["name"] for run in client.get("/runs")["runs"]] == ["a"]


@pytest.mark.parametrize(
    "name",
    ["..%2frun", "step-000001.json", "step-1", "..%2f..%2fconfig", "step-000002", "step-000001%00", "step-000003"],
)
def test_incident_names(runs: Path, client: Client, name: str) -> None:
    writer = Writer(runs, "a").steps(1)
    writer.incident(1)
    (runs / "secret.json").write_text("{}")
    (runs.parent / "secret.html").write_text("secret")
    for suffix in ("json", "html"):
        os.symlink(runs.parent / "secret.html", runs / "a" / "incidents" / f"step-000003.{suffix}")
    assert client.ask(f"/api/v1/runs/a/incidents/{name}")[0] == 404
    assert client.ask(f"/runs/a/incidents/{name}.html")[0] == 404
    assert client.ask("/api/v1/runs/a/incidents/step-000001")[0] == 200


@pytest.mark.parametrize(
    "path", ["/static/../api.py", "/static/%2e%2e/api.py", "/static/..%2fapi.py", "/static//etc/passwd"]
)
def test_static_files_only(client: Client, path: str) -> None:
    assert client.ask(path)[0] == 404


def test_policies(runs: Path, client: Client) -> None:
    writer = Writer(runs, "a").steps(1)
    writer.incident(1)
    for path in ("/", "/runs/a", "/api/v1/runs", "/static/main.js", "/nothing"):
        _, headers, _ = client.ask(path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    _, headers, body = client.ask("/runs/a/incidents/step-000001.html")
    assert "script-src" not in headers["content-security-policy"]
    assert headers["content-security-policy"].endswith("sandbox")
    assert body.startswith(b"<!DOCTYPE html>")


def test_hostile_names_are_data(runs: Path, client: Client) -> None:
    name = HOSTILE.replace("/", "|")
    writer = Writer(runs, name).steps(2)
    writer.store.write(type(_row(2))(2, 0.0, logged(2, (HOSTILE,))))
    answer = client.run(name, "/series", ("select", json.dumps(["trainer_metric", HOSTILE])))
    assert answer["series"][0]["labels"] == {"name": HOSTILE}
    status, _, body = client.ask(f"/runs/{quote(name, safe='')}")
    assert status == 200
    assert b"hacked" not in body
    assert client.ask("/api/v1/runs")[1]["content-type"] == "application/json"


def test_odd_runs_do_not_break_the_others(runs: Path, client: Client) -> None:
    """A name that is no text, settings without a bound, a value that is not finite, an event of a later version."""
    from seismograd import RunInfo

    os.makedirs(os.fsencode(runs) + b"/no\xff-text")
    (runs / "folder" / "run.db").mkdir(parents=True)
    Writer(runs, "a").steps(2, {2: math.inf}).event("later", 1, "what is this", x=[1])
    with RunStore.create(runs / "b.db", RunInfo("b", None, {"clip": [{"eps_high": math.inf}]})):
        pass
    (runs / "b").mkdir()
    (runs / "b.db").rename(runs / "b" / "run.db")
    (runs / "b.db-wal").unlink(missing_ok=True)
    os.link(runs / "b" / "run.db", os.fsencode(runs) + b"/no\xff-text/run.db")
    assert client.run("b")["config"] == {"clip": [{"eps_high": "inf"}]}
    found = {run["name"]: run for run in client.get("/runs")["runs"]}
    assert set(found) == {"a", "b"}
    assert found["a"]["values"]["grad_norm"] == "inf"
    assert client.run("a", "/events")["events"][0]["kind"] == "later"


# -- a token --------------------------------------------------------------------------------------------------------

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def guarded(runs: Path) -> Iterator[Client]:
    with serve(runs, host="0.0.0.0", token=TOKEN) as server:
        yield Client(server)


def test_without_the_token_nothing(guarded: Client) -> None:
    for path in ("/", "/api/v1/runs", "/static/main.js", "/?token=wrong-wrong-wrong-wrong"):
        status, _, body = guarded.ask(path)
        assert status == 401
        assert TOKEN.encode() not in body
    assert guarded.ask("/api/v1/runs", {"Authorization": f"Bearer {TOKEN}"})[0] == 200
    assert guarded.ask("/api/v1/runs", {"Authorization": "Bearer "})[0] == 401
    assert guarded.ask("/api/v1/runs", {"Host": "10.1.2.3:8686", "Authorization": f"Bearer {TOKEN}"})[0] == 200
    assert guarded.ask("/api/v1/runs", {"Host": "evil.com", "Authorization": f"Bearer {TOKEN}"})[0] == 421


def test_the_token_of_the_address_becomes_a_cookie(guarded: Client) -> None:
    status, headers, _ = guarded.ask(f"/runs/a%20b%3F%23?from=3&token={TOKEN}")
    assert status == 303
    assert headers["location"] == "/runs/a%20b%3F%23?from=3"
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert guarded.ask("/api/v1/runs", {"Cookie": cookie.split(";")[0]})[0] == 200
    assert guarded.ask("/api/v1/runs", {"Cookie": "seismograd_token=x"})[0] == 401
    status, headers, _ = guarded.ask(f"//evil.com/?token={TOKEN}")
    assert not headers.get("location", "").startswith("//")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_beyond_loopback_a_token_is_demanded(host: str, capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    with pytest.raises(ValueError, match="ssh -L"):
        Access(host)
    assert main(["serve", str(runs), "--host", host, "--port", "0"]) == 2
    assert "--token" in capsys.readouterr().err


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ValueError, match="16 characters"):
        Access("127.0.0.1", "short")


def test_a_port_that_is_taken(runs: Path, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(runs), "--port", str(client.port)]) == 2
    assert "--port" in capsys.readouterr().err


# -- documents ------------------------------------------------------------------------------------------------------


def test_metrics_are_the_catalogue(client: Client) -> None:
    answer = client.get("/metrics")
    assert [metric["name"] for metric in answer["metrics"]] == list(CATALOGUE)
    assert [rule["signal"] for rule in answer["rules"]] == [rule.signal for rule in RULES]


def test_the_documented_script_runs(runs: Path, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    Writer(runs, "a b?").steps(3).finish()
    text = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    plain, pandas = [part.split("```", 1)[0] for part in text.split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec(plain.replace("127.0.0.1:8686", f"127.0.0.1:{client.port}"), names)
    exec(pandas, names)
    assert names["frame"]["trainer_metric reward"].to_dict() == {step: math.sin(step / 7) for step in (1, 2, 3)}
    printed = capsys.readouterr().out
    assert "grad_norm {'layer': 'all', 'group': 'all'}\n1 1." in printed
    assert "trainer_metric {'name': 'reward'}\n1 0.14" in printed
