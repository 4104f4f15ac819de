"""An incident as JSON, page and terminal text, and the command that shows it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from seismograd.cli import main
from seismograd.gradloc.heat import heat
from seismograd.gradloc.page import incident_page
from seismograd.gradloc.terminal import incident_text
from seismograd.telemetry.incidents import (
    INCIDENT_SCHEMA_VERSION,
    VERDICTS,
    Attempt,
    Culprit,
    Incident,
    SequenceShares,
)
from seismograd.telemetry.records import Spike
from seismograd.telemetry.visible import columns, number, percent, visible
from tests.test_house import TOP, modules_after

EVIL = "<script>alert(1)</script>\"'>"
BIDI = "\u202e"
SCHEMA = json.loads((TOP / "docs" / "incident.schema.json").read_text(encoding="utf-8"))
TEXTS = ("nan", " the", "\n", EVIL, BIDI, "\t", "\ud800", " ")


def minimal(**given: Any) -> Incident:
    made = Incident(3, "D", (), "", "ratios", time=0.0)
    return replace(made, **given)


def full() -> Incident:
    """Everything set, and each text hostile or awkward."""
    norms = {
        "embedding": {"embedding": 0.5, "all": 0.5},
        "0": {"attention": 1.0, "mlp": math.inf, "all": math.inf},
        "1": {"attention": math.nan, "mlp": 0.0, "norm": 2e-9},
        EVIL: {EVIL: 3.0},
    }
    culprit = Culprit(
        *(0, 1, 2, 12), sequence=2, share=0.75, loss_weight=-4.0, logp=-19.5, rollout_logp=-math.inf, shadow_logp=-19.0,
        log_ratio=math.nan, sequence_log_ratio=math.inf, advantage=1.5, influence=math.inf, grad_norm=38.0,
        norms=norms, token_id=7, text=EVIL, before=f"nan{BIDI}" + EVIL, after="inf",
    )  # fmt: skip
    shares = (0.1, -0.2, math.nan, 0.75, math.inf, 0.0, 1e-9, -0.01)
    sequence = SequenceShares(0, 1, 2, tuple(range(9, 17)), shares, (0.0, math.nan, *[0.1] * 6), TEXTS)
    spike = Spike("grad_norm", 'grad_norm{layer="all",group="all"}', 41, math.inf, 1.8, 7.2, math.nan, "critical", EVIL)
    return Incident(
        step=41,
        verdict="A.1",
        evidence=(EVIL, "inf"),
        advice=f"Switch TokenClip on {EVIL}",
        method="jvp",
        attempts=(Attempt("attribution", EVIL, math.nan, 2.0, 0.0, "inf"), Attempt("jvp", "believed", 1.0, 1.0, 1.4)),
        completeness=0.9999,
        parts={"tokens": 44.0, EVIL: math.nan},
        grad_norm=math.inf,
        without_culprits=1.9,
        replay_error=2e-6,
        culprits=(culprit, replace(culprit, text=None, position=13), replace(culprit, text="nan", norms=None)),
        sequences=(sequence, replace(sequence, texts=None, log_ratios=None)),
        norms=norms,
        controls={"TIS": {"cap": 2.0, "on": False, EVIL: [EVIL, 1]}, EVIL: {"scale": {"0": math.nan}}, "empty": {}},
        notes=(EVIL, "nan"),
        seconds=3.5,
        spike={**vars(spike)},
        environment={"torch": "nan", EVIL: EVIL},
        run=f"nan{EVIL}",
        time=1.7e9,
    )


INCIDENTS = {
    "minimal": minimal(),
    "full": full(),
    "nameless run": minimal(run="nan", notes=("nan", "inf"), environment={"device": "inf"}, time=math.nan),
    "hand-made": minimal(
        culprits=(Culprit(0, 0, 0, 1, 0, 1.0, -1.0, -2.0),), sequences=(SequenceShares(0, 0, 0, (), ()),)
    ),
}


@pytest.fixture(params=INCIDENTS)
def incident(request: pytest.FixtureRequest) -> Incident:
    return INCIDENTS[request.param]


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, text, headings."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_json_round_trip(incident: Incident) -> None:
    text = incident.to_json()
    back = Incident.from_json(text)
    assert back.to_json() == text
    assert repr(back.culprits) == repr(incident.culprits)
    assert repr(back.sequences) == repr(incident.sequences)
    assert (back.run, back.notes, back.environment) == (incident.run, incident.notes, incident.environment)


def test_a_token_may_be_named_nan() -> None:
    back = Incident.from_json(full().to_json())
    assert back.culprits[2].text == "nan"
    assert back.sequences[0].texts == TEXTS
    assert math.isnan(back.sequences[0].shares[2])
    assert back.culprits[0].rollout_logp == -math.inf
    assert back.culprits[0].norms is not None
    assert math.isnan(back.culprits[0].norms["1"]["attention"])


def test_json_fits_the_published_schema(incident: Incident) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    errors = [e.message for e in Draft202012Validator(SCHEMA).iter_errors(json.loads(incident.to_json()))]
    assert errors == []


@pytest.mark.parametrize(
    "change",
    [{"step": "3"}, {"grad_norm": None}, {"verdict": "Z"}, {"grad_norm": "NaN"}, {"extra": 1}, {"spike": {}}],
    ids=str,
)
def test_the_schema_refuses(change: dict[str, Any]) -> None:
    data = {**json.loads(minimal().to_json()), **change}
    assert not Draft202012Validator(SCHEMA).is_valid(data)


def test_the_schema_has_the_records_fields() -> None:
    records = {"culprit": Culprit, "sequence": SequenceShares, "attempt": Attempt}
    parts = [(SCHEMA, ["schema_version", *(f.name for f in fields(Incident))])]
    parts += [(SCHEMA["$defs"][name], [f.name for f in fields(record)]) for name, record in records.items()]
    parts.append((SCHEMA["$defs"]["spike"], [f.name for f in fields(Spike)]))
    for part, names in parts:
        assert sorted(part["properties"]) == sorted(names)
        assert part["additionalProperties"] is False
        assert all(p["description"] for p in part["properties"].values())
    for part, names in parts[:-1]:
        assert sorted(part["required"]) == sorted(names)
    assert SCHEMA["properties"]["schema_version"]["const"] == INCIDENT_SCHEMA_VERSION
    assert SCHEMA["properties"]["verdict"]["enum"] == list(VERDICTS)


def test_visible() -> None:
    assert visible("a\n\tb c") == "a↵→b c"
    assert visible(f"{BIDI}\u200b\x1b[31m\ud800\u00a0\ufe0f") == "⟨U+202E⟩⟨U+200B⟩⟨U+001B⟩[31m⟨U+D800⟩⟨U+00A0⟩⟨U+FE0F⟩"
    assert visible("\u0301a") == "◌\u0301a"
    assert visible("سلام é 面") == "سلام é 面"
    assert columns("面a\u0301") == 3


def test_numbers() -> None:
    seen = [None, math.nan, -math.inf, True, 12, 1234.56, 2e-6, 1.5e12, "x\n"]
    shown = ["not known", "NaN", "-inf", "yes", "12", "1235", "2e-6", "1.5e12", "x↵"]
    assert [number(x) for x in seen] == shown
    assert [percent(x) for x in (0.4123, -0.5, 1e300, math.nan, None)] == [
        "41.2%",
        "-50%",
        "1e302%",
        "NaN",
        "not known",
    ]


def test_page_is_inert_and_needs_nothing(incident: Incident) -> None:
    html = incident_page(incident)
    html.encode("utf-8")  # lone surrogates are spelled out
    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "img", "base", "form", "svg", "a"}
    for tag, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on") or name in ("src", "srcset", "action")], tag
    assert [a["href"] for _, a in page.tags if "href" in a] == ["data:,"]
    assert not re.search(r"https?:|url\(|@import", html)
    assert not [c for c in html if not c.isprintable() and c != "\n"]
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_page_shows_hostile_text_as_text() -> None:
    html = incident_page(full())
    page = Page(html)
    assert EVIL in page.text
    assert "<script" not in html
    assert "⟨U+202E⟩" in page.text
    assert BIDI not in html
    assert next(a["title"] for t, a in page.tags if t == "mark" and "title" in a) == (
        "position 12, share 75%, log-ratio 0.1 nats"
    )
    titles = [a["title"] or "" for t, a in page.tags if t == "td" and "title" in a]
    assert f"whole step, layer {EVIL}, {EVIL}: 3" in titles
    assert "whole step, layer 1, attention: NaN" in titles


def test_page_is_well_formed(incident: Incident) -> None:
    """Every element is closed in order, tables have scoped heads, headings start at 1 and skip no level."""
    html = incident_page(incident)
    assert html.count("<h1>") == 1
    open_tags: list[str] = []
    for closing, tag in re.findall(r"<(/?)([a-z][a-z0-9]*)", html[html.index("<body") : html.index("</html>")]):
        if tag == "br":
            continue
        if closing:
            assert open_tags.pop() == tag
        else:
            open_tags.append(tag)
    assert open_tags == []
    page = Page(html)
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_page_leaves_out_what_is_not_there() -> None:
    page = Page(incident_page(minimal()))
    for title in ("Evidence", "Culprits", "guilty", "Gradient norms", "controls", "Parts", "tried", "Environment"):
        assert title not in page.text
    assert "not known" in page.text


def test_heat_orders_layers_and_drops_columns_that_say_nothing() -> None:
    norms = {str(i): {"mlp": 10.0**-i, "all": 10.0**-i} for i in (10, 2, 0)}
    drawn = heat([("step", {"head": {"head": 1.0, "all": 1.0}, **norms, "embedding": {"embedding": 1.0, "all": 1.0}})])
    assert drawn is not None
    assert [layer for layer, _ in drawn.rows] == ["embedding", "0", "2", "10", "head"]
    assert drawn.groups == (("mlp", "all"),)
    assert [cells[1].kind for _, cells in drawn.rows] == ["h9", "h9", "h6", "h0", "h9"]
    assert heat([("step", {}), ("token", None)]) is None


@pytest.mark.parametrize("width", [1, 40, 100])
def test_terminal_text(incident: Incident, width: int) -> None:
    text = incident_text(incident, width)
    assert all(line.isprintable() for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= max(width, 40)
    assert f"step {incident.step}: {incident.verdict}" in text


def test_terminal_bars_stand_under_their_tokens() -> None:
    sequence = SequenceShares(0, 0, 0, (5, 6, 7), (0.0, 0.8, -0.4), texts=("A", " 面", "\n"))
    lines = incident_text(minimal(sequences=(sequence,))).splitlines()
    at = lines.index("    A 面↵")
    assert lines[at + 1] == "     ███░"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with two incidents."""
    incidents = tmp_path / "run" / "incidents"
    incidents.mkdir(parents=True)
    for step, verdict in ((1000000, "B"), (41, "A.1")):
        made = replace(full(), step=step, verdict=verdict)
        (incidents / f"step-{step:06d}.json").write_text(made.to_json(), encoding="utf-8")
    return tmp_path / "run"


def test_command_shows_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incident", str(folder / "incidents" / "step-000041.json")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("step 41: A.1 token mismatch")
    assert "headline" not in out
    assert err == ""


@pytest.mark.parametrize("under", ["", "incidents"])
def test_command_lists_a_folder_and_shows_the_last(
    folder: Path, under: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["incident", str(folder / under)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step-000041.json  step 41: A.1 token mismatch, token ")
    assert lines[1].startswith("step-1000000.json  step 1000000: B layer heterogeneity")
    assert lines[3].startswith("step 1000000: B layer heterogeneity")


def test_command_writes_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "page.html"
    assert main(["incident", str(folder), "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == incident_page(
        Incident.from_json((folder / "incidents" / "step-1000000.json").read_text(encoding="utf-8"))
    )
    assert capsys.readouterr().out.endswith(f"page: {page}\n")


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that a failing command says."""
    assert main(["incident", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_command_without_an_incident(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = folder / "step-000009.json"
    assert said(capsys, missing) == (
        f"seismograd incident: {missing}: no such file or folder; incidents are RUNS/NAME/incidents/step-NNNNNN.json\n"
    )
    (folder / "other").mkdir()
    assert f"{folder / 'other'}: no incidents (step-NNNNNN.json) here; give" in said(capsys, folder / "other")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"schema_version": 1, "st', "damaged, not JSON"),
        (b"\xff\xfe", "damaged, not UTF-8"),
        (b"[1]", "no incident, it has no schema_version"),
        (b'{"schema_version": 2}', "schema version 2, this seismograd reads 1; update seismograd"),
        (b'{"schema_version": 1, "verdict": "Z"}', "unknown verdict 'Z'; update seismograd"),
        (b'{"schema_version": 1, "verdict": "D"}', "damaged (Incident.__init__() missing"),
        (b'{"schema_version": 1, "verdict": "D", "culprits": [3]}', "damaged ("),
        (b'{"schema_version": 1, "verdict": [], "culprits": [3]}', "unknown verdict"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_command_with_a_file_that_is_none(
    folder: Path, content: bytes, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = folder / "incidents" / "step-000050.json"
    bad.write_bytes(content)
    assert said(capsys, bad).startswith(f"seismograd incident: {bad}: {problem}")
    # Among others it costs only itself.
    assert main(["incident", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"seismograd incident: {bad}: {problem}")
    assert "step 1000000: B" in out


def test_command_never_overwrites_the_incident(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "incidents" / "step-000041.json"
    before = file.read_bytes()
    assert "would overwrite the incident" in said(capsys, file, "--html", file)
    assert file.read_bytes() == before
    assert "cannot be written" in said(capsys, file, "--html", folder / "no" / "page.html")


def test_jinja_is_loaded_for_pages_only() -> None:
    assert "jinja2" not in modules_after("import seismograd.cli", TOP)
    assert "seismograd.gradloc.terminal" in modules_after("import seismograd.cli", TOP)
