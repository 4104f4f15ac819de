"""alpha, beta and what follows, on tables with known answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from seismograd.collectors.ratio import (
    alpha_beta_readings,
    log_ratio_readings,
    loss_weight_readings,
    nonfinite_counts,
)
from seismograd.collectors.table import HostBatch, TokenTable
from seismograd.telemetry.records import Reading

NAN = math.nan


def table(
    mask: list[list[int]] | None = None,
    engine: bool = True,
    staleness: list[int] | None = None,
    left_out: dict[str, list[list[int]]] | None = None,
    **columns: list[list[float]],
) -> TokenTable:
    """One micro-batch; the mask is all ones unless given."""
    arrays = {key: np.array(values, dtype=np.float32) for key, values in columns.items()}
    shape = arrays["logp"].shape
    batch = HostBatch(
        mask=np.ones(shape, np.float32) if mask is None else np.array(mask, np.float32),
        columns=arrays,
        left_out={k: np.array(v, np.float32) for k, v in (left_out or {}).items()},
        staleness=None if staleness is None else np.array(staleness, np.float32),
    )
    return TokenTable.of([batch], engine)


def values(readings: list[Reading]) -> dict[str, float]:
    return {reading.key: reading.value for reading in readings}


def test_alpha_and_beta_add_up_to_the_log_ratio() -> None:
    rng = np.random.default_rng(0)
    logp, shadow, rollout = (rng.normal(-2, 1, (3, 7)) for _ in range(3))
    t = table(logp=logp.tolist(), shadow_logp=shadow.tolist(), rollout_logp=rollout.tolist())
    found = values(alpha_beta_readings(t)) | values(log_ratio_readings(t))
    total = found["alpha_mean"] + found["beta_mean"]
    assert total == pytest.approx(found['log_ratio{stat="mean"}'], abs=1e-12)
    assert found["snr"] == found["alpha_abs_mean"] / found["beta_abs_mean"]


def test_known_answers() -> None:
    t = table(
        logp=[[-1.0, -2.0, -9.0], [-1.0, -30.0, -1.0]],
        shadow_logp=[[-1.1, -2.2, -9.0], [-1.0, -29.0, 0.0]],
        rollout_logp=[[-1.0, -2.0, -8.0], [-1.5, -29.5, 5.0]],
        advantage=[[1.0], [-1.0]],
        mask=[[1, 1, 1], [1, 1, 0]],
        staleness=[0, 3],
    )
    found = values(alpha_beta_readings(t)) | values(log_ratio_readings(t))
    assert found["beta_abs_mean"] == pytest.approx((0.1 + 0.2 + 0 + 0 + 1) / 5, rel=1e-5)
    assert found["beta_mean"] == pytest.approx((0.1 + 0.2 - 1) / 5, rel=1e-5)
    assert found["beta_abs_max"] == pytest.approx(1.0, rel=1e-5)
    assert found["alpha_abs_mean"] == pytest.approx((0.1 + 0.2 + 1 + 0.5 + 0.5) / 5, rel=1e-5)
    assert found["alpha_floor"] == pytest.approx((0.1 + 0.2 + 1) / 3, rel=1e-5)
    assert found['beta_abs_mean_by_rarity{rarity="common"}'] == pytest.approx(0.3 / 3, rel=1e-5)
    assert found['beta_abs_mean_by_rarity{rarity="uncommon"}'] == 0
    assert found['beta_abs_mean_by_rarity{rarity="rare"}'] == pytest.approx(1.0, rel=1e-5)
    assert found['sequence_log_ratio{stat="min"}'] == pytest.approx(-1.0)
    assert found['sequence_log_ratio{stat="max"}'] == pytest.approx(0.0, abs=1e-6)
    log_ratio = np.array([0, 0, -1, 0.5, -0.5])
    assert found['kl{estimator="k1"}'] == pytest.approx(-log_ratio.mean())
    assert found['kl{estimator="k3"}'] == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean())


def test_correlation_of_beta_with_the_advantage() -> None:
    t = table(logp=[[0.0, 0.0], [0.0, 0.0]], shadow_logp=[[-1.0, -1.0], [1.0, 1.0]], advantage=[[2.0], [-2.0]])
    assert values(alpha_beta_readings(t))["beta_advantage_correlation"] == pytest.approx(1.0)
    constant = table(logp=[[0.0, 0.0]], shadow_logp=[[-1.0, 1.0]], advantage=[[2.0]])
    assert "beta_advantage_correlation" not in values(alpha_beta_readings(constant))


def test_unclamped_log_ratio() -> None:
    t = table(logp=[[-0.1, -0.1]], rollout_logp=[[-90.1, -0.1]])
    found = values(log_ratio_readings(t))
    assert found['log_ratio{stat="max"}'] == pytest.approx(90.0)
    assert found['kl{estimator="k3"}'] == pytest.approx(math.exp(90) / 2, rel=1e-4)
    huge = values(log_ratio_readings(table(logp=[[0.0]], rollout_logp=[[-1e4]])))
    assert huge['kl{estimator="k3"}'] == math.inf
    assert huge['log_ratio{stat="abs_max"}'] == 1e4


def test_quotient_by_a_beta_of_zero_is_nan() -> None:
    t = table(logp=[[-1.0]], shadow_logp=[[-1.0]], rollout_logp=[[-2.0]])
    found = values(alpha_beta_readings(t))
    assert found["beta_abs_mean"] == 0
    assert math.isnan(found["snr"])


def test_trainer_s_own_recompute_has_no_gap_of_precision() -> None:
    t = table(logp=[[-1.0]], shadow_logp=[[-1.25]], rollout_logp=[[-1.5]], engine=False)
    found = values(alpha_beta_readings(t))
    assert found["alpha_abs_mean"] == 0.5  # the whole log-ratio
    assert found["beta_abs_mean"] == 0.25  # what an engine would add
    assert "snr" not in found
    assert "alpha_floor" not in found


def test_without_the_probe_there_is_no_beta() -> None:
    assert alpha_beta_readings(table(logp=[[-1.0]], rollout_logp=[[-2.0]])) == []
    assert log_ratio_readings(table(logp=[[-1.0]])) == []


def test_nonfinite_values_are_counted_and_left_out_of_means() -> None:
    t = table(
        logp=[[-1.0, -1.0, NAN]], shadow_logp=[[-2.0, -1.0, 0.0]], rollout_logp=[[-1.0, NAN, -1.0]],
        loss_weight=[[1.0, math.inf, 1.0]],
    )  # fmt: skip
    assert nonfinite_counts(t) == {"logp": 1, "rollout_logp": 1, "shadow_logp": 0, "loss_weight": 1}
    found = values(alpha_beta_readings(t))
    assert found["beta_abs_mean"] == 0.5  # of the two finite ones
    assert found["alpha_abs_mean"] == 1.0  # as of (-2, -1) and (0, -1)


def test_loss_weights() -> None:
    t = table(logp=[[-1.0, -3.0], [-2.0, -2.0]], loss_weight=[[0.5, -0.5], [1.0, 9.0]], mask=[[1, 1], [1, 0]])
    found = values(loss_weight_readings(t))
    assert found["trained_tokens"] == 3
    assert found['loss_weight{stat="abs_max"}'] == 1.0
    assert found['loss_weight{stat="l2"}'] == pytest.approx(math.sqrt(1.5))
    assert found["sequence_loss_weight"] == 2.0  # |1.0 * -2.0|, over |-0.5 + 1.5|


def test_micro_batches_of_different_shapes_make_one_table() -> None:
    a = HostBatch(np.ones((2, 3), np.float32), {"logp": np.zeros((2, 3), np.float32)}, {}, np.zeros(2, np.float32))
    columns: dict[str, Any] = {"logp": np.ones((1, 5), np.float32), "shadow_logp": np.zeros((1, 5), np.float32)}
    b = HostBatch(np.array([[0, 0, 1, 1, 1]], np.float32), columns, {}, None)
    t = TokenTable.of([a, b], engine=True)
    assert len(t.logp) == 9
    assert t.sequences == 3
    assert t.sequence.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert t.shadow_logp is not None
    assert np.isnan(t.shadow_logp).tolist() == [True] * 6 + [False] * 3
    assert np.isnan(t.staleness).tolist() == [False] * 6 + [True] * 3
    assert t.advantage is None


def test_empty_mask_gives_no_means() -> None:
    t = table(logp=[[-1.0]], shadow_logp=[[-2.0]], rollout_logp=[[-1.0]], loss_weight=[[1.0]], mask=[[0]])
    assert alpha_beta_readings(t) == []
    assert log_ratio_readings(t) == []
    assert values(loss_weight_readings(t)) == {"trained_tokens": 0.0}
