"""LayerClip by itself: which layers it clips, which it leaves alone, and what it keeps."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.honest import columns, read
from seismograd.controls import LayerClip
from seismograd.telemetry.layers import Grouping, Place

DATA = Path(__file__).parent / "data"


def grouping(layers: int) -> Grouping:
    return Grouping.of([Place(str(i), "mlp") for i in range(layers)])


def fed(clip: LayerClip, over: Grouping, norms: np.ndarray[Any, Any]) -> Any:
    """One step's judgement."""
    return clip.judge(over, over.norms(np.asarray(norms, dtype=np.float64), float(np.linalg.norm(norms))))


def net(layers: int = 6, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def with_gradients(model: nn.Module, sizes: list[float], seed: int = 0) -> None:
    """Random gradients of these norms, one a parameter."""
    g = torch.Generator().manual_seed(seed)
    for p, size in zip(model.parameters(), sizes, strict=True):
        direction = torch.randn(p.shape, generator=g)
        p.grad = size * direction / direction.norm()


@pytest.mark.parametrize("reference", ["peers", "history"])
def test_a_layer_out_of_proportion_is_brought_back_and_no_other_is_touched(reference: Any) -> None:
    model, usual = net(), [1.0, 2.0, 0.5, 1.0, 4.0, 1.0]
    clip = LayerClip(model, reference=reference, warmup=4)
    for step in range(8):
        with_gradients(model, usual, step)
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert not clip.clip_().acts
        assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))
    with_gradients(model, [1.0, 2.0, 50.0, 1.0, 4.0, 1.0])
    healthy = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    scales = clip.clip_()
    assert scales.clipped == ("2",)
    assert scales.scales[2] == pytest.approx(0.01)
    for i, p in enumerate(model.parameters()):
        assert p.grad is not None
        if i != 2:
            assert torch.equal(p.grad, healthy[i])
    assert float(list(model.parameters())[2].grad.norm()) == pytest.approx(0.5, rel=1e-5)
    assert scales.norm == pytest.approx(math.sqrt(sum(x * x for x in usual)), rel=1e-6)


def test_a_burst_of_the_whole_model_is_none_of_peers_business_and_is_of_history() -> None:
    over, usual = grouping(8), np.linspace(0.5, 2.0, 8)
    peers, history = LayerClip(net(8)), LayerClip(net(8), reference="history")
    for _ in range(20):
        fed(peers, over, usual), fed(history, over, usual)
    assert not fed(peers, over, 1000 * usual).acts
    assert len(fed(history, over, 1000 * usual).clipped) == 8


@pytest.mark.parametrize("sick", [1, 5, 11, 16])
def test_up_to_the_published_number_of_layers_may_shake_at_once(sick: int) -> None:
    """28 layers, of which a published table has up to 17 between 70 and 120 times their usual norm."""
    random = np.random.default_rng(sick)
    over, usual = grouping(28), np.exp(random.normal(0, 1, 28))
    clip = LayerClip(net(28))
    for _ in range(40):
        honest = usual * np.exp(random.normal(0, 0.2, 28)) * math.exp(random.normal(0, 1))
        assert not fed(clip, over, honest).acts
    for _ in range(20):
        ill = random.choice(28, sick, replace=False)
        norms = usual * np.exp(random.normal(0, 0.2, 28)) * math.exp(random.normal(0, 1))
        norms[ill] *= random.uniform(70, 120, sick)
        scales = fed(clip, over, norms)
        assert {int(name) for name in scales.clipped} == set(ill.tolist())


@pytest.mark.parametrize("sick", [0.2, 0.4])
def test_forty_per_cent_of_the_layers_may_stay_out_of_proportion_for_long(sick: float) -> None:
    """It holds for half a window; then a lasting change is what is usual."""
    random = np.random.default_rng(0)
    over, usual, ill = grouping(20), np.exp(random.normal(0, 1, 20)), int(20 * sick)
    clip = LayerClip(net(20))
    for _ in range(130):
        fed(clip, over, usual * np.exp(random.normal(0, 0.1, 20)))
    for _ in range(50):
        norms = usual * np.exp(random.normal(0, 0.1, 20))
        norms[:ill] *= 100
        assert {int(name) for name in fed(clip, over, norms).clipped} == set(range(ill))
    for _ in range(60):
        norms = usual * np.exp(random.normal(0, 0.1, 20))
        norms[:ill] *= 2.5
        assert not set(fed(clip, over, norms).clipped) - set(map(str, range(ill)))


@pytest.mark.parametrize("number", [1, 2])
def test_no_layer_of_an_honest_run_is_clipped(number: int) -> None:
    """Real GRPO with its bursts and silences: 2,000 steps each, of a rather restless final norm."""
    with gzip.open(DATA / f"honest_grpo_{number}.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    names = [key for key in rows[0] if key.startswith("norm_")]
    over = Grouping.of([Place(name.removeprefix("norm_"), "mlp") for name in names])
    clip = LayerClip(net(len(names)))
    acted = [i for i, row in enumerate(rows) if fed(clip, over, np.array([float(row[n]) for n in names])).clipped]
    assert len(rows) == 2000
    assert acted == []


@pytest.mark.parametrize("reference", ["peers", "history"])
@pytest.mark.parametrize("every", [2, 5, 20])
def test_one_explosion_does_not_blind_it_to_the_next(reference: Any, every: int) -> None:
    """Now and then a hundredfold, thirty times: each is brought back to about the layer's usual size."""
    random = np.random.default_rng(0)
    over, clip = grouping(6), LayerClip(net(6), reference=reference)
    for step in range(30 * every):
        norms = np.exp(random.normal(0, 0.1, 6))
        sick = step >= 30 and step % every == 0
        norms[2] *= 100 if sick else 1
        scales = fed(clip, over, norms)
        assert scales.clipped == (("2",) if sick else ())
        assert (scales.norms * scales.scales)[2] < 4


def test_explosions_in_the_warm_up_do_not_blind_peers() -> None:
    random = np.random.default_rng(0)
    over, clip = grouping(6), LayerClip(net(6))
    caught = []
    for step in range(40):
        norms = np.exp(random.normal(0, 0.1, 6))
        sick = step % 4 == 0
        norms[2] *= 100 if sick else 1
        scales = fed(clip, over, norms)
        if sick and step >= 16:
            caught.append(scales.clipped == ("2",))
    assert all(caught)


def test_a_layer_that_stays_larger_becomes_usual_by_history() -> None:
    over, clip = grouping(6), LayerClip(net(6), reference="history")
    for _ in range(30):
        fed(clip, over, np.ones(6))
    larger = np.array([1, 1, 100.0, 1, 1, 1])
    acted = [bool(fed(clip, over, larger).clipped) for _ in range(120)]
    assert all(acted[:60])
    assert not any(acted[80:])


@pytest.mark.parametrize("number", [3, 4, 5, 6])
@pytest.mark.parametrize("reference", ["peers", "history"])
@pytest.mark.parametrize("groups", [False, True])
def test_no_layer_or_module_group_of_further_honest_runs_is_clipped(number: int, reference: Any, groups: bool) -> None:
    """In the fifth the head's proportion drifts from 0.8 to 3.2 in 100 steps. No constant was set by the sixth."""
    over, rows = read(DATA / f"honest_layers_{number}.csv.gz")
    clip = LayerClip(net(1), reference=reference, groups=groups)
    acted = [i for i, row in enumerate(rows) if fed(clip, over, np.array([row[n] for n in columns(rows)])).clipped]
    assert len(rows) == 2000
    assert acted == []


def test_a_step_that_is_not_finite_is_skipped_and_not_learnt_from() -> None:
    model = net()
    clip = LayerClip(model, warmup=2)
    for step in range(4):
        with_gradients(model, [1.0] * 6, step)
        clip.clip_()
    before = json.dumps(clip.state_dict())
    with_gradients(model, [1.0, 1.0, math.nan, 1.0, 1.0, 1.0])
    optimizer = torch.optim.AdamW(model.parameters())
    weights = [p.detach().clone() for p in model.parameters()]
    scales = clip.clip_()
    optimizer.step()
    assert not scales.finite
    assert scales.acts
    assert json.dumps(clip.state_dict()) == before
    assert all(torch.equal(a, p) for a, p in zip(weights, model.parameters(), strict=True))


def test_nothing_to_read_and_steps_without_signal() -> None:
    model = net()
    clip = LayerClip(model, warmup=2)
    assert not clip.clip_().acts  # no gradient at all
    for step in range(6):
        with_gradients(model, [0.0] * 6 if step % 2 else [1.0] * 6, step)
        assert not clip.clip_().acts
    with_gradients(model, [0.0, 0.0, 0.0, 0.0, 0.0, 5.0])  # one alone: there is nothing to compare it with
    assert not clip.clip_().acts


def test_frozen_shared_and_late_layers() -> None:
    """Frozen ones have no place; a shared weight has one; one that gets a gradient late warms up by itself."""
    model = net(7)
    model[6].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    clip = LayerClip(model, warmup=4)
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(12):
        late = step < 6
        for i, p in enumerate(trained):
            p.grad = None if late and i == 4 else torch.ones_like(p) * (i + 1)
        scales = clip.clip_()
        assert not scales.acts
        assert scales.units == (("0", "2", "3", "4") if late else ("0", "2", "3", "4", "5"))
    trained[4].grad = torch.ones_like(trained[4]) * 500
    assert clip.clip_().clipped == ("5",)


def test_module_groups_by_themselves() -> None:
    over = Grouping.of([Place(str(i), group) for i in range(4) for group in ("attention", "mlp")])
    clip = LayerClip(net(4), groups=True)
    for _ in range(20):
        fed(clip, over, np.ones(8))
    norms = np.ones(8)
    norms[3] = 40
    scales = fed(clip, over, norms)
    assert scales.clipped == ("1/mlp",)
    assert scales.parameter.tolist() == list(range(8))


@pytest.mark.parametrize("reference", ["peers", "history"])
def test_a_saved_state_goes_on_where_it_was(reference: Any) -> None:
    random = np.random.default_rng(0)
    over, steps = grouping(6), np.exp(random.normal(0, 0.1, (60, 6)))
    whole, first, second = (LayerClip(net(), reference=reference) for _ in range(3))
    for row in steps[:30]:
        fed(whole, over, row), fed(first, over, row)
    assert second.load_state_dict(json.loads(json.dumps(first.state_dict()))) == ()
    for row in [*steps[30:], steps[0] * [1, 1, 90, 1, 1, 1]]:
        a, b = fed(whole, over, row), fed(second, over, row)
        assert a.scales.tolist() == b.scales.tolist()
        assert a.thresholds.tolist() == pytest.approx(b.thresholds.tolist(), rel=1e-12)
    assert a.clipped == ("2",)


def test_a_state_of_another_number_of_layers_serves_those_that_are_still_there() -> None:
    old, more, fewer = LayerClip(net(6)), LayerClip(net(8)), LayerClip(net(4))
    for _ in range(20):
        fed(old, grouping(6), np.ones(6))
    assert more.load_state_dict(old.state_dict()) == ("6", "7")
    assert fed(more, grouping(8), np.array([1, 1, 1, 1, 1, 50.0, 1, 50.0])).clipped == ("5",)
    assert fewer.load_state_dict(old.state_dict()) == ()
    assert fed(fewer, grouping(4), np.array([1, 1, 50.0, 1])).clipped == ("2",)
    other = LayerClip(net(6), reference="history")
    assert other.load_state_dict(old.state_dict()) == ("0", "1", "2", "3", "4", "5")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"reference": "median"}, "reference='median'"),
        ({"factor": 1.0}, "factor=1.0"),
        ({"factor": math.nan}, "factor=nan"),
        ({"factor": math.inf}, r"factor=inf\): give a finite number above 1"),
        ({"half_life": True}, "half_life=True"),
        ({"groups": "x"}, r"groups='x'\): give True or False"),
        ({"warmup": 1}, "warmup=1"),
        ({"warmup": 200}, "window=128"),
        ({"half_life": 0}, "half_life=0"),
        ({"trim": 1.0}, "trim=1.0"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LayerClip(net(), **wrong)


@pytest.mark.parametrize("reference", ["peers", "history"])
def test_a_state_that_cannot_be_read_changes_nothing(reference: Any) -> None:
    over, rng = grouping(5), np.random.default_rng(0)
    clip, same = (LayerClip(net(5), reference=reference, warmup=4) for _ in range(2))
    for _ in range(12):
        norms = np.exp(rng.normal(0, 0.1, 5))
        fed(clip, over, norms), fed(same, over, norms)
    good = json.loads(json.dumps(clip.state_dict()))
    for name in good["usual"]:
        for bad in (None, "x", [], [[1.0]], [None] * 5):
            broken = {**good, "usual": {**good["usual"], name: bad}}
            if name == "logs" and bad == [[1.0]]:
                continue  # of another window: begins anew
            with pytest.raises((LookupError, TypeError, ValueError)):
                clip.load_state_dict(broken)
        with pytest.raises(KeyError):
            clip.load_state_dict({**good, "usual": {k: v for k, v in good["usual"].items() if k != name}})
    a, b = (fed(each, over, np.array([1.0, 1.0, 40.0, 1.0, 1.0])) for each in (clip, same))
    assert a.clipped == b.clipped == ("2",)
    assert np.array_equal(a.thresholds, b.thresholds)
