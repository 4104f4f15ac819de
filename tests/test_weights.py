"""The weight-sync probe: the share of weights that an engine sees changed, against all weights counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from seismograd import RunStore, watch
from seismograd.collectors.weights import Sample, Weights
from tests import tiny
from tests.test_plain import read, watched

ONLY = {**tiny.NO_PROBES, "weights": 1}


def rounded(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().bfloat16().clone() for name, p in model.named_parameters()}


def by_layer(a: dict[str, Tensor], b: dict[str, Tensor], layer_of: Any) -> dict[str, float]:
    """Of all weights, none left out."""
    changed: dict[str, list[Tensor]] = {}
    for name in a:
        for layer in ("all", layer_of(name)):
            changed.setdefault(layer, []).append((a[name] != b[name]).flatten())
    return {layer: float(torch.cat(parts).double().mean()) for layer, parts in changed.items()}


def qwen_layer(name: str) -> str:
    if name.startswith("model.layers."):
        return name.split(".")[2]
    return {"model.embed_tokens.weight": "embedding", "model.norm.weight": "norm", "lm_head.weight": "head"}[name]


class Snapshots(TrainerCallback):
    """The weights as each step begins and ends, in BF16."""

    def __init__(self) -> None:
        self.begun: dict[int, dict[str, Tensor]] = {}
        self.ended: dict[int, dict[str, Tensor]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.begun[state.global_step + 1] = rounded(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.ended[state.global_step] = rounded(model)


def test_shares_are_those_of_all_weights(tmp_path: Path) -> None:
    """A model smaller than the sample is taken whole. num_iterations=2: the engine gets every other step's weights."""
    seen = Snapshots()
    trainer = tiny.trainer(tmp_path, steps=5, num_iterations=2, learning_rate=1e-4, callbacks=[seen])
    with watch(trainer, runs=tmp_path / "runs", name="run", probes=ONLY):
        trainer.train()
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        for step in range(1, 6):
            synced = step - (step - 1) % 2
            for metric, since in (("weights_changed_ratio", step), ("weights_changed_since_sync_ratio", synced)):
                expected = by_layer(seen.begun[since], seen.ended[step], qwen_layer)
                assert set(expected) == {"all", "embedding", "0", "1", "norm", "head"}
                for layer, share in expected.items():
                    assert dict(store.series(metric, layer=layer))[step] == pytest.approx(share, abs=1e-6)
        ratios = [value for _, value in store.series("weights_changed_ratio", layer="all")]
        since = [value for _, value in store.series("weights_changed_since_sync_ratio", layer="all")]
        assert store.events("fault") == []
    assert 0.02 < min(ratios) < max(ratios) < 0.9
    assert since[0] == ratios[0]
    assert since[1] > ratios[1]


def test_norms_of_1_do_not_move(tmp_path: Path) -> None:
    """An Adam step of 1e-4 is far below half a unit in the last place of 1.0 in BF16, 0.0039."""
    trainer = tiny.trainer(tmp_path, steps=2, learning_rate=1e-4)
    with watch(trainer, runs=tmp_path / "runs", name="run", probes=ONLY):
        trainer.train()
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        assert store.series("weights_changed_ratio", layer="norm") == [(1, 0.0), (2, 0.0)]
        assert store.series("weights_changed_ratio", layer="0")[0][1] > 0


def test_without_staleness_no_sync_is_known(tmp_path: Path) -> None:
    loop = watched(tmp_path, probes=ONLY)
    with loop.run:  # type: ignore[union-attr]
        loop.train(3, leave_out=("staleness",))
    found = read(tmp_path)
    assert len(found['weights_changed_ratio{layer="all"}']) == 3
    assert not any(key.startswith("weights_changed_since_sync_ratio") for key in found)


def test_a_step_that_was_not_probed_is_no_sync(tmp_path: Path) -> None:
    loop = watched(tmp_path, probes={**ONLY, "weights": 2})
    batch = loop.batch
    loop.batch = lambda: {**batch(), "staleness": torch.tensor([1, 2, 3, 1])}  # type: ignore[method-assign]
    with loop.run:  # type: ignore[union-attr]
        loop.train(5)  # 1, 3 and 5 are probed; the newest samples come from 0, 2 and 4
    found = read(tmp_path)
    assert len(found['weights_changed_ratio{layer="all"}']) == 3
    assert 'weights_changed_since_sync_ratio{layer="all"}' not in found


def test_samples_of_a_few_steps_are_held() -> None:
    model = nn.Linear(8, 8)
    weights = Weights(model, torch.bfloat16)
    first = rounded(model)
    for step in range(1, 31):
        weights.before(step)
        with torch.no_grad():
            model.weight += 0.01
        found = weights.after(step, synced=3 if step >= 3 else None)
        assert found is not None
        assert torch.isnan(found[1]).all() == (step < 3)
    assert len(weights._held) <= 10
    assert 3 in weights._held  # the engine's
    weights.before(1)  # the loop counts anew
    assert list(weights._held) == [1]
    assert weights.after(2, None) is None
    assert first.keys() == rounded(model).keys()


def test_a_sample_stands_for_all() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(400, 300) for _ in range(4)]), "norm": nn.LayerNorm(64)})
    trained = list(model.named_parameters())
    rng = torch.get_rng_state()
    sample = Sample.of(trained, sampled=20_000)
    assert torch.equal(torch.get_rng_state(), rng)
    assert sample.layers == ("0", "1", "2", "3", "norm")
    assert sample.sizes == (120_300, 120_300, 120_300, 120_300, 128)
    assert sample.counts[-1] == 128  # taken whole
    assert all(abs(n - 4000) <= 2 for n in sample.counts[:4])
    before = sample.take(torch.bfloat16)
    with torch.no_grad():
        for i, layer in enumerate(model["layers"]):  # type: ignore[arg-type]
            layer.weight += torch.where(torch.rand_like(layer.weight) < 0.1 * (i + 1), 1.0, 0.0)
    found = sample.changed(before, sample.take(torch.bfloat16)).tolist()
    for i, share in enumerate(found[:4]):
        assert share == pytest.approx(0.1 * (i + 1), abs=4 * (0.25 / 4000) ** 0.5)
    assert found[4] == 0


def test_bits_decide() -> None:
    model = nn.Linear(2, 1, bias=False)
    sample = Sample.of(list(model.named_parameters()), 100)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, torch.nan]]))
        before = sample.take(torch.bfloat16)
        model.weight[0, 0] += 0.003  # less than half a unit in the last place
        assert sample.changed(before, sample.take(torch.bfloat16)).tolist() == [0.0]
        assert sample.changed(before, before).tolist() == [0.0]
        model.weight[0, 0] += 0.002
        assert sample.changed(before, sample.take(torch.bfloat16)).tolist() == [0.5]


def test_a_model_made_anew_is_sampled_anew() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    weights = Weights(model, torch.bfloat16)
    weights.before(1)
    model[0] = nn.Linear(4, 4)
    weights.before(2)
    with torch.no_grad():
        model[0].weight += 1.0  # type: ignore[operator]
    found = weights.after(2, None)
    assert found is not None
    assert found[0].tolist() == [pytest.approx(16 / 20)]
    nothing = Weights(nn.ReLU(), torch.bfloat16)
    nothing.before(1)
    assert nothing.after(1, None) is None
