"""The four cells and the tokens taken away, against known answers and against autograd itself."""

from __future__ import annotations

import math

import pytest
import torch

from seismograd.collectors.clipping import clip_readings, taken_away
from seismograd.telemetry.records import ClipSpec
from tests.test_ratio import table, values

LN = math.log


def cell(found: dict[str, float], name: str, ratio: str = "ppo", metric: str = "clip_fraction") -> float:
    return found[f'{metric}{{cell="{name}",ratio="{ratio}"}}']


def test_four_cells() -> None:
    # log r = alpha + beta; bounds ln 0.8 = -0.223 and ln 1.2 = 0.182; A > 0, so only the upper one takes away.
    alpha = [0.3, 0.1, 0.3, 0.0, -0.5]
    beta = [0.0, 0.2, -0.2, 0.0, 0.0]
    t = table(
        logp=[[a + b for a, b in zip(alpha, beta, strict=True)]],
        shadow_logp=[alpha],
        rollout_logp=[[0.0] * 5],
        advantage=[[1.0]],
    )
    found = values(clip_readings(t, [ClipSpec()]))
    assert cell(found, "legitimate") == 1 / 5
    assert cell(found, "phantom") == 1 / 5
    assert cell(found, "hidden") == 1 / 5
    assert cell(found, "open") == 2 / 5
    # By region alone the last token, below the lower bound, counts too.
    assert cell(found, "legitimate", metric="clip_region_fraction") == 2 / 5
    assert found['gradient_taken_fraction{reason="clip"}'] == 2 / 5
    assert found['gradient_taken_fraction{reason="zero_advantage"}'] == 0


def test_ratio_of_two_forwards_of_the_trainer_has_no_phantom() -> None:
    t = table(
        logp=[[0.5, 0.0]], shadow_logp=[[0.1, 0.4]], rollout_logp=[[0.1, 0.0]], old_logp=[[0.0, 0.0]],
        advantage=[[1.0]],
    )  # fmt: skip
    found = values(clip_readings(t, [ClipSpec()]))
    assert cell(found, "legitimate") == 0.5
    assert cell(found, "phantom") == cell(found, "hidden") == 0
    same = table(logp=[[0.5, 0.0]], rollout_logp=[[0.0, 0.0]], advantage=[[1.0]], engine=False)
    assert cell(values(clip_readings(same, [ClipSpec()])), "legitimate") == 0.5  # and needs no probe


def test_reference_equal_to_the_engine_s_is_the_engine_s() -> None:
    t = table(
        logp=[[0.3]], shadow_logp=[[0.0]], rollout_logp=[[0.0]], old_logp=[[0.0]], advantage=[[1.0]]
    )  # fmt: skip
    assert cell(values(clip_readings(t, [ClipSpec()])), "phantom") == 1


def test_without_the_probe_only_what_is_known() -> None:
    t = table(logp=[[0.3, 0.0]], rollout_logp=[[0.0, 0.0]], advantage=[[1.0]])
    found = values(clip_readings(t, [ClipSpec()]))
    assert found == {
        'gradient_taken_fraction{reason="clip"}': 0.5,
        'gradient_taken_fraction{reason="zero_advantage"}': 0.0,
    }


def test_importance_mask_of_a_sequence() -> None:
    # Sums of old - rollout: ln 4 and ln 2; the cap of 3 masks the first. beta explains all of it: phantom.
    t = table(
        logp=[[LN(2), LN(2)], [LN(2), 0.0]],
        old_logp=[[LN(2), LN(2)], [LN(2), 0.0]],
        shadow_logp=[[0.0, 0.0], [LN(2), 0.0]],
        rollout_logp=[[0.0, 0.0], [0.0, 0.0]],
        advantage=[[1.0], [-1.0]],
    )
    spec = ClipSpec("importance", math.inf, 2.0, "mask", "sequence_sum")
    found = values(clip_readings(t, [spec]))
    assert cell(found, "phantom", "importance") == 0.5
    assert cell(found, "open", "importance") == 0.5
    assert found['gradient_taken_fraction{reason="importance"}'] == 0.5


def test_token_that_the_engine_could_not_score_has_an_importance_ratio_of_one() -> None:
    t = table(
        logp=[[0.0, 0.0]], old_logp=[[0.0, 0.0]], shadow_logp=[[0.0, 0.0]], rollout_logp=[[math.nan, -5.0]],
        advantage=[[1.0]],
    )  # fmt: skip
    found = values(clip_readings(t, [ClipSpec("importance", math.inf, 2.0, "mask", "token")]))
    assert found['gradient_taken_fraction{reason="importance"}'] == 0.5


def test_masks_of_the_loss_by_name() -> None:
    t = table(
        logp=[[0.0] * 4], rollout_logp=[[0.0] * 4], advantage=[[0.0]], mask=[[1, 1, 0, 0]],
        left_out={"tool": [[0, 0, 1, 0]], "off_policy": [[1, 0, 0, 0]], "entropy": [[0, 1, 0, 0]]},
    )  # fmt: skip
    found = values(clip_readings(t, [ClipSpec()]))
    assert found['gradient_taken_fraction{reason="tool"}'] == pytest.approx(1 / 3)  # the fourth is no completion token
    assert found['gradient_taken_fraction{reason="off_policy"}'] == pytest.approx(1 / 3)
    assert found['gradient_taken_fraction{reason="entropy"}'] == pytest.approx(1 / 3)
    assert found['gradient_taken_fraction{reason="zero_advantage"}'] == pytest.approx(2 / 3)


def policy_loss(log_ratio: torch.Tensor, advantage: torch.Tensor, spec: ClipSpec) -> torch.Tensor:
    """(B, T) the losses as their papers and TRL write them."""
    weights = log_ratio if spec.level == "token" else log_ratio.mean(-1, keepdim=True).expand_as(log_ratio)
    r = weights.exp()
    if spec.kind == "cap":  # CISPO: the weight is detached, the gradient goes through log-prob
        return -r.clamp(max=1 + spec.eps_high).detach() * advantage * log_ratio
    clipped = r.clamp(1 - spec.eps_low, 1 + spec.eps_high)
    if spec.delta is not None:
        r = r.clamp(max=spec.delta)
    return -torch.min(r * advantage, clipped * advantage)


@pytest.mark.parametrize(
    "spec",
    [
        ClipSpec(),
        ClipSpec(eps_low=0.1, eps_high=0.5),
        ClipSpec(eps_low=1.5),
        ClipSpec(delta=1.6),
        ClipSpec(level="sequence_mean"),
        ClipSpec(kind="cap", eps_low=math.inf, eps_high=0.3),
    ],
    ids=str,
)
def test_taken_away_is_what_autograd_says(spec: ClipSpec) -> None:
    rng = torch.Generator().manual_seed(0)
    log_ratio = (0.5 * torch.randn(40, 9, generator=rng)).requires_grad_()
    advantage = torch.randn(40, 1, generator=rng)
    policy_loss(log_ratio, advantage, spec).sum().backward()
    assert log_ratio.grad is not None
    t = table(logp=log_ratio.tolist(), rollout_logp=torch.zeros_like(log_ratio).tolist(), advantage=advantage.tolist())
    taken = taken_away(t, spec, t.logp)
    assert taken.tolist() == (log_ratio.grad == 0).flatten().tolist()
    assert taken.any() == (spec.kind == "clip")


def test_a_kl_term_does_not_hide_what_the_clip_takes() -> None:
    """With beta = 0.04 dL/dlogp of a clipped token is the KL's, not 0; the formula still says clipped."""
    log_ratio = torch.tensor([[0.5, 0.0]], requires_grad=True)
    kl = torch.exp(-1 - log_ratio) - (-1 - log_ratio) - 1
    (policy_loss(log_ratio, torch.ones(1, 1), ClipSpec()) + 0.04 * kl).sum().backward()
    assert (log_ratio.grad != 0).all()  # type: ignore[union-attr]
    t = table(
        logp=log_ratio.tolist(), rollout_logp=[[0.0, 0.0]], advantage=[[1.0]], loss_weight=log_ratio.grad.tolist()
    )  # type: ignore[union-attr]  # fmt: skip
    assert values(clip_readings(t, [ClipSpec()]))['gradient_taken_fraction{reason="clip"}'] == 0.5


def test_infinite_ratios_do_not_overflow() -> None:
    t = table(logp=[[1e4, -1e4]], rollout_logp=[[0.0, 0.0]], advantage=[[1.0]])
    assert taken_away(t, ClipSpec(), t.logp).tolist() == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"eps_low": -0.1}, "clip.eps_low"), ({"eps_high": math.nan}, "clip.eps_high"), ({"delta": 0}, "clip.delta"),
     ({"kind": "clamp"}, "clip.kind"), ({"level": "batch"}, "clip.level"), ({"ratio": "x"}, "clip.ratio")],
)  # fmt: skip
def test_impossible_bounds_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClipSpec(**change)  # type: ignore[arg-type]
