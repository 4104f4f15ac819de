"""Effective sample size, the surrogate objective and what the ratios come to by sequence, on known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from seismograd import ClipSpec
from seismograd.collectors.effective import effective_sample_readings, effective_sample_size
from seismograd.collectors.effects import what_if_readings
from seismograd.collectors.sequences import GSPO, sequence_readings
from seismograd.collectors.surrogate import surrogate_readings
from seismograd.collectors.table import HostBatch, TokenTable
from seismograd.controls.cleanratio import clipped_loss
from tests.test_ratio import NAN, table, values


def drawn(seed: int = 0, scale: float = 0.3) -> dict[str, list[list[float]]]:
    """Six sequences of five tokens."""
    rng = np.random.default_rng(seed)
    logp = rng.normal(-2, 1, (6, 5))
    return {
        "logp": logp.tolist(),
        "rollout_logp": (logp - rng.normal(0, scale, (6, 5))).tolist(),
        "advantage": rng.normal(0, 1, (6, 1)).tolist(),
    }


MASK = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 1]]


def ratios(columns: dict[str, list[list[float]]]) -> list[list[float]]:
    """Of the trained tokens, by sequence; float32, as the table has them."""
    logp, rollout = (np.float32(columns[key]) for key in ("logp", "rollout_logp"))
    log_ratio = logp.astype(float) - rollout.astype(float)
    return [
        [math.exp(x) for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(log_ratio, MASK, strict=True)
    ]


def test_effective_sample_size_is_kish_s() -> None:
    columns = drawn()
    found = values(effective_sample_readings(table(mask=MASK, **columns)))
    by_sequence = ratios(columns)
    tokens = [r for row in by_sequence for r in row]
    products = [math.prod(row) for row in by_sequence if row]
    for level, weights in (("token", tokens), ("sequence", products)):
        expected = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
        assert found[f'effective_sample_size_ratio{{level="{level}"}}'] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("log_weights", "expected"), [([0.0] * 7, 7), ([2000.0, 0, 0], 1), ([-900.0, -900.0], 2)])
def test_effective_sample_size_of_extremes(log_weights: list[float], expected: float) -> None:
    assert effective_sample_size(np.array(log_weights)) == pytest.approx(expected)


def test_effective_sample_size_leaves_out_what_is_not_known() -> None:
    t = table(logp=[[0.0, 0.0, NAN]], rollout_logp=[[0.0, NAN, 0.0]])
    assert values(effective_sample_readings(t)) == {
        'effective_sample_size_ratio{level="token"}': 1.0,
        'effective_sample_size_ratio{level="sequence"}': 1.0,
    }
    assert effective_sample_readings(table(logp=[[0.0]])) == []
    assert effective_sample_readings(table(logp=[[0.0]], rollout_logp=[[0.0]], mask=[[0]])) == []


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.2, 0.28), (1e-6, 1e-6)])
def test_surrogate_is_the_loss_s_own(bounds: tuple[float, float]) -> None:
    torch = pytest.importorskip("torch")
    columns = drawn()
    found = values(surrogate_readings(table(mask=MASK, **columns), [ClipSpec("ppo", *bounds)]))
    logp, rollout, advantage = (
        torch.tensor(columns[k], dtype=torch.float64) for k in ("logp", "rollout_logp", "advantage")
    )
    loss = clipped_loss(logp - rollout, advantage, *bounds)[torch.tensor(MASK).bool()].mean()
    assert found == {'surrogate_objective{ratio="ppo"}': pytest.approx(-float(loss), rel=1e-5)}


def test_surrogate_of_extremes() -> None:
    t = table(logp=[[0.0, 0.0, 0.0]], rollout_logp=[[-1e4] * 3], advantage=[[1.0, 0.0, -1.0]])
    assert values(surrogate_readings(t, [ClipSpec(delta=4.0)])) == {
        'surrogate_objective{ratio="ppo"}': pytest.approx((1.2 + 0 - 4.0) / 3)
    }
    assert values(surrogate_readings(t, [ClipSpec()]))['surrogate_objective{ratio="ppo"}'] == -math.inf
    for kind in ("mask", "cap", "truncate"):
        assert surrogate_readings(t, [ClipSpec(kind=kind)]) == []  # type: ignore[arg-type]
    assert surrogate_readings(table(logp=[[0.0]], rollout_logp=[[0.0]]), [ClipSpec()]) == []


def test_surrogate_by_sequence() -> None:
    columns = drawn()
    spec = ClipSpec(eps_low=0.05, eps_high=0.05, level="sequence_mean")
    found = values(surrogate_readings(table(mask=MASK, **columns), [spec]))
    terms = []
    for row, (advantage,) in zip(ratios(columns), columns["advantage"], strict=True):
        if row:
            s = math.prod(row) ** (1 / len(row))
            terms += [min(s * advantage, min(max(s, 0.95), 1.05) * advantage)] * len(row)
    assert found == {'surrogate_objective{ratio="ppo"}': pytest.approx(sum(terms) / len(terms), rel=1e-5)}


def test_sequence_mean_is_gspo_s_ratio() -> None:
    columns = drawn()
    found = values(sequence_readings(table(mask=MASK, **columns), []))
    logs = [math.log(math.prod(row) ** (1 / len(row))) for row in ratios(columns) if row]
    for stat, expected in {
        "mean": np.mean(logs), "std": np.std(logs), "min": min(logs), "max": max(logs), "abs_max": max(map(abs, logs)),
    }.items():  # fmt: skip
        assert found[f'sequence_mean_log_ratio{{stat="{stat}"}}'] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_sequences_that_are_clipped() -> None:
    columns = drawn(scale=6e-4)
    own = ClipSpec(eps_low=2e-4, eps_high=1e-4, level="sequence_mean")
    found = values(sequence_readings(table(mask=MASK, **columns), [own]))
    sequences = [
        (math.prod(row) ** (1 / len(row)), a)
        for row, (a,) in zip(ratios(columns), columns["advantage"], strict=True)
        if row
    ]
    for bounds, spec in (("own", own), ("gspo", GSPO)):
        lost = [(s > 1 + spec.eps_high and a > 0) or (s < 1 - spec.eps_low and a < 0) for s, a in sequences]
        assert 0 < sum(lost) < len(lost)
        assert found[f'sequence_clip_fraction{{bounds="{bounds}",ratio="ppo"}}'] == sum(lost) / len(lost)


def test_a_sequence_level_mask_is_the_run_s_own() -> None:
    spec = ClipSpec("importance", math.inf, 2.0, "mask", "sequence_sum")
    t = table(
        logp=[[0.0, 0.0], [0.0, 0.0]], old_logp=[[0.0, 0.0], [0.0, 0.0]], rollout_logp=[[-1.0, -1.0], [-0.1, -0.1]],
        advantage=[[1.0], [1.0]],
    )  # fmt: skip
    found = values(sequence_readings(t, [spec]))
    assert found['sequence_clip_fraction{bounds="own",ratio="importance"}'] == 0.5
    assert found['sequence_clip_fraction{bounds="gspo",ratio="ppo"}'] == 0.0  # old_logp is its reference


def test_sequences_that_are_not_known() -> None:
    shape = (1, 3)
    columns = {"logp": np.zeros(shape, np.float32), "rollout_logp": np.zeros(shape, np.float32)}
    batch = HostBatch(np.ones(shape, np.float32), columns, {}, None, np.full(shape, -1))
    t = TokenTable.of([batch], engine=True)
    assert sequence_readings(t, [GSPO]) == []
    assert [*values(effective_sample_readings(t))] == ['effective_sample_size_ratio{level="token"}']


def test_what_the_controls_would_have_done() -> None:
    columns = drawn(scale=1.2)
    found = values(what_if_readings(table(mask=MASK, **columns)))
    by_sequence = ratios(columns)
    tokens = [r for row in by_sequence for r in row]
    sums = [math.prod(row) for row in by_sequence for _ in row]
    means = [math.prod(row) ** (1 / len(row)) for row in by_sequence for _ in row]
    expected = {
        "tis": [r > 2 for r in tokens],
        "icepop": [not 0.5 <= r <= 5 for r in tokens],
        "mis_sum": [not 0.5 <= r <= 2 for r in sums],
        "mis_mean": [not 0.5 <= r <= 2 for r in means],
    }
    for control, touched in expected.items():
        assert 0 < sum(touched) < len(touched)
        assert found[f'control_effect_fraction{{control="{control}"}}'] == pytest.approx(np.mean(touched))
