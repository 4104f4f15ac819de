"""The baselines on constructed series with known answers, and on honest GRPO."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seismograd.collectors.gradients import layer_proportions
from seismograd.telemetry.baselines import Above, Baseline, Below, Envelope, MeanAbove, Robust
from seismograd.telemetry.rules import RULES

DATA = Path(__file__).parent / "data"
NAN, INF = float("nan"), float("inf")


def fired(baseline: Baseline, series: list[float] | np.ndarray) -> list[int]:
    """The positions at which a single series fires."""
    state = baseline.state(1)
    return [i for i, x in enumerate(series) if state.judge(np.array([float(x)])).fired[0]]


class TestEnvelope:
    def test_constant_series_without_variance_never_fires(self) -> None:
        assert fired(Envelope(), [1.0] * 300) == []

    def test_step_change_fires_until_it_is_usual(self) -> None:
        # 10 is above 3 * 1; it enters as 3; 10 is above 9; it enters as 9; 10 is below 27.
        assert fired(Envelope(factor=3), [1.0] * 50 + [10.0] * 50) == [50, 51]

    def test_slow_drift_does_not_fire(self) -> None:
        assert fired(Envelope(), np.exp(np.linspace(0, np.log(1e4), 2000))) == []
        assert fired(Envelope(), np.exp(np.linspace(np.log(1e4), 0, 2000))) == []

    def test_bursts_between_silences_do_not_fire(self) -> None:
        quiet = [1e-8] * 200
        assert fired(Envelope(), ([1.0] * 20 + quiet + [0.9, 1.1]) * 5) == []

    def test_single_spike_fires_once_and_leaves_the_level(self) -> None:
        assert fired(Envelope(factor=3), [1.0] * 50 + [100.0] + [1.0] * 50) == [50]

    def test_spike_does_not_blind_the_next_one(self) -> None:
        assert fired(Envelope(factor=3), [1.0] * 50 + [100.0, 100.0] + [1.0] * 50) == [50, 51]
        assert fired(Envelope(factor=3), [1.0] * 50 + [1e6] + [1.0] * 10 + [10.0]) == [50, 61]

    def test_exact_zeros_are_no_observations(self) -> None:
        assert fired(Envelope(), [0.0] * 100 + [5.0]) == []
        assert fired(Envelope(), [1.0] * 20 + [0.0] * 5000 + [2.5]) == []  # the level did not decay meanwhile

    def test_nonfinite_values_neither_fire_nor_teach(self) -> None:
        assert fired(Envelope(), [1.0] * 20 + [NAN, INF, 1.0, 1.0]) == []

    def test_warm_up(self) -> None:
        assert fired(Envelope(warmup=10), [1.0] * 9 + [100.0]) == []
        assert fired(Envelope(warmup=10), [1.0] * 10 + [100.0]) == [10]

    def test_half_life(self) -> None:
        state = Envelope(half_life=500).state(1)
        state.judge(np.array([8.0]))
        for _ in range(500):
            state.judge(np.array([1e-9]))
        assert state.level[0] == pytest.approx(4.0)  # type: ignore[attr-defined]

    def test_floor(self) -> None:
        assert fired(Envelope(factor=3, floor=0.7), [0.01] * 50 + [0.6]) == []
        assert fired(Envelope(factor=3, floor=0.7), [0.01] * 50 + [0.8]) == [50]
        assert fired(Robust(floor=0.5), [0.01] * 100 + [0.4, 0.6]) == [101]

    def test_value_is_not_its_own_baseline(self) -> None:
        state = Envelope(factor=3).state(1)
        for _ in range(20):
            state.judge(np.array([1.0]))
        verdict = state.judge(np.array([5.0]))
        assert (verdict.baseline[0], verdict.threshold[0], verdict.score[0]) == (1.0, 3.0, 5.0)


class TestRobust:
    def test_constant_series_uses_the_factor_as_its_floor(self) -> None:
        assert fired(Robust(factor=2), [1.0] * 100 + [1.9]) == []
        assert fired(Robust(factor=2), [1.0] * 100 + [2.1]) == [100]

    def test_noise_of_one_mode_does_not_fire_and_an_outlier_does(self) -> None:
        noise = np.exp(np.random.default_rng(0).normal(0, 0.3, 3000))
        assert fired(Robust(), noise) == []
        assert fired(Robust(), [*noise, 20.0]) == [3000]

    def test_slow_drift_does_not_fire(self) -> None:
        noise = np.random.default_rng(1).normal(0, 0.1, 5000)
        assert fired(Robust(), np.exp(np.linspace(0, 3, 5000) + noise)) == []

    def test_two_in_a_row(self) -> None:
        assert fired(Robust(), [1.0] * 100 + [50.0, 50.0, 1.0]) == [100, 101]

    def test_lasting_change_becomes_usual_within_the_window(self) -> None:
        found = fired(Robust(window=128), [1.0] * 200 + [10.0] * 200)
        assert found[0] == 200
        assert found[-1] < 200 + 128

    def test_only_the_upper_side_unless_told(self) -> None:
        assert fired(Robust(), [1.0] * 100 + [0.01]) == []
        assert fired(Robust(both_sides=True), [1.0] * 100 + [0.01]) == [100]

    def test_zeros_and_nonfinite_values_are_no_observations(self) -> None:
        assert fired(Robust(), [1.0] * 100 + [0.0, NAN, INF, 1.0]) == []

    def test_warm_up(self) -> None:
        assert fired(Robust(warmup=32), [1.0] * 31 + [100.0]) == []
        assert fired(Robust(warmup=32), [1.0] * 32 + [100.0]) == [32]


class TestThresholds:
    def test_fires_once_until_it_has_come_back(self) -> None:
        assert fired(Above(0.5, steps=3), [1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]) == [5, 11]
        assert fired(Below(0.5, steps=2), [0, 0, 0, 1, 0, 0]) == [1, 5]

    def test_steps_that_were_not_measured_do_not_count(self) -> None:
        assert fired(Above(0.5, steps=2), [1, NAN, NAN, 1]) == [3]

    def test_mean_above_a_bound_fires_where_values_swing_about_it(self) -> None:
        swinging = [0.11, 0.08, 0.05, 0.03] * 4
        assert fired(Above(0.05, steps=5), swinging) == []
        assert fired(MeanAbove(0.05, steps=8), swinging) == [8], "at full window, on a value that is above itself"
        assert fired(MeanAbove(0.05, steps=8), [0.11, 0.03, 0.02, 0.03] * 8) == []

    def test_mean_above_fires_once_until_the_mean_has_come_back(self) -> None:
        assert fired(MeanAbove(0.5, steps=2), [1, 1, 1, 0, 0, 1, 1, NAN, 1]) == [1, 6]

    def test_infinity_is_above(self) -> None:
        assert fired(Above(0.0), [0, 0, INF]) == [2]


@pytest.mark.parametrize(
    "baseline", [Envelope(), Robust(), Above(0.5, 2), MeanAbove(0.5, 4)], ids=lambda b: type(b).__name__
)
class TestState:
    def test_survives_json(self, baseline: Baseline) -> None:
        values = np.exp(np.random.default_rng(2).normal(0, 0.5, (150, 3)))
        whole, first, second = baseline.state(3), baseline.state(3), baseline.state(3)
        for row in values[:100]:
            whole.judge(row)
            first.judge(row)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for row in values[100:]:
            a, b = whole.judge(row * 4), second.judge(row * 4)
            assert np.array_equal(a.fired, b.fired)
            assert np.array_equal(a.threshold, b.threshold, equal_nan=True)

    def test_of_other_series_is_refused_and_changes_nothing(self, baseline: Baseline) -> None:
        state, other = baseline.state(2), baseline.state(3)
        for value in (1.0, 2.0):
            state.judge(np.array([value, value]))
            other.judge(np.array([value, value, value]))
        before = json.dumps(state.state_dict())
        good = state.state_dict()
        for name in good:
            for bad in (other.state_dict()[name], "x", None):
                with pytest.raises((TypeError, ValueError)):
                    state.load_state_dict({**good, name: bad})
                assert json.dumps(state.state_dict()) == before

    def test_new_series_begin_their_own_warm_up(self, baseline: Baseline) -> None:
        state = baseline.state(1)
        for _ in range(200):
            state.judge(np.array([0.1]))
        state.extend(1)
        verdict = state.judge(np.array([0.1, 0.1]))
        assert not verdict.fired.any()
        assert verdict.fired.shape == (2,)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=80))
def test_any_series_is_judged_without_an_error(series: list[float]) -> None:
    for baseline in (Envelope(), Robust(warmup=4, window=8), Above(0.0), MeanAbove(0.0, 4), Below(0.0)):
        fired(baseline, series)


def honest(number: int) -> dict[str, np.ndarray]:
    """2,000 honest steps of real GRPO: each column a series."""
    with gzip.open(DATA / f"honest_grpo_{number}.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}


@pytest.mark.parametrize("number", [1, 2])
def test_honest_training_gives_no_spike(number: int) -> None:
    """Each signal of the data against the baseline that the rule table gives it."""
    data = honest(number)
    layers = np.stack([data[key] for key in data if key.startswith("norm_")], axis=1)
    whole = np.sqrt(np.square(layers).sum(axis=1, keepdims=True))
    rules = {rule.signal: rule.baseline for rule in RULES}
    series = {
        "grad_norm": whole,
        "layer_grad_norm": layers,
        "loss_weight": data["loss_weight_absmax"][:, None],
        "layer_proportion": np.stack([layer_proportions(row) for row in layers]),
    }
    for signal, values in series.items():
        state = rules[signal].state(values.shape[1])
        spikes = [i for i, row in enumerate(values) if state.judge(row).fired.any()]
        assert spikes == [], signal


@pytest.mark.parametrize("number", [1, 2])
def test_explosions_in_honest_training_are_found(number: int) -> None:
    """The largest |loss_weight| of an active step times 10, at any time of the run: always found."""
    values = honest(number)["loss_weight_absmax"]
    baseline = {rule.signal: rule.baseline for rule in RULES}["loss_weight"]
    active = np.flatnonzero(values > np.quantile(values, 0.75))
    for at in active[active > 20][::25]:
        spiked = values[: at + 1].copy()
        spiked[at] = 10 * values[:at].max()
        assert fired(baseline, spiked) == [at]
