"""A plain loop that calls in the wrong place or with the unexpected: it is said, once, and nothing breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from seismograd import ClipSpec, watch
from tests import tiny
from tests.test_plain import Loop, events, read, watched


def said(tmp_path: Path) -> str:
    return "\n".join(event.message for event in events(tmp_path, "degraded"))


def clip(loop: Loop) -> None:
    assert loop.run is not None
    loop.run.clip_grad_norm_(1.0)


def test_no_step_at_all(tmp_path: Path) -> None:
    plain, loop = Loop(), watched(tmp_path)
    torch.manual_seed(1)
    for _ in range(3):
        plain.step()
    torch.manual_seed(1)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(3):
            loop.step()
    assert tiny.fingerprint(loop.model) == tiny.fingerprint(plain.model)
    messages = said(tmp_path)
    for call in ("run.tokens()", "run.clip_grad_norm_()", "optimizer.step()"):
        assert messages.count(f"{call} was called outside of `with run.step():`") == 1
    assert events(tmp_path, "fault") == []


def test_tokens_after_the_backward(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(2):
            with loop.run.step():  # type: ignore[union-attr]
                batch = loop.batch()
                loop.loss(batch).backward()
                loop.run.tokens(**batch)  # type: ignore[union-attr]
                clip(loop)
    assert said(tmp_path).count("no backward followed run.tokens()") == 1
    assert "beta_abs_mean" in read(tmp_path)


def test_tokens_after_the_clip(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run, loop.run.step():  # type: ignore[union-attr]
        batch = loop.batch()
        loop.loss(batch).backward()
        clip(loop)
        loop.run.tokens(**batch)  # type: ignore[union-attr]
    assert "after the step's clip" in said(tmp_path)


def test_right_calls_say_nothing(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(12)
    assert said(tmp_path) == ""


def test_another_model_s_clip_is_torch_s_own(tmp_path: Path) -> None:
    loop, critic = watched(tmp_path), nn.Linear(3, 1)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(2):
            with loop.run.step():  # type: ignore[union-attr]
                critic(torch.ones(3)).sum().backward()
                norm = loop.run.clip_grad_norm_(0.1, list(critic.parameters()))  # type: ignore[union-attr]
                assert norm > 0.1
                assert critic.weight.grad is not None
                assert critic.weight.grad.norm() <= 0.1
                loop.step()
    assert said(tmp_path).count("parameters of another model") == 1
    assert read(tmp_path)['grad_norm{layer="all",group="all"}'] == pytest.approx(loop.norms)


def test_clip_in_several_parts(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(2):
            with loop.run.step():  # type: ignore[union-attr]
                loop.loss(loop.batch()).backward()
                for part in (loop.model.embed, loop.model.lm_head):
                    loop.run.clip_grad_norm_(1.0, list(part.parameters()))  # type: ignore[union-attr]
    assert said(tmp_path).count("clipped in several parts") == 1


def test_clip_of_torch_s_before_the_optimizer_is_noticed(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(10):
            with loop.run.step():  # type: ignore[union-attr]
                batch = loop.batch()
                loop.run.tokens(**batch)  # type: ignore[union-attr]
                (1e4 * loop.loss(batch)).backward()
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert said(tmp_path).count("the gradient norm is 1 step after step") == 1


def raising(loop: Loop) -> None:
    assert loop.run is not None
    with loop.run.step():
        loop.run.tokens(**loop.batch())
        raise RuntimeError("the loop's own")


def test_step_that_raised_holds_nothing(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="the loop's own"):
            raising(loop)
        assert loop.run._monitor._step is None  # type: ignore[union-attr]
        loop.train(1)
    assert read(tmp_path)["step"] == [2.0]


def packed(loop: Loop, sequence: torch.Tensor | None) -> None:
    assert loop.run is not None
    with loop.run, loop.run.step():
        batch = loop.batch()
        rows = {k: batch[k].reshape(-1) for k in ("logp", "rollout_logp", "mask")}
        ids = batch["input_ids"]
        loop.run.tokens(
            **rows,
            advantage=batch["advantage"].repeat_interleave(8),
            sequence=sequence,
            replay=lambda: loop.model(ids).reshape(-1),
        )
        rows["logp"].sum().backward()
        loop.run.clip_grad_norm_(1.0)


def test_packed_tokens_with_their_sequences_are_as_rows(tmp_path: Path) -> None:
    spec = ClipSpec(level="sequence_mean")
    loop = watched(tmp_path, clip=spec)
    packed(loop, torch.tensor([7, 3, 0, 9]).repeat_interleave(8))  # any names will do
    by_row = Loop()
    by_row.run = watch(model=by_row.model, runs=tmp_path, name="rows", clip=spec, probes={"shadow": 1, "deployed": 1})
    with by_row.run, by_row.run.step():
        batch = by_row.batch()
        by_row.run.tokens(**batch)
        batch["logp"].sum().backward()
        by_row.run.clip_grad_norm_(1.0)
    found = read(tmp_path)
    (tmp_path / "run").rename(tmp_path / "packed")
    (tmp_path / "rows").rename(tmp_path / "run")
    expected = read(tmp_path)
    signals = [key for key in expected if key.startswith(("sequence_", "clip_", "log_ratio", "beta_"))]
    assert [found[key][0] for key in signals] == pytest.approx([expected[key][0] for key in signals])
    assert any(key.startswith("sequence_log_ratio") for key in signals)
    assert any(key.startswith("clip_fraction") for key in signals)


def test_packed_tokens_without_their_sequences(tmp_path: Path) -> None:
    loop = watched(tmp_path, clip=ClipSpec(level="sequence_mean"))
    packed(loop, None)
    found = read(tmp_path)
    assert not [key for key in found if key.startswith(("sequence_", "clip_fraction"))]
    assert 'log_ratio{stat="mean"}' in found
    assert "run.tokens(sequence=...)" in said(tmp_path)
    assert events(tmp_path, "fault") == []


@pytest.mark.parametrize("age", [0, np.int64(0), torch.tensor(0), torch.zeros(4, dtype=torch.int64), np.zeros(4, int)])
def test_staleness_in_any_form(tmp_path: Path, age: Any) -> None:
    loop = watched(tmp_path)
    with loop.run, loop.run.step(np.int64(5)):  # type: ignore[union-attr, arg-type]
        batch = {**loop.batch(), "staleness": age}
        loop.run.tokens(**batch)  # type: ignore[union-attr]
        loop.loss(batch).backward()
        clip(loop)
    found = read(tmp_path)
    assert found["step"] == [5.0]
    assert found["alpha_floor"] == found["alpha_abs_mean"]


def test_replay_with_an_autocast_of_its_own_is_refused(tmp_path: Path) -> None:
    """It would give the training forward's own log-probs, and a beta of 0 that nobody has measured."""
    loop = watched(tmp_path)

    def replay(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return loop.model(ids)  # type: ignore[no-any-return]

    with loop.run:  # type: ignore[union-attr]
        for _ in range(2):
            with loop.run.step():  # type: ignore[union-attr]
                batch = loop.batch()
                loop.run.tokens(**{**batch, "replay": lambda ids=batch["input_ids"]: replay(ids)})  # type: ignore[union-attr]
                loop.loss(batch).backward()
                clip(loop)
    assert "beta_abs_mean" not in read(tmp_path)
    assert "sets autocast itself" in events(tmp_path, "fault")[0].message


def test_parameters_that_change_from_step_to_step_keep_the_maps_few(tmp_path: Path) -> None:
    """As in mixtures of experts, where a step trains the experts that it routes to."""
    torch.manual_seed(0)
    experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(12)])
    run = watch(model=experts, runs=tmp_path, name="run")
    with run:
        for step in range(40):
            with run.step():
                chosen = torch.randperm(12)[:3].tolist()
                sum(experts[i](torch.ones(4)).sum() for i in chosen).backward()
                run.clip_grad_norm_(1.0)
                experts.zero_grad()
            assert len(run._monitor._map._groupings) <= 8
            assert step < 40
    assert len(read(tmp_path)['grad_norm{layer="all",group="all"}']) == 40


def test_model_given_as_a_trainer() -> None:
    with pytest.raises(TypeError, match=r"Did you mean watch\(model=model"):
        watch(tiny.PlainModel())
