"""Gradient geometry, against gradients of whole backwards, and sketches against whole vectors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from seismograd import RunStore, watch
from seismograd.collectors.geometry import geometry, geometry_readings
from seismograd.collectors.sketch import Sketches
from seismograd.gradloc.replay import ModelReplay
from seismograd.telemetry.ranks import Alone
from seismograd.telemetry.records import TokenBatch
from tests import tiny
from tests.test_plain import Loop, events, read, watched
from tests.test_ratio import values

ONLY = {**tiny.NO_PROBES, "geometry": 1}


def flat(gradients: Any) -> Tensor:
    return torch.cat([g.double().flatten() for g in gradients])


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def expected(real: Tensor, first: Tensor, second: Tensor, tokens: tuple[int, int]) -> dict[str, float]:
    """By the formulas of the module's docstring, from whole vectors."""
    clean, along = first + second, cosine(real, first + second) ** 2
    f1, f2 = (n / sum(tokens) for n in tokens)
    common = float(first @ second / (f1 * f2 * clean @ clean))
    return {
        "gradient_cosine": cosine(real, clean),
        "gradient_cosine_floor": cosine(first, second),
        'gradient_share{part="signal"}': along * common,
        'gradient_share{part="noise"}': along * (1 - common),
        'gradient_share{part="distortion"}': 1 - along,
    }


def test_values_are_those_of_whole_gradients(tmp_path: Path) -> None:
    """A real trainer with a KL term, a tight clip and stale samples; each half by a backward of its own."""
    trainer = tiny.trainer(
        tmp_path, steps=4, gradient_accumulation_steps=2, num_iterations=2, beta=0.04, epsilon=0.05, learning_rate=1e-2,
        max_grad_norm=1e9,
    )  # fmt: skip
    found: list[dict[str, float]] = []
    with watch(trainer, runs=tmp_path / "runs", name="run", probes=ONLY) as run:
        judge = run._monitor._judge

        def by_hand(step: Any, *judged: Any) -> None:
            judge(step, *judged)
            parameters = list(trainer.model.parameters())
            kept = [p.grad for p in parameters]
            halves, tokens, row = [], [0, 0], 0
            for half in (0, 1):
                for p in parameters:
                    p.grad = None
                row = 0
                for batch in step.batches:
                    turn = (torch.arange(len(batch.mask)) + row)[:, None] % 2 == half
                    weight = torch.where(batch.mask & turn, -batch.advantage, 0.0)
                    tokens[half] += int((batch.mask & turn).sum())
                    batch.replay().backward(weight)
                    row += len(batch.mask)
                halves.append(flat(p.grad for p in parameters))
            found.append(expected(flat(kept), halves[0], halves[1], (tokens[0], tokens[1])))
            for p, grad in zip(parameters, kept, strict=True):
                p.grad = grad

        run._monitor._judge = by_hand  # type: ignore[method-assign]
        trainer.train()
    assert len(found) == 4
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        assert store.events("fault") == []
        for key in found[0]:
            name, _, part = key.partition('{part="')
            labels = {"part": part.rstrip('"}')} if part else {}
            series = store.series(name, **labels)
            assert [step for step, _ in series] == [1, 2, 3, 4]
            assert [value for _, value in series] == pytest.approx([f[key] for f in found], rel=1e-4, abs=1e-5)
    assert found[0]["gradient_cosine"] > 0.99  # on-policy, but for the KL term
    assert found[3]["gradient_cosine"] < 0.99


class OnPolicy(Loop):
    """Rollouts by the trained forward itself; the loss is a mean over tokens."""

    def batch(self) -> dict[str, Any]:
        found = super().batch()
        return {**found, "rollout_logp": found["logp"].detach()}


def test_an_on_policy_gradient_is_the_clean_one(tmp_path: Path) -> None:
    loop = OnPolicy()
    loop.run = watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run", probes=ONLY)
    with loop.run:
        loop.train(6)
    found = read(tmp_path)
    assert found["gradient_cosine"] == pytest.approx([1.0] * 6, abs=1e-6)
    assert found['gradient_share{part="distortion"}'] == pytest.approx([0.0] * 6, abs=1e-5)
    for signal, noise in zip(
        found['gradient_share{part="signal"}'], found['gradient_share{part="noise"}'], strict=True
    ):
        assert signal + noise == pytest.approx(1.0, abs=1e-5)
    assert max(map(abs, found["gradient_cosine_floor"])) < 0.9


def test_a_gradient_against_its_advantages_has_the_cosine_minus_1(tmp_path: Path) -> None:
    loop = OnPolicy()
    loss = loop.loss
    loop.loss = lambda batch: -loss(batch)  # type: ignore[method-assign]
    loop.run = watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run", probes=ONLY)
    with loop.run:
        loop.train(2)
    assert read(tmp_path)["gradient_cosine"] == pytest.approx([-1.0] * 2, abs=1e-6)


def test_signal_is_what_halves_have_in_common() -> None:
    """Gradients of a known mean and known noise: on average signal is |mean|^2 over that plus the noise's."""
    torch.manual_seed(0)
    size, rows, sigma = 50, 40, 2.0
    model = torch.nn.Linear(size, 1, bias=False)
    mean = torch.randn(size)
    mean /= mean.norm()
    estimates = []
    for _ in range(200):
        inputs = mean + sigma / math.sqrt(size) * torch.randn(rows, size)
        batch = token_batch(model, inputs)
        model.weight.grad = torch.autograd.grad(-model(inputs).sum(), model.weight)[0]
        shares = values(geometry_readings(geometry(model, [batch], ModelReplay, Alone()).numpy()))
        estimates.append(shares['gradient_share{part="signal"}'])
    # E c1.c2 / (f1 f2) = n^2 |mean|^2, and |c|^2 is about n^2 |mean|^2 + n sigma^2.
    assert np.mean(estimates) == pytest.approx(1 / (1 + sigma**2 / rows), abs=0.01)


def token_batch(model: torch.nn.Module, inputs: Tensor, **more: Any) -> TokenBatch:
    """A model that is linear in its weights: each row's log-prob has the row as its gradient."""
    return TokenBatch(
        1, 0, 0, mask=torch.ones(len(inputs), 1, dtype=torch.bool), logp=model(inputs).detach(),
        advantage=torch.ones(len(inputs), 1), replay=lambda: model(inputs), **more,
    )  # fmt: skip


def test_packed_sequences_take_turns() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1, bias=False)
    inputs = torch.randn(6, 5)
    model.weight.grad = torch.randn(1, 5)
    rows = token_batch(model, inputs)
    sequence = torch.tensor([[0, 1, 2, 3, 4, 5]])
    packed = TokenBatch(
        1, 0, 0, mask=rows.mask.T, logp=rows.logp.T, advantage=torch.ones(1, 6), sequence=sequence,
        replay=lambda: model(inputs).T,
    )  # fmt: skip
    a, b = (geometry(model, [batch], ModelReplay, Alone()) for batch in (rows, packed))
    assert torch.allclose(a, b)
    one_by_one = [token_batch(model, inputs[i : i + 1]) for i in range(6)]
    assert torch.allclose(geometry(model, one_by_one, ModelReplay, Alone()), a)


def test_what_is_not_defined_is_left_out() -> None:
    model = torch.nn.Linear(5, 1, bias=False)
    batch = token_batch(model, torch.randn(1, 5))
    model.weight.grad = torch.ones(1, 5)
    one = values(geometry_readings(geometry(model, [batch], ModelReplay, Alone()).numpy()))
    assert [*one] == ["gradient_cosine"]  # one sequence has no halves
    model.weight.grad = torch.zeros(1, 5)
    assert geometry_readings(geometry(model, [batch], ModelReplay, Alone()).numpy()) == []


def test_another_forward_s_replay_is_not_believed(tmp_path: Path) -> None:
    loop = watched(tmp_path, probes=ONLY)
    batch = loop.batch

    def other() -> dict[str, Any]:
        found = batch()
        return {**found, "replay": lambda: loop.model(found["input_ids"].flip(0))}

    loop.batch = other  # type: ignore[method-assign]
    plain = Loop()
    with loop.run:  # type: ignore[union-attr]
        for _ in range(6):
            loop.train(1)
            loop.run.flush()  # type: ignore[union-attr]
        assert loop.train(0) == plain.train(6)
    found = read(tmp_path)
    assert "gradient_cosine" not in found
    first, last = events(tmp_path, "fault")
    assert "nats off the training's" in first.message
    assert "read_geometry is switched off after 3 faults in a row" in last.message
    assert [took > 0 for took in found['hook_seconds{part="probe_geometry"}']] == [True] * 3 + [False] * 3


def test_tokens_without_advantages_have_no_geometry(tmp_path: Path) -> None:
    loop = watched(tmp_path, probes=ONLY)
    with loop.run:  # type: ignore[union-attr]
        loop.train(2, leave_out=("advantage",))
    assert "gradient_cosine" not in read(tmp_path)
    assert events(tmp_path, "fault") == []


def vectors(parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    a = [torch.randn_like(p) for p in parameters]
    return a, [0.3 * x + torch.randn_like(x) for x in a]


@pytest.mark.parametrize("buckets", [100_000, 9973])
def test_sketches_keep_inner_products(buckets: int) -> None:
    torch.manual_seed(0)
    parameters = [torch.empty(50, 300), torch.empty(7), torch.empty(40_000)]
    a, b = vectors(parameters)
    sketches = Sketches(parameters, 2, buckets)
    for k in (2, 0, 1):  # in any order
        sketches.add(0, k, a[k] / 2)
        sketches.add(0, k, a[k] / 2)
        sketches.add(1, k, b[k].bfloat16() if buckets < 10_000 else b[k])
    products = sketches.products()
    whole = torch.stack([flat(a), flat(b)])
    exact = whole @ whole.T
    error = (products - exact).abs() / exact.diag().sqrt().outer(exact.diag().sqrt())
    if buckets > 55_007:
        assert error.max() < 1e-6  # a bucket for each
    else:
        assert 1e-6 < error.max() < 4 * math.sqrt(2 / buckets)


def test_sketches_of_ranks_add_up() -> None:
    torch.manual_seed(0)
    parameters = [torch.empty(3000), torch.empty(2000)]
    a, b = vectors(parameters)
    together, first, second = (Sketches(parameters, 1, 997) for _ in range(3))
    for k in range(2):
        together.add(0, k, a[k] + b[k])
        first.add(0, k, a[k])
        second.add(0, k, b[k])
    assert torch.allclose(first.values + second.values, together.values, atol=1e-4)


def test_one_channel_does_not_meet_itself() -> None:
    """All of a gradient in one column of a layer whose width divides 2^20: its rows fall in buckets of their own."""
    parameter = torch.zeros(600, 4096)
    parameter[:, 7] = torch.randn(600)
    sketches = Sketches([parameter], 1)
    sketches.add(0, 0, parameter)
    assert float(sketches.products()) == pytest.approx(float(parameter.square().sum()), rel=1e-5)
