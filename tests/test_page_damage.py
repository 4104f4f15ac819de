"""The page before what nobody meant it to see: damaged stores, odd folders, other sites, settings that cannot be."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seismograd.cli import main
from seismograd.dashboards.page.runs import RunsFolder
from seismograd.dashboards.page.safety import Access
from tests.pages import Client, Writer, serve


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def client(runs: Path) -> Iterator[Client]:
    with serve(runs) as server:
        yield Client(server)


def halved(store: Path) -> None:
    store.write_bytes(store.read_bytes()[: store.stat().st_size // 2])


def changed(statement: str) -> Callable[[Path], None]:
    def change(store: Path) -> None:
        db = sqlite3.connect(store)
        db.execute(statement)
        db.commit()
        db.close()

    return change


DAMAGE = {
    "half of it": halved,
    "no steps": changed("DROP TABLE steps"),
    "a row of nothing": changed("UPDATE steps SET row = NULL"),
    "a short row": changed("UPDATE steps SET row = x'00'"),
    "an unknown layout": changed("UPDATE steps SET layout = 99"),
    "a layout that is none": changed("UPDATE steps SET layout = 'x'"),
    "a step that is text": changed("UPDATE steps SET step = 'x'"),
    "meta that is no JSON": changed("UPDATE meta SET value = '{' WHERE key = 'config'"),
    "deep JSON": changed(f"UPDATE meta SET value = '{'[' * 100_000}' WHERE key = 'config'"),
    "an event without data": changed("UPDATE events SET data = NULL"),
    "an event that is no JSON": changed("UPDATE events SET data = 'x'"),
}
ODD_TIMES = {
    "a start that is a list": changed("UPDATE meta SET value = '[]' WHERE key = 'started'"),
    "a start that is no number": changed("UPDATE meta SET value = 'NaN' WHERE key = 'started'"),
    "a time without an end": changed("UPDATE steps SET time = 9e999"),
}


@pytest.mark.parametrize("damage", [*DAMAGE, *ODD_TIMES])
def test_one_damaged_run_hides_no_other(runs: Path, client: Client, damage: str) -> None:
    for name in ("good", "damaged"):
        writer = Writer(runs, name).steps(3)
        writer.spike(2)
        writer.finish()
    {**DAMAGE, **ODD_TIMES}[damage](runs / "damaged" / "run.db")
    found = {run["name"]: run for run in client.get("/runs")["runs"]}
    assert set(found) == {"good", "damaged"}
    assert found["good"]["state"] == "finished"
    if damage in ODD_TIMES or damage.startswith(("meta", "deep")):
        assert found["damaged"]["state"] in ("finished", "unreadable")
    elif found["damaged"]["state"] == "unreadable":
        assert "run.db" in found["damaged"]["problem"]


@pytest.mark.parametrize("damage", [*DAMAGE, *ODD_TIMES])
@pytest.mark.parametrize("rest", ["", "/series?select=kl", "/baseline", "/events"])
def test_a_damaged_run_is_answered_in_one_line(runs: Path, client: Client, damage: str, rest: str) -> None:
    writer = Writer(runs, "damaged").steps(3)
    writer.spike(2)
    writer.finish()
    {**DAMAGE, **ODD_TIMES}[damage](runs / "damaged" / "run.db")
    status, _, body = client.ask(f"/api/v1/runs/damaged{rest}")
    answer = json.loads(body)
    assert status == 200 or "\n" not in answer["error"]
    assert status in (200, 404, 500)


@pytest.mark.parametrize("query", ["from=-1&points=1", "to=-5", "from=-9007199254740992", "from=1e3"])
@pytest.mark.parametrize("what", ["series", "baseline"])
def test_a_window_before_the_beginning_is_refused(runs: Path, client: Client, what: str, query: str) -> None:
    """It would have been halved for ever."""
    Writer(runs, "a").steps(3)
    status, _, body = client.ask(f"/api/v1/runs/a/{what}?select=kl&{query}")
    assert status == 400
    assert json.loads(body)["error"].startswith(query.split("=")[0])


@pytest.mark.parametrize("cursor", ["0-99999999999999999999", "-1-0", "x", "1", "1-2-3"])
def test_a_cursor_that_cannot_be(runs: Path, client: Client, cursor: str) -> None:
    Writer(runs, "a").steps(3)
    status, _, body = client.ask(f"/api/v1/runs/a/live?select=kl&cursor={cursor}")
    assert status == 400
    assert json.loads(body)["error"].startswith("cursor: needs ROW-EVENT")


def test_an_event_with_an_infinite_number_is_text(runs: Path, client: Client) -> None:
    Writer(runs, "a").steps(1).spike(1)
    changed("""UPDATE events SET data = '{"value": Infinity, "of": [NaN]}' WHERE kind = 'spike'""")(
        runs / "a" / "run.db"
    )
    (event,) = client.run("a", "/events", ("kind", "spike"))["events"]
    assert event["data"] == {"value": "inf", "of": ["nan"]}


def test_the_own_folder_of_a_run_shows_no_store_from_elsewhere(runs: Path) -> None:
    Writer(runs, "secret").steps(2).finish()
    own = runs.parent / "own"
    own.mkdir()
    os.symlink(runs / "secret" / "run.db", own / "run.db")
    with serve(own) as server:
        client = Client(server)
        assert client.get("/runs")["runs"] == []
        assert client.ask("/api/v1/runs/own")[0] == 404


def test_a_folder_given_as_a_way_up_has_its_name(runs: Path) -> None:
    (Writer(runs, "a").steps(1).folder / "incidents").mkdir(exist_ok=True)
    folder = RunsFolder(runs / "a" / "incidents" / "..")
    assert [name for name, _ in folder.stores()] == ["a"]
    assert folder.store("a").is_file()


@pytest.mark.parametrize("name", ["a\\b", "a b", "ä", "a#?%"])
def test_what_is_listed_can_be_opened(runs: Path, name: str) -> None:
    Writer(runs, name).steps(1)
    folder = RunsFolder(runs)
    for listed, store in folder.stores():
        assert folder.store(listed) == store
    assert [listed for listed, _ in folder.stores()] == ([] if "\\" in name else [name])


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_an_image_of_another_site_gets_nothing(runs: Path, client: Client, site: str) -> None:
    path = "/api/v1/runs"
    assert client.ask(path, {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"})[0] == 403
    assert client.ask("/", {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"})[0] == 200  # a link may be followed
    assert client.ask(path, {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"})[0] == 200
    assert client.ask(path, {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"})[0] == 200


@pytest.mark.parametrize("token", ["short", "sixteen letters ä", "sixteen letters\n.", "秘密" * 9])
def test_a_token_that_no_cookie_can_hold_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="--token: needs at least 16 characters"):
        Access("127.0.0.1", token)


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_port_that_cannot_be(runs: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(runs), "--port", str(port)]) == 2
    assert f"--port {port}: give a number up to 65535" in capsys.readouterr().err
