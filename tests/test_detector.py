"""The rule table and the detector that applies it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from seismograd.telemetry.baselines import Above, Below, Envelope
from seismograd.telemetry.detector import Detector, Measured, measured
from seismograd.telemetry.records import Reading, Spike
from seismograd.telemetry.rules import RULES, Given, Match, Rule, Selection, on_probe, promql


def rule(selection: Selection, baseline: object = Envelope(factor=3), **more: object) -> Rule:
    return Rule("signal", selection, baseline, "step", "critical", "It jumped.", "Look.", **more)  # type: ignore[arg-type]


GLOBAL = Selection("grad_norm", (Match("layer", "=", "all"),))
LAYERS = Selection("grad_norm", (Match("layer", "!=", "all"), Match("group", "=", "all")))


def norms(step_values: dict[str, float]) -> dict[str, Measured]:
    labels = [{"layer": layer, "group": "all"} for layer in step_values]
    return {"grad_norm": Measured(labels, np.array(list(step_values.values())))}


def test_spike_says_what_where_and_against_what() -> None:
    detector = Detector([rule(GLOBAL)])
    for step in range(20):
        assert detector.judge(step, norms({"all": 1.0, "0": 9.0})) == []
    (spike,) = detector.judge(20, norms({"all": 12.0, "0": 9.0}))
    assert spike == Spike(
        "signal", 'grad_norm{layer="all",group="all"}', 20, 12.0, 1.0, 3.0, 12.0, "critical", "It jumped."
    )
    assert spike.sentence() == ('step 20: It jumped. grad_norm{layer="all",group="all"} = 12 (usual 1, threshold 3)')


def test_worst_series_is_named() -> None:
    detector = Detector([rule(LAYERS)])
    for step in range(20):
        detector.judge(step, norms({"all": 1.0, "0": 1.0, "1": 0.1, "2": 1.0}))
    (spike,) = detector.judge(20, norms({"all": 50.0, "0": 5.0, "1": 2.0, "2": 1.0}))
    assert spike.key == 'grad_norm{layer="1",group="all"}'  # 20 times its usual, layer 0 only 5 times


def test_cool_down_counts_but_marks_repeats() -> None:
    detector = Detector([rule(GLOBAL, cooldown=5)])
    found = []
    for step in range(60):
        value = 1000.0 if step in (20, 21, 23, 40) else 1.0
        found += detector.judge(step, norms({"all": value}))
    assert [(spike.step, spike.repeat) for spike in found] == [(20, False), (21, True), (23, True), (40, False)]


@pytest.mark.parametrize("spacing", [1, 50])
def test_durations_count_measurements(spacing: int) -> None:
    """Whatever a probe's spacing is, each of its rules waits for as many of its runs."""
    on_probes = [r for r in RULES if on_probe(r) and isinstance(r.baseline, (Above, Below))]
    assert {r.signal for r in on_probes} == {"phantom_fraction", "hidden_fraction", "snr"}
    for watched in on_probes:
        assert isinstance(watched.baseline, (Above, Below))
        bound, labels = watched.baseline.bound, {"cell": "", "ratio": "ppo"} if watched.signal != "snr" else {}
        labels |= {match.label: match.value for match in watched.selection.where}
        seen = {watched.selection.metric: Measured([labels], np.array([bound * 1.5 if bound < 1 else bound / 2]))}
        if watched.given is not None:
            seen |= {"clip_fraction": Measured([{"cell": "phantom", "ratio": "ppo"}], np.array([0.02]))}
        detector, fired = Detector([watched]), []
        for step in range(1, 25 * spacing + 1):
            fired += [spike.step for spike in detector.judge(step, seen if step % spacing == 0 else {})]
        assert fired == [watched.baseline.steps * spacing]


def test_given_condition() -> None:
    phantom = Selection("clip_fraction", (Match("cell", "=", "phantom"),))
    detector = Detector([rule(Selection("snr"), Below(1.0, steps=2), given=Given(phantom, 0.01))])

    def step(snr: float, fraction: float) -> list[Spike]:
        readings = [Reading("snr", snr), Reading("clip_fraction", fraction, {"cell": "phantom", "ratio": "ppo"})]
        return detector.judge(0, measured(readings))

    assert not any(step(0.5, 0.0) for _ in range(10))
    assert not step(0.5, 0.02)
    assert step(0.5, 0.02)


def test_nonfinite_fires_at_once() -> None:
    (nonfinite,) = [r for r in RULES if r.signal == "nonfinite"]
    detector = Detector([nonfinite])
    where = [{"where": "gradient"}, {"where": "logp"}]
    assert detector.judge(0, {"nonfinite_total": Measured(where, np.array([0.0, 0.0]))}) == []
    (spike,) = detector.judge(1, {"nonfinite_total": Measured(where, np.array([0.0, 2.0]))})
    assert spike.key == 'nonfinite_total{where="logp"}'


def test_series_that_come_and_go() -> None:
    detector = Detector([rule(LAYERS)])
    for step in range(30):
        detector.judge(step, norms({"0": 1.0} if step % 2 else {"1": 2.0, "0": 1.0}))
    assert detector.judge(30, norms({"2": 1e9})) == []  # new: it warms up first
    assert [s.key for s in detector.judge(31, norms({"1": 100.0}))] == ['grad_norm{layer="1",group="all"}']


def test_state_survives_a_checkpoint() -> None:
    whole, before, after = (Detector(RULES) for _ in range(3))
    for step in range(40):
        for detector in (whole, before):
            detector.judge(step, norms({"all": 1.0, "0": 0.5}))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    spiked = norms({"all": 7.0, "0": 0.5})
    assert after.judge(40, spiked) == whole.judge(40, spiked) != []


def test_a_state_that_cannot_be_read_changes_nothing() -> None:
    detector, other = Detector(RULES), Detector(RULES)
    for step in range(40):
        detector.judge(step, norms({"all": 1.0, "0": 0.5}))
        other.judge(step, norms({"all": 3.0, "0": 2.0}))
    before = json.dumps(detector.state_dict())
    good = json.loads(json.dumps(other.state_dict()))
    for name, bad in (("series", [["0", "all"], ["1", "all"]]), ("state", {}), ("last_spike", "never")):
        with pytest.raises((LookupError, ValueError)):
            detector.load_state_dict({**good, "layer_grad_norm": {**good["layer_grad_norm"], name: bad}})
        assert json.dumps(detector.state_dict()) == before
    detector.reset()
    assert detector.state_dict() == Detector(RULES).state_dict()


def test_rules_are_consistent() -> None:
    assert len({r.signal for r in RULES}) == len(RULES)
    for r in RULES:
        assert r.summary.endswith(".")
        assert r.advice.endswith(".")
    with pytest.raises(ValueError, match="not in the catalogue"):
        Selection("no_such_metric")
    with pytest.raises(ValueError, match="no label"):
        Selection("snr", (Match("layer", "=", "0"),))


def test_promql() -> None:
    by_signal = {r.signal: promql(r) for r in RULES}
    assert by_signal["grad_norm"] == 'increase(seismograd_spikes_total{signal="grad_norm"}[5m]) > 0'
    assert by_signal["nonfinite"] == 'increase(seismograd_spikes_total{signal="nonfinite"}[5m]) > 0'
    counted = 'and on (job, run) seismograd_spikes_total{signal="'
    phantom = 'avg_over_time(seismograd_clip_fraction{cell="phantom"}[5m]) > 0.03'
    assert by_signal["phantom_fraction"] == f'{phantom} {counted}phantom_fraction"}} > 0'
    assert by_signal["snr"].startswith("seismograd_snr < 1 and on (job, run) seismograd_clip_fraction")
    assert by_signal["snr"].endswith(f'{counted}snr"}} > 0')
    free = rule(Selection("overhead_ratio"), Above(0.02, steps=5), hold="5m")  # measured on every step
    assert promql(free) == "seismograd_overhead_ratio > 0.02"
    assert isinstance({r.signal: r for r in RULES}["nonfinite"].baseline, Above)


def test_numbers_that_begin_again_do_not_silence_a_spike() -> None:
    detector = Detector([rule(GLOBAL)])
    found = []
    for step, value in [*((n, 1.0) for n in range(1, 90)), (90, 1e3), *((n, 1.0) for n in range(1, 30)), (30, 1e6)]:
        found += detector.judge(step, norms({"all": value}))
    assert [(spike.step, spike.repeat) for spike in found] == [(90, False), (30, False)]
