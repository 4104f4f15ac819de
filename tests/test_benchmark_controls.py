"""The benchmark of the controls runs, and counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bank import Spec
from benchmarks.controls import Incident, Spikes, Step, incident, judged, of_honest, of_incidents, runs
from seismograd.controls.layerclip import REFERENCES, References
from seismograd.telemetry.layers import Grouping, Place
from tests.commands import python


@pytest.mark.slow
def test_it_runs_and_writes_its_table(tmp_path: Path) -> None:
    out = python("-m", "benchmarks.controls", "--quick", "--out", tmp_path, seconds=900)
    assert (tmp_path / "controls.md").read_text().strip() in out.stdout
    found = {f["what"]: f for f in json.loads((tmp_path / "controls.json").read_text())["findings"]}
    assert found["LayerClip's own code over a step, thread clock"]["values"]["share"] > 0
    caught = [f for what, f in found.items() if "the sick layer clipped" in what]
    assert [f["verdict"] for f in caught] == ["PASS"] * 2  # what no machine changes
    assert all(f["values"]["spikes"] == 2 for f in caught)


@pytest.mark.parametrize("reference", REFERENCES)
def test_twelve_thousand_honest_steps(reference: References) -> None:
    assert sum(len(norms) for _, _, norms in runs()) == 12_000
    found = of_honest(reference)
    assert [f.values["steps"] for f in found] == [12_000, 12_000, 8_000, 8_000]
    assert [f.values["count"] for f in found] == [0] * 4


def test_an_explosion_and_a_burst_are_counted() -> None:
    """A layer alone at fifty times its size switches on; the whole model at fifty times does not, by its peers."""
    over, norms = Grouping.of([Place(str(i), "mlp") for i in range(6)]), np.ones((60, 6))
    norms[40, 2] = 50
    norms[50] = 5000
    assert judged(over, norms, "peers", False) == (1, 1)
    assert judged(over, norms, "history", False) == (2, 2)
    assert judged(over, norms, "peers", True) == (1, 1)


def test_spikes_are_the_rule_tables() -> None:
    spikes = Spikes(2)
    usual = np.array([np.sqrt(2), 1.0, 1.0])
    assert not any(spikes(usual) for _ in range(12))
    assert not spikes(2 * usual)
    assert spikes(np.array([1.5, 1.0, 7.0]))  # a layer alone; the second is now three times what it was
    assert spikes(np.array([50.0, 1.0, 1.0]))


def test_what_is_kept_by_hand() -> None:
    """Six layers of norm 1, max_norm the honest |G|; the embedding at 100."""
    places = [Place(name, "all of it") for name in ("embedding", "0", "1", "2", "3", "4")]
    over = Grouping.of(places)

    def step(sick: float) -> Step:
        norms = np.array([sick, 1, 1, 1, 1, 1])
        return Step(over, over.norms(norms, float(np.linalg.norm(norms))))

    one = incident(Spec("embedding", "qwen3", 0), [step(1.0)] * 20, step(100.0), "peers")
    assert one.clipped == ("embedding",)
    assert one.spike
    assert one.exploded == pytest.approx(100)
    assert one.threshold == pytest.approx(np.sqrt(6))
    assert one.kept == pytest.approx(1)
    assert one.without == 1
    assert one.share_alone == pytest.approx(np.sqrt(6) / np.sqrt(100**2 + 5))


def test_incidents_that_do_not_spike_are_told_apart() -> None:
    caught = Incident("llama", 80.0, ("embedding",), 1.0, 0.99, 0.1, 1.0, spike=True)
    missed = Incident("llama", 80.0, (), 1.0, 0.1, 0.1, 1.0, spike=True)
    quiet = Incident("llama", 2.0, (), 1.0, 0.8, 0.8, 1.0, spike=False)
    assert [f.passed for f in of_incidents("history", [caught, quiet])] == [True, True, None]
    assert [f.passed for f in of_incidents("peers", [caught, missed, quiet])] == [False, False, None, None]
