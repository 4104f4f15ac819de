"""The page in a real browser: Debian's Chromium, through Playwright."""

from __future__ import annotations

import csv
import io
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from seismograd import Reading, RunStore
from seismograd.gradloc.page import incident_page
from seismograd.telemetry.incidents import Culprit, Incident
from tests.conftest import require
from tests.pages import HOSTILE, Client, Writer, serve

pytestmark = pytest.mark.alone  # a browser of several processes, and what it shows within two seconds


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = require("chromium", package="chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Watched:
    """What a page asked for and complained about."""

    def __init__(self, page: Page) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must end without an error in its console and without a request to another machine."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    made = context.new_page()
    made.set_default_timeout(60_000)
    watched = Watched(made)
    made.watched = watched  # type: ignore[attr-defined]
    yield made
    context.close()
    assert watched.errors == []
    local = ("http://127.0.0.1:", "blob:http://127.0.0.1:", "data:")
    assert [url for url in watched.requests if not url.startswith(local)] == []


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def opened(page: Page, url: str, chart: str = "grad-norm") -> None:
    """Waits until the charts are drawn."""
    page.goto(url)
    page.wait_for_selector(f"#chart-{chart} canvas")
    page.wait_for_selector("main[aria-busy=false]")


def settled(page: Page) -> None:
    """Waits until the values of what is looked at are there."""
    page.wait_for_selector("main[aria-busy=false]")


def value(page: Page, chart: str, line: int = 0) -> str:
    """The full value in a chart's legend."""
    return page.locator(f"#chart-{chart} .legend .value").nth(line).get_attribute("title") or ""


def table(page: Page, chart: str) -> list[list[str]]:
    """What a chart's CSV holds."""
    with page.expect_download() as download:
        page.locator(f"#chart-{chart}").get_by_role("button", name="CSV").click()
    return list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))


# -- values ---------------------------------------------------------------------------------------------------------


def test_values_are_those_of_the_store(page: Page, runs: Path) -> None:
    Writer(runs, "a").steps(60).finish()
    with RunStore.read(runs / "a" / "run.db") as store, serve(runs) as server:
        opened(page, server.run_url("a"))
        assert float(value(page, "grad-norm")) == store.series("grad_norm", layer="all", group="all")[-1][1]
        assert float(value(page, "reward")) == store.series("trainer_metric", name="reward")[-1][1]
        assert float(value(page, "kl")) == store.series("kl", estimator="k3")[-1][1]
        labels = page.locator("#chart-cells .legend button").all_inner_texts()
        assert labels == ["open", "legitimate", "hidden", "phantom"]
        for i, cell in enumerate(labels):
            assert float(value(page, "cells", i)) == store.series("clip_fraction", cell=cell, ratio="ppo")[-1][1]
        rows = table(page, "grad-norm")
        assert rows[0] == ["step", "gradient norm", "threshold", "usual"]
        assert [(int(r[0]), float(r[1])) for r in rows[1:]] == store.series("grad_norm", layer="all", group="all")
        # The heatmap's cell under the cursor.
        page.locator("#heat-group").select_option("mlp")
        canvas = page.locator("#chart-heatmap canvas")
        canvas.focus()
        page.keyboard.press("ArrowDown")
        shown = page.locator("#chart-heatmap .tip")
        expect(shown).to_contain_text("layer 0, step 60")
        last = store.series("grad_norm", layer="0", group="mlp")[-1][1]
        expect(shown).to_have_attribute("data-value", repr(last))


def test_a_spike_is_seen_at_100_000_steps(page: Page, runs: Path) -> None:
    writer = Writer(runs, "long")
    layout = (("grad_norm", "all", "all"), ("trainer_metric", "reward"))
    writer.store._layout(layout)
    writer.store._db.execute("BEGIN")
    for step in range(1, 100_001):
        norm = 987.25 if step == 31_415 else 1.0 + step % 7 / 10
        row = b"".join(struct.pack("<d", x) for x in (norm, 0.5))
        writer.store._db.execute(
            "INSERT INTO steps (step, time, layout, row) VALUES (?, ?, 0, ?)", (step, float(step), row)
        )
    writer.store._db.execute("COMMIT")
    writer.finish()
    with serve(runs) as server:
        opened(page, server.run_url("long"))
        rows = table(page, "grad-norm")
        assert rows[0][:3] == ["step", "gradient norm min", "gradient norm max"]
        assert len(rows) <= 601
        (spike,) = [row for row in rows[1:] if float(row[2]) == 987.25]
        assert int(spike[0]) <= 31_415 < int(spike[0]) + 256
        # Painted too: the line reaches the top of the plot at its place. Nothing else comes near.
        assert _painted_at_top(page, "grad-norm")
        opened(page, server.run_url("long") + "?from=31400&to=31430")
        rows = table(page, "grad-norm")
        assert [int(row[0]) for row in rows[1:]] == list(range(31_400, 31_431))
        assert float(rows[16][1]) == 987.25


def _painted_at_top(page: Page, chart: str) -> bool:
    """Whether the colour of the line is found in the upper third of the plot."""
    code = """(chart) => {
        const canvas = document.querySelector(`#chart-${chart} canvas`);
        const { data } = canvas.getContext("2d").getImageData(0, 20, canvas.width, canvas.height / 4);
        for (let i = 0; i < data.length; i += 4)
            if (data[i] < 60 && data[i + 1] > 80 && data[i + 1] < 150 && data[i + 2] > 140) return true;
        return false;
    }"""
    return bool(page.evaluate(code, chart))


def test_what_is_not_finite_is_drawn_and_told(page: Page, runs: Path) -> None:
    Writer(runs, "a").steps(20, {7: float("nan")}).finish()
    with serve(runs) as server:
        opened(page, server.run_url("a"))
        assert table(page, "grad-norm")[7][1] == ""
        canvas = page.locator("#chart-grad-norm canvas").first
        purple = "(c) => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
        purple += " for (let i = 0; i < d.length; i += 4) n += d[i] > 120 && d[i] < 160 && d[i+1] < 60 && d[i+2] > 90;"
        assert canvas.evaluate(purple + " return n; }") > 10


# -- live -----------------------------------------------------------------------------------------------------------


def test_a_new_step_appears_within_two_seconds(page: Page, runs: Path) -> None:
    writer = Writer(runs, "a").steps(5)
    with serve(runs) as server:
        opened(page, server.run_url("a"))
        expect(page.locator(".badge")).to_have_text("live")
        for step in (6, 7, 8):
            writer.step(step, 10.0 + step)
            page.wait_for_function(
                "(want) => document.querySelector('#chart-grad-norm .value')?.title === want",
                arg=str(10 + step),
                timeout=2000,
            )
        writer.spike(8)
        writer.incident(8)
        expect(page.locator(".headline")).to_contain_text("Gradient norm spiked 38x at step 8: 1 token")
        expect(page.locator(".events li.incident")).to_have_count(1)
        writer.finish()
        expect(page.locator(".badge")).to_have_text("finished")
        settled(page)


def test_reopening_gives_the_same_picture(page: Page, runs: Path) -> None:
    """A page that was open while its run grew from 3 to 1,000 steps, across changes of resolution, and a new one."""
    writer = Writer(runs, "a").steps(3)
    with serve(runs) as server:
        opened(page, server.run_url("a"))
        for first in range(4, 1001, 83):
            writer.store._db.execute("BEGIN")
            for step in range(first, min(first + 83, 1001)):
                writer.step(step, 77.0 if step == 501 else None)
            writer.store._db.execute("COMMIT")
            time.sleep(0.3)
        page.wait_for_function(
            "() => document.querySelector('#chart-grad-norm .value').dataset.step >= 999", timeout=20_000
        )
        page.wait_for_timeout(1500)  # the band follows once a second
        live = {chart: table(page, chart) for chart in ("grad-norm", "kl", "reward", "cells")}
        writer.finish()
        expect(page.locator(".badge")).to_have_text("finished")
        opened(page, server.run_url("a"))
        assert {chart: table(page, chart) for chart in live} == live
        assert max(float(row[2]) for row in live["grad-norm"][1:]) == 77.0


def test_the_page_goes_on_after_the_server_restarted(page: Page, runs: Path) -> None:
    writer = Writer(runs, "a").steps(5)
    with serve(runs) as server:
        port = server.port
        opened(page, server.run_url("a"))
        expect(page.locator(".badge")).to_have_text("live")
    expect(page.locator(".connection")).to_contain_text("connection lost")
    for step in (6, 7, 8):
        writer.step(step, 20.0 + step)
    with serve(runs, port):
        page.wait_for_function("() => document.querySelector('#chart-grad-norm .value').title === '28'", timeout=90_000)
        expect(page.locator(".connection")).to_be_empty()
        rows = table(page, "grad-norm")
        assert [int(row[0]) for row in rows[1:]] == list(range(1, 9))
        assert [float(row[1]) for row in rows[6:]] == [26.0, 27.0, 28.0]
    watched: Any = page.watched  # type: ignore[attr-defined]
    watched.errors = [error for error in watched.errors if "net::ERR_" not in error]  # the refused connections


def test_a_run_that_begins_while_it_is_watched(page: Page, runs: Path) -> None:
    with serve(runs) as server:
        page.goto(server.url)
        expect(page.get_by_role("heading", name="No runs here yet")).to_be_visible()
        expect(page.get_by_text("seismograd demo --tiny")).to_be_visible()
        writer = Writer(runs, "a")
        page.get_by_role("link", name="a", exact=True).click()
        expect(page.locator(".headline")).to_have_text("Waiting for the first step")
        writer.step(1)
        writer.step(2, 42.0)
        page.wait_for_function(
            "() => document.querySelector('#chart-grad-norm .value')?.title === '42'", timeout=60_000
        )


# -- zoom -----------------------------------------------------------------------------------------------------------


def test_zoom_is_shared_and_is_a_link(page: Page, runs: Path) -> None:
    Writer(runs, "a").steps(200).finish()
    with serve(runs) as server:
        opened(page, server.run_url("a"))
        box = page.locator("#chart-reward .u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=5)
        page.mouse.up()
        page.wait_for_url("**from=*")
        settled(page)
        steps = {chart: [int(row[0]) for row in table(page, chart)[1:]] for chart in ("reward", "kl", "grad-norm")}
        assert steps["reward"] == steps["kl"] == steps["grad-norm"]
        assert 48 <= steps["kl"][0] <= 54
        assert 97 <= steps["kl"][-1] <= 103
        link = page.url
        page.goto("about:blank")
        opened(page, link)
        assert [int(row[0]) for row in table(page, "kl")[1:]] == steps["kl"]
        page.locator("#chart-kl .plot").focus()
        page.keyboard.press("0")
        page.wait_for_function("() => !location.search.includes('from')")
        settled(page)
        assert len(table(page, "reward")) == 201


def test_keyboard_alone(page: Page, runs: Path) -> None:
    """From the list to a run, through its charts, to an incident."""
    writer = Writer(runs, "a").steps(100)
    writer.spike(50)
    writer.incident(50)
    writer.finish()
    with serve(runs) as server:
        page.goto(server.url)
        page.get_by_role("link", name="a", exact=True).wait_for()
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("Skip to the content")
        page.keyboard.press("Enter")
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "a":
                break
        page.keyboard.press("Enter")
        page.wait_for_selector("#chart-grad-norm canvas")
        seen: list[str] = []
        for _ in range(25):
            page.keyboard.press("Tab")
            seen.append(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent"))
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"focus is not seen on {seen[-1]}"
            if seen[-1].startswith("Chart Reward"):
                break
        assert "Look at step 50" in seen
        assert "Open the incident" in seen
        assert seen[-1].startswith("Chart Reward")
        page.keyboard.press("+")
        page.wait_for_url("**from=*")
        page.keyboard.press("Shift+ArrowLeft")
        expect(page.locator("#chart-reward .value")).not_to_have_attribute("data-step", "100")
        page.keyboard.press("0")
        page.wait_for_function("() => !location.search.includes('from')")
        page.get_by_role("link", name="Open the incident").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**/incidents/step-000050.html")


def test_compare_by_step_and_by_time(page: Page, runs: Path) -> None:
    for name in ("a", "b", "c"):
        Writer(runs, name).steps(10 if name == "a" else 20).finish()
    with serve(runs) as server:
        page.goto(server.url)
        page.get_by_label("compare a").check()
        page.get_by_label("compare b").check()
        page.get_by_role("link", name="Compare").click()
        page.wait_for_selector("#chart-reward canvas")
        rows = table(page, "reward")
        assert rows[0] == ["step", "a", "b"]
        assert [row[0] for row in rows[1:]] == [str(i) for i in range(1, 21)]
        assert rows[10][1] == rows[10][2] != ""
        assert rows[11][1] == ""
        page.get_by_role("button", name="by wall time").click()
        rows = table(page, "reward")
        assert rows[0][0] == "time since the start"
        assert float(rows[1][0]) == pytest.approx(60, abs=1)
        assert "x=time" in page.url
        page.reload()
        page.wait_for_selector("#chart-reward canvas")
        assert table(page, "reward")[0][0] == "time since the start"


def test_search_and_a_thousand_rows(page: Page, runs: Path) -> None:
    for i in range(300):
        Writer(runs, f"run-{i:03d}").steps(1).finish()
    with serve(runs) as server:
        page.goto(server.url)
        expect(page.locator("tbody tr")).to_have_count(300)
        page.get_by_label("Search").fill("run-12 finished")
        expect(page.locator("tbody tr:visible")).to_have_count(10)
        expect(page.get_by_text("10 of 300 runs")).to_be_visible()


# -- hostile texts --------------------------------------------------------------------------------------------------


def test_hostile_names_and_tokens_are_inert(page: Page, runs: Path) -> None:
    name = HOSTILE.replace("/", "|")
    writer = Writer(runs, name).steps(3)
    writer.step(4, extra=(Reading("hook_seconds", 1.0, {"part": HOSTILE}),))
    writer.step(5, extra=(Reading("grad_norm", 1.0, {"layer": HOSTILE, "group": HOSTILE}),))
    writer.spike(4, "layer_grad_norm", key=f'grad_norm{{layer="{HOSTILE}",group="all"}}')
    culprit = Culprit(0, 0, 0, 5, 0, share=1.0, loss_weight=1.0, logp=-1.0, text=HOSTILE, before=HOSTILE, after=HOSTILE)
    incident = Incident(4, "A.1", (HOSTILE,), HOSTILE, "attribution", culprits=(culprit,), run=name)
    writer.incident(4, incident_page(incident), evidence=[HOSTILE], advice=HOSTILE)
    writer.event("note", 5, HOSTILE, control=HOSTILE)
    writer.event("control", 5, HOSTILE, control=HOSTILE, before=HOSTILE, after=HOSTILE)
    writer.event("fault", 5, HOSTILE, traceback=HOSTILE)
    Writer(runs, "other").steps(3)
    with serve(runs) as server:
        for path in ("", f"runs/{quote(name, safe='')}", f"compare?a={quote(name, safe='')}&b=other"):
            page.goto(server.url + path)
            page.wait_for_selector("bdi")
            page.wait_for_timeout(700)
            assert page.evaluate("window.hacked") is None
            assert page.locator("main img, main script").count() == 0
            assert "\u202e" not in page.locator("body").inner_text()
            assert "U+202E" in page.locator("body").inner_text()
        page.goto(server.run_url(name))
        page.get_by_role("link", name="Open the incident").first.click()
        page.wait_for_url("**/incidents/**")
        assert "onerror" in page.locator("body").inner_text(), "the token is shown, as text"
        assert page.locator("img, script").count() == 0


def test_scripts_of_others_do_not_run(page: Page, runs: Path) -> None:
    """What a policy is for: even an incident's file that holds a script is inert."""
    writer = Writer(runs, "a").steps(1)
    writer.incident(
        1, "<script>document.title = 'hacked'</script><img src=http://127.0.0.2/x onerror='document.title=1'>"
    )
    with serve(runs) as server:
        page.goto(f"{server.run_url('a')}/incidents/step-000001.html")
        page.wait_for_timeout(300)
        assert page.title() == ""
    watched: Any = page.watched  # type: ignore[attr-defined]
    assert any("Content Security Policy" in error for error in watched.errors)
    watched.errors = [
        error for error in watched.errors if "Content Security Policy" not in error and "sandbox" not in error
    ]
    watched.requests = [url for url in watched.requests if "127.0.0.2" not in url]  # blocked before it left


# -- looks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(browser: Browser, runs: Path, scheme: Any) -> None:
    """Every text on the page has a contrast of at least 4.5 to what lies behind it (WCAG 2.2, 1.4.3)."""
    writer = Writer(runs, "a").steps(30)
    writer.spike(20)
    writer.incident(20)
    writer.event("control", 20, "x is on", control="x", before="armed", after="on")
    Writer(runs, "dead", ago=9999).steps(2)
    with serve(runs) as server:
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        for url, wait in ((server.url, "tbody tr"), (server.run_url("a"), "#chart-grad-norm canvas")):
            page.goto(url)
            page.wait_for_selector(wait)
            assert page.evaluate(_CONTRAST) == []
        context.close()


_CONTRAST = """() => {
    const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => {
        const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
    };
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const colour = numbers(getComputedStyle(node).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const bad = [];
    for (const node of document.querySelectorAll("body *")) {
        const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
        if (!text || !node.checkVisibility() || node.closest(".unseen, .skip")) continue;
        const [a, b] = [light(numbers(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) bad.push(`${node.className} ${node.textContent.slice(0, 30)} ${ratio}`);
    }
    return bad;
}"""


def test_narrow(browser: Browser, runs: Path) -> None:
    """On a telephone nothing is wider than the screen, but tables that scroll by themselves."""
    writer = Writer(runs, "a-run-with-a-rather-long-name-20261201-091306").steps(30)
    writer.spike(20)
    writer.incident(20)
    with serve(runs) as server:
        context = browser.new_context(viewport={"width": 360, "height": 800})
        page = context.new_page()
        for url, wait in ((server.url, "tbody tr"), (server.run_url(writer.folder.name), "#chart-grad-norm canvas")):
            page.goto(url)
            page.wait_for_selector(wait)
            for summary in page.locator(".help summary:visible").all():
                summary.click()
                assert page.evaluate("document.documentElement.scrollWidth") <= 360
                page.keyboard.press("Escape")
            assert page.locator(".bubble:visible").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        context.close()


def test_png_and_help(page: Page, runs: Path) -> None:
    Writer(runs, "a").steps(30).finish()
    with serve(runs) as server:
        opened(page, server.run_url("a"))
        with page.expect_download() as download:
            page.locator("#chart-kl").get_by_role("button", name="PNG").click()
        assert download.value.suggested_filename == "seismograd-kl.png"
        assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
        page.locator("#chart-kl summary").click()
        metrics = {m["name"]: m for m in Client(server).get("/metrics")["metrics"]}
        expect(page.locator("#chart-kl .bubble")).to_contain_text(metrics["kl"]["help"])


def test_what_else_the_trainer_logs(page: Page, runs: Path) -> None:
    writer = Writer(runs, "a").steps(5)
    names = ["rewards/format/mean", HOSTILE]
    writer.step(6, extra=tuple(Reading("trainer_metric", 7.5 + i, {"name": name}) for i, name in enumerate(names)))
    with serve(runs) as server:
        opened(page, server.run_url("a"))
        page.get_by_text("2 more").click()
        page.wait_for_selector("#chart-trainer-1 canvas")
        titles = page.locator("#others h3").all_inner_texts()
        assert titles[1] == "rewards/format/mean"
        assert titles[0].startswith("<img src=x")
        assert float(value(page, "trainer-1")) == 7.5
        assert page.evaluate("() => window.hacked") is None


def test_a_page_nobody_looks_at_catches_up(page: Page, runs: Path) -> None:
    """It gives its connection back while it is hidden: a browser has only six for a server."""
    writer = Writer(runs, "a").steps(3)
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with serve(runs) as server:
        opened(page, server.run_url("a"))
        expect(page.locator(".badge")).to_have_text("live")
        page.evaluate(hide, True)
        writer.step(4, 44.0)
        page.wait_for_timeout(1500)
        assert value(page, "grad-norm") != "44"
        page.evaluate(hide, False)
        page.wait_for_function("() => document.querySelector('#chart-grad-norm .value').title === '44'")
        assert [int(row[0]) for row in table(page, "grad-norm")[1:]] == [1, 2, 3, 4]


def test_compared_runs_are_read_closer(page: Page, runs: Path) -> None:
    """Zoomed in, each run at its own resolution: by step, and by wall time."""
    for name in ("a", "b"):
        writer = Writer(runs, name)
        writer.store._db.execute("BEGIN")
        writer.steps(1500, {700: 88.0} if name == "b" else {})
        writer.store._db.execute("COMMIT")
        writer.finish()
    with serve(runs) as server:
        opened(page, f"{server.url}compare?a=a&b=b")
        assert table(page, "grad-norm")[0] == ["step", "a min", "a max", "b min", "b max"]
        opened(page, f"{server.url}compare?a=a&b=b&from=690&to=710")
        settled(page)
        rows = table(page, "grad-norm")
        assert rows[0] == ["step", "a", "b"]
        assert {row[0]: row[2] for row in rows}["700"] == "88"
