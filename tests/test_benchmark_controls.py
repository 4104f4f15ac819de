"""The benchmark of the controls runs, and counts what it says it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bank import Spec
from benchmarks.controls import judged, of_honest, runs
from benchmarks.layer_incidents import Spikes, Step, Story, incident, of_incidents
from seismograd.controls.layerclip import REFERENCES, References
from seismograd.telemetry.incidents import Explained, Incident
from seismograd.telemetry.layers import Grouping, Place
from tests.commands import python


@pytest.mark.slow
def test_it_runs_and_writes_its_table(tmp_path: Path) -> None:
    out = python("-m", "benchmarks.controls", "--quick", "--out", tmp_path, seconds=900)
    assert (tmp_path / "controls.md").read_text().strip() in out.stdout
    found = {f["what"]: f for f in json.loads((tmp_path / "controls.json").read_text())["findings"]}
    assert found["LayerClip's own code over a step, thread clock"]["values"]["share"] > 0
    # What no machine changes.
    of_faults = [f for what, f in found.items() if what.startswith(REFERENCES) and "honest" not in what]
    assert [f["verdict"] for f in of_faults] == ["PASS"] * 6
    assert [len(f["values"]["incidents"]) for f in of_faults if "incidents" in f["values"]] == [4, 4]


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


PLACES = [Place(name, "all of it") for name in ("embedding", "0", "1", "2", "3", "4")]


def step(*norms: float) -> Step:
    over = Grouping.of(PLACES[: len(norms)])
    return Step(over, over.norms(np.array(norms), float(np.linalg.norm(norms))))


def story(sick: Step, verdict: str = "B") -> Story:
    """Twenty honest steps of norm 1 in six layers, and one more."""
    found = Explained(Incident(20, verdict, (), "", "attribution", time=0.0))
    return Story(Spec("embedding", "qwen3", 0), [step(*[1.0] * 6)] * 20, sick, ("embedding",), found)


def test_spikes_are_the_rule_tables() -> None:
    spikes = Spikes()
    assert not any(spikes(i, step(1, 1)) for i in range(12))
    assert not spikes(12, step(2, 2))
    (alone,) = spikes(13, step(1, 7))  # a layer alone; the whole is now not three times what it was
    assert alone.signal == "layer_grad_norm"
    assert [spike.signal for spike in spikes(14, step(50, 50))] == ["grad_norm", "layer_grad_norm"]


def test_what_is_kept_by_hand() -> None:
    """Six layers of norm 1, max_norm the honest |G|; the embedding at 100."""
    one = incident(story(step(100, 1, 1, 1, 1, 1)), "peers")
    assert one.clipped == one.sick == ("embedding",)
    assert one.enabled
    assert one.spikes == ("grad_norm", "layer_grad_norm")
    assert one.exploded == pytest.approx(100)
    assert one.threshold == pytest.approx(np.sqrt(6))
    assert one.kept == pytest.approx(1)
    assert one.without == 1
    assert one.share_alone == pytest.approx(np.sqrt(6) / np.sqrt(100**2 + 5))


def test_policy_decides_whether_it_is_switched_on() -> None:
    assert not incident(story(step(100, 1, 1, 1, 1, 1), verdict="A.1"), "peers").enabled
    quiet = incident(story(step(2, 1, 1, 1, 1, 1)), "peers")
    assert (quiet.spikes, quiet.enabled, quiet.caught) == ((), False, False)


def test_an_incident_that_is_missed_fails_the_benchmark() -> None:
    caught = incident(story(step(100, 1, 1, 1, 1, 1)), "peers")
    missed = replace(caught, clipped=(), enabled=False, kept=0.1)
    assert [f.passed for f in of_incidents("history", [caught])] == [True, True, True]
    assert [f.passed for f in of_incidents("peers", [caught, missed])] == [False, False, False, None]
