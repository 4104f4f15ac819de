"""The experiment on layer heterogeneity: it runs, its explosions are real, and its words follow from its figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.peers import GlobalClip
from examples.layer_heterogeneity.arms import ARMS, GLOBAL, HEALTHY, HISTORY, PEERS, Auto
from examples.layer_heterogeneity.figures import Mean, explosions, figures
from examples.layer_heterogeneity.page import said
from examples.layer_heterogeneity.training import SICK, WORDS, Language, Model, Setting, run
from tests.commands import python


def test_it_runs_and_writes_its_page(tmp_path: Path) -> None:
    out = python("-m", "examples.layer_heterogeneity", "--quick", "--out", tmp_path)
    text = (tmp_path / "layer_heterogeneity.md").read_text()
    assert text.strip() in out.stdout
    assert "`python -m examples.layer_heterogeneity --quick`" in text
    assert all(f"| {arm.name} " in text for arm in ARMS)
    assert str(tmp_path) not in text
    found = json.loads((tmp_path / "layer_heterogeneity.json").read_text())
    arms = found["experiments"][0]["arms"]
    assert len(arms) == len(ARMS)
    assert all(len(explosions(seed)) > 0 for seed in arms[GLOBAL])
    assert all(len(explosions(seed)) == 0 for seed in arms[HEALTHY])
    picture = ElementTree.parse(tmp_path / "layer_heterogeneity_1.svg").getroot()
    assert picture.tag.endswith("svg")
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 2 * len(ARMS)


def test_a_collapsed_embedding_explodes_and_no_other_layer_does() -> None:
    """The same batch with and without collapse: what a real run does, with nothing multiplied by hand."""
    ids = Language.of(0).sentences(8, torch.Generator().manual_seed(0))
    ids[3, 5] = WORDS + 7
    norms = []
    for collapsed in (1.0, 1e-4):
        torch.manual_seed(0)
        model = Model(collapsed)
        model(ids).backward()
        norms.append({name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None})
    healthy, sick = norms
    assert sick["embed.weight"] > 30 * healthy["embed.weight"]
    others = [sick[name] / healthy[name] for name in healthy if name.startswith("layers") and healthy[name] > 1e-3]
    assert 0.5 < min(others)
    assert max(others) < 2


def test_a_model_sees_no_word_before_its_turn() -> None:
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(1, 16, 48)
    later = x.clone()
    later[0, 9:] += 1
    a, b = (model.layers[0](y, model.distance, model.mask)[0, :9] for y in (x, later))
    assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(("reference", "left"), [("peers", 0.01), ("history", 0.1)])
def test_auto_is_off_until_a_spike_and_acts_in_its_step(reference: Any, left: float) -> None:
    """The run has been at ten times its present size, so that 4.5 is out of proportion and no spike."""
    torch.manual_seed(0)
    model = Model()
    auto = Auto(model, reference, max_norm=math.inf, hold=5)

    def step(sick: float, others: float = 1.0) -> tuple[float, ...]:
        for name, p in model.named_parameters():
            p.grad = torch.full_like(p, (sick if name.startswith("embed") else others) / math.sqrt(p.numel()))
        return tuple(auto.clip_(model))

    for size in [10.0] * 10 + [1.0] * 20:
        assert set(step(size, size)) == {1.0}
    assert set(step(4.5)) == {1.0}
    assert auto._left == 0
    scales = step(100.0)
    assert min(scales) == pytest.approx(left, rel=0.1)
    assert sum(scale < 1 for scale in scales) == 1
    assert auto._left == 5
    for _ in range(5):
        assert set(step(1.0)) == {1.0}
    assert auto._left == 0


def test_arms_of_a_seed_train_on_the_same() -> None:
    """Until their first clip all arms are one run."""
    setting = Setting("SGD", 0.1, steps=40, after=100)
    a, b = (run(setting, 0, lambda _, most=most: GlobalClip(most)) for most in (math.inf, 1e9))
    assert a.loss.tolist() == b.loss.tolist()
    assert np.array_equal(a.before, b.before)
    assert np.array_equal(a.before, a.after)
    assert SICK in a.layers
    assert a.honest.all()
    assert not a.sick.any()


def test_the_words_follow_from_the_figures() -> None:
    def seed(loss: float, kept: list[float], clipped: list[int]) -> dict[str, Any]:
        return {
            "loss": [3.0, loss + 0.2, loss, loss, loss],
            "sick": [1, 3],
            "honest": [0, 2],
            "exploded": [1.0, 80.0, 1.0, 100.0],
            "kept": [1.0, kept[0], 1.0, kept[1]],
            "scale": [1.0, kept[0], 1.0, kept[1]],
            "clipped": clipped,
        }

    arms = {
        HEALTHY: [{**seed(2.0 + 0.01 * i, [1, 1], []), "sick": []} for i in range(5)],
        GLOBAL: [seed(2.2 + 0.01 * i, [0.1, 0.2], [1, 3]) for i in range(5)],
        PEERS: [seed(2.0 + 0.01 * i, [0.99, 1.0], [1, 3]) for i in range(5)],
        HISTORY: [seed(2.2 + 0.01 * i + 0.05 * (-1) ** i, [0.5, 1.0], [1, 2]) for i in range(5)],
    }
    found = figures({"arms": arms}, every=10)
    assert found[PEERS].worse.value == pytest.approx(-0.2)
    assert found[PEERS].kept_share == Mean(1.0, 1.0, 1.0)
    assert found[HISTORY].kept_share == Mean(0.5, 0.5, 0.5)
    assert found[HISTORY].false == Mean(0.5, 0.5, 0.5)
    assert found[HEALTHY].steps.value == pytest.approx(30)
    assert found[GLOBAL].unreached == 5
    words = said(found)
    assert "10 explosions, 90 times" in words
    assert "The global clip leaves the healthy layers 15% of their update" in words
    assert f"{PEERS}: better than the global clip (-0.200" in words
    assert f"{HISTORY}: no difference" in words
