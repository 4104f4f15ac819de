"""`seismograd serve` and the demo's page as a person meets them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.pages import Writer


def test_serve_until_ctrl_c(tmp_path: Path) -> None:
    """It says where the page is, answers, and ends cleanly while a stream is open."""
    Writer(tmp_path / "runs", "a").steps(3)
    command = [sys.executable, "-m", "seismograd", "serve", str(tmp_path / "runs"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    url = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert url is not None, line
    with urllib.request.urlopen(url[0] + "api/v1/runs", timeout=30) as answer:
        assert json.load(answer)["runs"][0]["name"] == "a"
    stream = urllib.request.urlopen(url[0] + "api/v1/runs/a/live?select=kl&cursor=0-0", timeout=30)
    assert stream.readline() == b"retry: 1000\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    stream.close()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


PAGE = """
from rich.console import Console
from seismograd.demo.live_page import live_page
with live_page(Console(width=200), {runs!r}, "a", True) as page:
    print("training", flush=True)
"""


@pytest.mark.parametrize("person", [True, False])
def test_the_demo_s_page_stays_for_a_person(tmp_path: Path, person: bool) -> None:
    """On a terminal until Ctrl-C; elsewhere the demo ends by itself."""
    Writer(tmp_path / "runs", "a").steps(3)
    code = PAGE.format(runs=str(tmp_path / "runs"))
    terminal, ours = os.openpty() if person else (-1, subprocess.DEVNULL)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=ours, stdout=ours if person else subprocess.PIPE, stderr=subprocess.STDOUT
    )
    text = b""
    if not person:
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert b"Page: http://127.0.0.1:" in text
        assert b"The page again: seismograd serve" in text
        return
    os.close(ours)
    while b"stays up" not in text:
        text += os.read(terminal, 1000)
    url = re.search(rb"http://[\d.:]+/runs/a", text)
    assert url is not None
    with urllib.request.urlopen(url[0].decode(), timeout=30) as answer:
        assert answer.status == 200
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    os.close(terminal)
