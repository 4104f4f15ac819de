"""A plain loop that calls in the wrong place or with the unexpected: it is said, once, and nothing breaks."""

from __future__ import annotations

import gc
import weakref
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
    by_row.run = watch(model=by_row.model, runs=tmp_path, name="rows", clip=spec, probes=tiny.EVERY_STEP)
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


class Counting(tiny.PlainModel):
    """Counts its forwards in a buffer, as routers count tokens, and trains by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(input_ids) * (1 + self.count / 100)  # type: ignore[no-any-return]


def test_buffers_that_a_forward_writes_are_left_alone_by_probes(tmp_path: Path) -> None:
    fingerprints = []
    for observe in (False, True):
        loop = Loop()
        torch.manual_seed(0)
        loop.model = Counting()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), 1e-2)
        if observe:
            loop.run = watch(model=loop.model, runs=tmp_path, name="run", probes=tiny.EVERY_STEP)
        fingerprints.append(loop.train(4))
        if loop.run is not None:
            loop.run.close()
    assert fingerprints[0] == fingerprints[1]
    assert len(read(tmp_path)["deployed_improvement"]) == 4


def test_run_that_was_dropped_keeps_no_model(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    loop.train(2)
    model, optimizer = weakref.ref(loop.model), weakref.ref(loop.optimizer)
    del loop
    gc.collect()
    assert model() is None
    assert optimizer() is None


def test_replays_that_share_their_variables_are_refused(tmp_path: Path) -> None:
    """Run after the last backward, each of them would run the last micro-batch."""
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(2):
            with loop.run.step():  # type: ignore[union-attr]
                for _ in range(2):
                    batch = loop.batch()
                    batch["replay"] = lambda: loop.model(batch["input_ids"])  # noqa: B023
                    loop.run.tokens(**batch)  # type: ignore[union-attr]
                    loop.loss(batch).backward()
                clip(loop)
    assert said(tmp_path).count("replay=lambda batch=batch") == 1
    assert "beta_abs_mean" not in read(tmp_path)


def test_replays_of_a_function_called_anew_are_fine(tmp_path: Path) -> None:
    loop = watched(tmp_path)

    def micro_batch() -> None:
        assert loop.run is not None
        batch = loop.batch()
        batch["replay"] = lambda: loop.model(batch["input_ids"])
        loop.run.tokens(**batch)
        loop.loss(batch).backward()

    with loop.run, loop.run.step():  # type: ignore[union-attr]
        micro_batch()
        micro_batch()
        clip(loop)
    assert said(tmp_path) == ""
    assert "beta_abs_mean" in read(tmp_path)


def test_neither_clip_nor_optimizer_is_said(tmp_path: Path) -> None:
    loop = Loop()
    loop.run = watch(model=loop.model, runs=tmp_path, name="run")
    with loop.run:
        for _ in range(2):
            with loop.run.step():
                loop.loss(loop.batch()).backward()
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
                loop.optimizer.step()
    assert said(tmp_path).count("need run.clip_grad_norm_() or watch(optimizer=...)") == 1


def test_column_that_a_micro_batch_lacks_is_not_a_nan(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(2):
            with loop.run.step():  # type: ignore[union-attr]
                for given in ({}, {"rollout_logp": None}):
                    batch = loop.batch()
                    loop.run.tokens(**{**batch, **given})  # type: ignore[union-attr]
                    if not given:  # the other one's advantages are 0, and it skips the backward
                        loop.loss(batch).backward()
                clip(loop)
    found = read(tmp_path)
    assert found['nonfinite_total{where="rollout_logp"}'] == found['nonfinite_total{where="loss_weight"}'] == [0.0, 0.0]
    assert events(tmp_path, "spike") == []


def test_fused_optimizer_with_a_scaled_loss(tmp_path: Path) -> None:
    """GradScaler leaves the unscaling to it, so the gradients are still scaled when the optimizer is called."""
    loop = watched(tmp_path, gradloc="every")
    loop.optimizer.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    with loop.run, loop.run.step():  # type: ignore[union-attr]
        batch = loop.batch()
        loop.run.tokens(**batch, loss_scale=1024.0)  # type: ignore[union-attr]
        (1024.0 * loop.loss(batch)).backward()
        grads = [p.grad for p in loop.model.parameters() if p.grad is not None]
        truth = float(torch.nn.utils.get_total_norm(grads)) / 1024.0
        loop.run._adapter._before_optimizer(loop.optimizer)  # type: ignore[union-attr]
    assert read(tmp_path)['grad_norm{layer="all",group="all"}'] == pytest.approx([truth])
    (incident,) = events(tmp_path, "incident")
    assert (incident.data["method"], incident.data["completeness"]) == ("attribution", pytest.approx(1, abs=0.05))
    assert any("loss scale, 1024" in note for note in incident.data["notes"])


def test_names_of_sequences_may_be_any_integer(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    packed(loop, (torch.tensor([0, 1, 2, 3]) + 2**53).repeat_interleave(8))
    found = read(tmp_path)
    (tmp_path / "run").rename(tmp_path / "large")
    loop = watched(tmp_path)
    packed(loop, torch.tensor([0, 1, 2, 3]).repeat_interleave(8))
    key = 'sequence_log_ratio{stat="std"}'
    assert found[key] == read(tmp_path)[key]


def test_deployed_probe_s_spacing_brings_the_shadow_with_it(tmp_path: Path) -> None:
    loop = watched(tmp_path, probes={"deployed": 5})
    with loop.run:  # type: ignore[union-attr]
        loop.train(11)
    assert len(read(tmp_path)["deployed_improvement"]) == 3


def test_state_right_after_a_step_holds_the_step(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        for steps in range(1, 6):
            loop.train(1)
            state = loop.run.state_dict()  # type: ignore[union-attr]
            usual = state["worker"]["usual_proportions"]["state"]["next"]
            assert set(usual) == {steps}


def test_part_of_the_model_replayed_under_its_own_autocast(tmp_path: Path) -> None:
    loop = watched(tmp_path)

    def replay(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            x = loop.model.embed(ids[:, :-1])
            for layer in loop.model.layers:
                x = x + layer(x)
            logits = loop.model.lm_head(x).float()
        return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    with loop.run, loop.run.step():  # type: ignore[union-attr]
        batch = loop.batch()
        loop.run.tokens(**{**batch, "replay": lambda: replay(batch["input_ids"])})  # type: ignore[union-attr]
        loop.loss(batch).backward()
        clip(loop)
    assert "sets autocast itself" in events(tmp_path, "fault")[0].message


def test_model_given_as_a_trainer() -> None:
    with pytest.raises(TypeError, match=r"Did you mean watch\(model=model"):
        watch(tiny.PlainModel())


class Lost:
    """Ranks that cannot be reached any more: each attempt costs a time-out."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.asked = 0

    def gather(self, item: Any) -> list[Any]:
        self.asked += 1
        raise TimeoutError("the others are gone")

    def sum(self, values: Any) -> list[float]:
        return list(self.gather(values))

    def max(self, value: float) -> float:
        return float(self.gather(value)[0])

    def add(self, tensors: Any) -> None:
        self.gather(tensors)


def test_ranks_that_are_gone_are_waited_for_once(tmp_path: Path) -> None:
    loop, lost = watched(tmp_path, gradloc="every"), Lost()
    loop.run._monitor._meeting._ranks = lost  # type: ignore[union-attr]
    with loop.run:  # type: ignore[union-attr]
        loop.train(3)
    assert lost.asked == 1
    assert [event.data["method"] for event in events(tmp_path, "incident")] == ["attribution"] * 3
    assert [event.data["part"] for event in events(tmp_path, "fault")] == ["ranks"]
