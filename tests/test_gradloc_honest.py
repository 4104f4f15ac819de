"""Honest steps of shapes that occur in life: nobody is blamed, and what an incident says is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seismograd import Spike, TokenBatch, watch
from seismograd.gradloc import Incident, localize
from seismograd.localiser import GradLoc
from seismograd.telemetry.ranks import Alone
from tests import tiny
from tests.test_plain import Loop, events

SECRET = " ".join(["SECRET", "PROMPT"])  # not in the source line that a traceback shows

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # logp, rollout, advantage, mask


def step(
    loss: Loss, advantage: list[list[float]], lengths: list[int] | None = None, noise: float = 0.03, seed: int = 0
) -> tuple[nn.Module, list[TokenBatch]]:
    """A backward of a small model; one micro-batch for each list of advantages."""
    torch.manual_seed(seed)
    model = tiny.PlainModel()
    width = max(lengths) if lengths else 24
    batches = []
    for i, row in enumerate(advantage):
        ids = torch.randint(0, 20, (len(row), width + 1))
        logp = model(ids)
        rollout = logp.detach() + noise * torch.randn_like(logp)
        spread = torch.tensor(row)[:, None]
        ends = torch.tensor(lengths or [width] * len(row))[: len(row), None]
        mask = torch.arange(width)[None] < ends
        caught: list[Tensor] = []
        logp.register_hook(caught.append)
        loss(logp, rollout, spread, mask).backward()
        batches.append(
            TokenBatch(
                step=1, micro_batch=i, rank=0, input_ids=ids, mask=mask, logp=logp.detach(), rollout_logp=rollout,
                advantage=spread, loss_weight=caught[0], replay=lambda ids=ids: model(ids),
            )
        )  # fmt: skip
    return model, batches


def ppo(logp: Tensor, rollout: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    ratio = (logp - rollout).exp()
    return -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask).sum() / 400


def with_kl(logp: Tensor, rollout: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    reference = logp.detach() - 0.05 * torch.randn_like(logp)
    gap = reference - logp
    return ppo(logp, rollout, advantage, mask) + 0.04 * ((gap.exp() - gap - 1) * mask).sum() / 400


def by_length(logp: Tensor, rollout: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """As GRPO's paper: each completion is divided by its own length."""
    ratio = (logp - rollout).exp()
    return -((ratio * advantage * mask).sum(1) / mask.sum(1)).mean()


def without_ratio(logp: Tensor, rollout: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    return -(logp * advantage * mask).sum() / 400


EVEN = [1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 0.5, -0.5]
NONE = [0.0] * 8
HONEST: dict[str, tuple[Loss, dict[str, Any]]] = {
    "kl, one micro-batch with a signal": (with_kl, {"advantage": [EVEN, NONE, NONE, NONE]}),
    "kl, one group with a signal": (with_kl, {"advantage": [[1.5, -0.5, -0.5, -0.5, *NONE[:4]], NONE]}),
    "divided by length": (by_length, {"advantage": [EVEN], "lengths": [6, 60, 60, 60, 60, 60, 60, 60]}),
    "ratios beyond the bound that the loss has not": (without_ratio, {"advantage": [EVEN] * 2, "noise": 0.5}),
    "long sequences": (ppo, {"advantage": [EVEN], "lengths": [1500] * 8, "noise": 0.06}),
    "few tokens": (ppo, {"advantage": [EVEN], "lengths": [3] * 8}),
}


@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_blamed(kind: str, seed: int) -> None:
    loss, how = HONEST[kind]
    model, batches = step(loss, seed=seed, **how)
    incident = localize(batches, model)
    assert incident.verdict == "D", incident.evidence
    assert incident.culprits == ()
    assert incident.controls == {}


def test_several_outlying_sequences_are_one_outlier() -> None:
    model, batches = step(ppo, [[*EVEN[:5], 1000.0, -1000.0, 1000.0], EVEN, EVEN])
    incident = localize(batches, model)
    assert incident.verdict == "W"
    assert {c.row for c in incident.culprits} <= {5, 6, 7}


def test_gradient_that_was_clipped_before_is_not_believed() -> None:
    model, batches = step(ppo, [EVEN, EVEN])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    incident = localize(batches, model)
    assert incident.method == "ratios"
    assert any("changed after the backward" in note for note in incident.notes)


def test_step_whose_weights_are_all_too_large_is_a_normaliser_s(tmp_path: Path) -> None:
    loop = Loop()
    loop.run = watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run")
    with loop.run:
        loop.train(20)
        with loop.run.step():
            batch = loop.batch()
            loop.run.tokens(**batch)
            (50 * loop.loss(batch)).backward()
            loop.run.clip_grad_norm_(1.0)
    (event,) = events(tmp_path, "incident")
    assert event.data["verdict"] == "W"
    assert any("usual in this run" in sentence for sentence in event.data["evidence"])


def explained(text: str, decode: Callable[[Any], str], batches: list[TokenBatch], model: nn.Module) -> Incident:
    spike = Spike("grad_norm", "grad_norm", 1, 9.0, 1.0, 3.0, 9.0, "critical", "jumped")
    localiser = GradLoc(model, "auto", text, decode, "run")  # type: ignore[arg-type]
    return localiser.explain(1, batches, [spike], Alone(), 1.0).incident


def test_tokenizer_that_refuses_an_id_costs_the_text_only() -> None:
    def refusing(ids: Any) -> str:
        raise IndexError("piece id is out of range.")

    model, batches = step(ppo, [[1.0, -1000.0], EVEN[:2]])
    incident = explained("full", refusing, batches, model)
    assert incident.culprits
    assert all(c.text is None for c in incident.culprits)


@pytest.mark.parametrize("text", ["full", "none"])
def test_what_exceptions_say_is_text_too(text: str) -> None:
    def broken() -> Tensor:
        raise KeyError(SECRET)

    model, batches = step(ppo, [EVEN])
    incident = explained(text, str, [replace(b, replay=broken) for b in batches], model)
    assert (SECRET in incident.to_json()) == (text == "full")
    assert "KeyError" in incident.to_json()


@pytest.mark.parametrize("text", ["full", "none"])
def test_faults_keep_to_it(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    loop.run = watch(
        model=loop.model, runs=tmp_path, name="run", text=text, gradloc="off", probes={**tiny.NO_PROBES, "shadow": 1}
    )

    def broken() -> Tensor:
        raise KeyError(SECRET)

    with loop.run, loop.run.step():
        batch = loop.batch()
        loop.run.tokens(**{**batch, "replay": broken})
        loop.loss(batch).backward()
        loop.run.clip_grad_norm_(1.0)
    (fault,) = events(tmp_path, "fault")
    for told in (fault.message, fault.data["traceback"], caplog.text):
        assert (SECRET in told) == (text == "full")
        assert "KeyError" in told or told is fault.data["traceback"]


def test_ids_that_do_not_fit_are_said_and_no_token_is_named(tmp_path: Path) -> None:
    loop = Loop()
    loop.run = watch(model=loop.model, runs=tmp_path, name="run", gradloc="every")
    with loop.run, loop.run.step():
        batch = loop.batch()
        wide = torch.cat([batch["input_ids"], batch["input_ids"]], 1)
        loop.run.tokens(**{**batch, "input_ids": wide})
        loop.loss(batch).backward()
        loop.run.clip_grad_norm_(1.0)
    assert "one id more" in events(tmp_path, "degraded")[0].message
    assert all(c["token_id"] is None for e in events(tmp_path, "incident") for c in e.data["culprits"])


class Averaging(tiny.PlainModel):
    """A running statistic that is written through .data, which moves no version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(1.0)
        return super().forward(input_ids)


def test_buffers_written_behind_their_version_are_put_back(tmp_path: Path) -> None:
    counts = []
    for probes in (tiny.NO_PROBES, tiny.EVERY_STEP):
        loop = Loop()
        loop.model = Averaging()
        loop.run = watch(model=loop.model, runs=tmp_path, name="run", gradloc="every", probes=probes)
        with loop.run:
            loop.train(3)
        counts.append(float(loop.model.mean))
    assert counts[0] == counts[1] == pytest.approx(sum(0.9**i for i in range(3)))


def test_compiled_model_is_compiled_no_more_than_without(tmp_path: Path) -> None:
    counts = []
    for gradloc in ("off", "every"):
        torch._dynamo.reset()
        graphs: list[int] = []

        def counting(graph: Any, _: Any, graphs: list[int] = graphs) -> Any:
            graphs.append(1)
            return graph.forward

        loop = Loop()
        compiled = torch.compile(loop.model, backend=counting)
        loop.run = watch(model=compiled, runs=tmp_path, name="run", gradloc=gradloc, probes=tiny.NO_PROBES)
        for _ in range(4):
            with loop.run.step():
                ids = torch.randint(0, 20, (4, 9))
                logp = compiled(ids)
                loop.run.tokens(logp=logp, rollout_logp=logp.detach(), replay=lambda ids=ids, m=compiled: m(ids))
                (-logp.mean()).backward()
                loop.run.clip_grad_norm_(1.0)
        loop.run.close()
        counts.append(len(graphs))
    assert counts[0] == counts[1] > 0
