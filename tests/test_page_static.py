"""The page's own files: nothing that turns text into HTML, nothing from elsewhere, the vendored library as it was."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parent.parent / "dashboards" / "page" / "static"
OURS = sorted(STATIC.glob("*.*"))
MODULES = sorted(STATIC.glob("*.js"))
# Of the npm package uplot-1.6.32.tgz.
UPLOT = {
    "uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.mark.parametrize("file", [*MODULES, STATIC / "uplot" / "uPlot.esm.js"], ids=lambda f: f.name)
def test_text_never_becomes_html_or_code(file: Path) -> None:
    text = file.read_text()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "DOMParser",
        "eval(",
        "new Function",
    ):
        assert word not in text, f"{file.name}: {word}"


@pytest.mark.parametrize("file", OURS, ids=lambda f: f.name)
def test_nothing_comes_from_elsewhere(file: Path) -> None:
    """No address of another machine but in comments, and no style or script within the HTML."""
    text = re.sub(r"/\*.*?\*/|(?m:^\s*//.*$)", "", file.read_text(), flags=re.S)
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text.replace("http://www.w3.org/2000/svg", "")) == []
    if file.suffix == ".html":
        assert re.findall(r"<script(?! type=\"module\" src=)|<style|\sstyle=|\son\w+=", text) == []


def test_every_module_is_preloaded() -> None:
    html = (STATIC / "index.html").read_text()
    for module in MODULES:
        assert f'<link rel="modulepreload" href="/static/{module.name}">' in html


def test_the_vendored_library_is_unchanged() -> None:
    assert (STATIC / "uplot" / "VERSION").read_text().startswith("uPlot 1.6.32,")
    assert {file.name for file in (STATIC / "uplot").iterdir()} == {*UPLOT, "VERSION"}
    for name, digest in UPLOT.items():
        assert hashlib.sha256((STATIC / "uplot" / name).read_bytes()).hexdigest() == digest, name


def test_files_are_of_a_size_that_can_be_read() -> None:
    assert {file.name: n for file in OURS if (n := len(file.read_text().splitlines())) > 350} == {}
