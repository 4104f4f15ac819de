"""GradLoc's replays: the same forward again, whatever it ran under, and what of the loss they do not pass through."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from seismograd import TokenBatch
from seismograd.gradloc import METHODS, Incident, Method, ModelReplay, localize
from seismograd.gradloc.attribution import attribute
from tests import tiny
from tests.test_gradloc import (
    Made,
    by_place,
    length_of,
    logp_of,
    made,
    place,
    stepped,
    told,
    trace,
    true_shares,
)


def attributed_truly(m: Made, scale: float = 1.0, tolerance: float = 1e-3) -> Incident:
    """Attribution holds up against the true shares, and the incident names the planted token alone by it."""
    step, replay = stepped(m, scale)
    shares, attempts = attribute(step, replay)
    assert shares is not None, attempts
    true = true_shares(m, scale)
    assert by_place(step, shares) == pytest.approx(true, abs=tolerance)
    incident = m.localize(grad_scale=scale)
    assert incident.method == "attribution"
    assert incident.completeness == pytest.approx(1, abs=max(0.01, tolerance))
    assert [place(c) for c in incident.culprits] == [m.planted]
    assert incident.verdict == "A.1"
    assert incident.culprits[0].share == pytest.approx(true[m.planted], abs=tolerance)
    assert incident.notes == ()
    return incident


def net(**how: Any) -> Any:
    torch.manual_seed(0)
    return tiny.model(**how).train()


# -- random numbers -------------------------------------------------------------------------------------------------


def test_dropout_with_its_random_numbers() -> None:
    m = made(net(dropout=0.1), state=True)
    assert attributed_truly(m).replay_error == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("method", ["attribution", "jvp"])
def test_dropout_without_its_random_numbers_is_not_believed(method: Method) -> None:
    m = made(net(dropout=0.3), state=False)
    incident = m.localize(method=method)
    assert not [a for a in incident.attempts if a.method == method and a.believed], incident.attempts
    assert incident.method == "ratios"


def test_dropout_without_its_random_numbers_is_named() -> None:
    m = made(net(dropout=0.3), state=False)
    assert "another forward" in told(m.localize(method="attribution"))


@pytest.mark.parametrize("method", METHODS)
def test_whatever_is_believed_of_another_forward_comes_with_a_warning(method: Method) -> None:
    m = made(net(dropout=0.3), state=False)
    incident = m.localize(method=method)
    said = " ".join(incident.notes)
    assert incident.method == "ratios" or "off the recorded ones" in said, (incident.method, said)
    assert incident.notes


@pytest.mark.parametrize(
    "method",
    ["attribution", "jvp", "auto", "bisect"],
)
def test_another_forward_is_told_also_where_nothing_is_verified(method: Method) -> None:
    m = made(net(dropout=0.3), state=False)
    incident = m.localize(method=method, verified=0)
    assert incident.method == "ratios" or "recorded" in " ".join(incident.notes), incident.attempts


def test_weights_that_moved_since_are_another_forward() -> None:
    m = made(net())
    with torch.no_grad():
        for p in m.net.parameters():
            if p.dim() > 1:
                p.add_(0.05 * p.std() * torch.randn_like(p))
    incident = m.localize(method="attribution")
    assert "another forward" in told(incident)
    assert incident.method == "ratios"


# -- how the model computes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradient_checkpointing(reentrant: bool, dropout: float) -> None:
    model = net(dropout=dropout)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    m = made(model, state=True)
    model.gradient_checkpointing_disable()
    true = true_shares(m)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = trace(model)
    incident = m.localize()
    assert trace(model) == before
    assert incident.method == "attribution"
    assert incident.notes == ()
    (culprit,) = incident.culprits
    assert place(culprit) == m.planted
    assert culprit.share == pytest.approx(true[m.planted], abs=1e-4)
    for method in ("jvp", "bisect"):
        incident = m.localize(method=method)
        assert trace(model) == before
        assert [place(c) for c in incident.culprits] == [m.planted], told(incident)


class Kept:
    """A receiver that keeps everything, to compare."""

    def __init__(self, accepting: bool = True) -> None:
        self.accepting, self.restarts = accepting, 0
        self.found: dict[tuple[int, int], Tensor] = {}

    def accepts(self, logp: Tensor) -> bool:
        return self.accepting

    def take(self, weighting: int, parameter: int, gradient: Tensor) -> None:
        assert (weighting, parameter) not in self.found
        self.found[weighting, parameter] = gradient.clone()

    def restart(self) -> None:
        self.restarts += 1
        self.found.clear()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_passed_on_as_they_are_made_are_the_same(reentrant: bool | None, tied: bool) -> None:
    model = tiny.model(tied=tied).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    m = made(model)
    before = trace(model)
    whole = m.batches[0].loss_weight
    assert whole is not None
    weights = [{"logp": whole}, {"logp": whole * (torch.arange(whole.shape[1]) == 2)}]
    expected = [list(gradient) for _, gradient in ModelReplay(model, m.batches).backward(0, weights)]
    kept = Kept()
    replay = ModelReplay(model, m.batches)
    assert [gradient for _, gradient in replay.backward(0, weights, into=kept)] == [[], []]
    assert kept.restarts == (reentrant is True)
    for n, gradient in enumerate(expected):
        for k, g in enumerate(gradient):
            assert ((n, k) in kept.found) == (g is not None)
            assert g is None or torch.equal(kept.found[n, k], g)
    refusing = Kept(accepting=False)
    assert list(replay.backward(0, weights, into=refusing)) == []
    assert refusing.found == {}
    assert trace(model) == before


def test_reentrant_checkpointing_leaves_no_gradient_where_there_was_none() -> None:
    model = net()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    m = made(model)
    model.lm_head.weight.grad = None  # the loop keeps the head as it is
    before = trace(model)
    m.localize(method="bisect")
    assert trace(model) == before


def lora() -> Any:
    torch.manual_seed(0)
    model = get_peft_model(
        tiny.model(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.2)
    return model.train()


def test_adapters() -> None:
    model = lora()
    m = made(model)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert frozen
    incident = attributed_truly(m)
    assert all(p.grad is None for p in frozen)
    assert {group for groups in incident.norms.values() for group in groups} >= {"attention", "mlp"}


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_16_bits(tied: bool) -> None:
    m = made(net(tied=tied).bfloat16())
    true = true_shares(m)
    incident = m.localize()
    assert incident.method == "attribution"
    assert incident.completeness == pytest.approx(1, abs=0.05)
    assert [place(c) for c in incident.culprits] == [m.planted]
    assert incident.culprits[0].share == pytest.approx(true[m.planted], abs=0.05)
    assert incident.notes == ()
    assert incident.environment["dtype"] == "bfloat16"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_autocast(dropout: float) -> None:
    m = made(net(dropout=dropout), state=True, autocast=True)
    incident = m.localize()
    assert incident.method == "attribution"
    assert incident.completeness == pytest.approx(1, abs=0.05)
    assert [place(c) for c in incident.culprits] == [m.planted]
    assert incident.culprits[0].share == pytest.approx(true_shares(m)[m.planted], abs=0.05)
    assert incident.replay_error == pytest.approx(0, abs=1e-6)  # its backwards ran under the same autocast
    assert incident.notes == ()


def test_autocast_leaves_no_weights_in_its_cache() -> None:
    m = made(net(), state=True, autocast=True)
    ids = m.batches[0].input_ids
    assert ids is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = logp_of(m.net, ids)
        m.localize()
        assert torch.equal(logp_of(m.net, ids), before)


def test_tied_head() -> None:
    attributed_truly(made(net(tied=True)))


# -- rows alone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rows_that_can_be_replayed_alone(dropout: float) -> None:
    """The culprit's row is enough for its own gradient; not where its random numbers are those of all rows."""
    m = made(net(dropout=dropout), state=True)
    whole = m.localize()

    def rows_of(ids: Tensor, rows: Tensor) -> Mapping[str, Tensor]:
        return {"logp": logp_of(m.net, ids[rows])}

    for i, batch in enumerate(m.batches):
        assert batch.input_ids is not None
        m.batches[i] = replace(batch, replay_rows=partial(rows_of, batch.input_ids))
    alone = m.localize()
    (a,), (b,) = whole.culprits, alone.culprits
    for x, y in ((a.grad_norm, b.grad_norm), (a.share, b.share), (a.influence, b.influence)):
        assert y == pytest.approx(x, rel=1e-4)
    assert alone.replay_error == pytest.approx(0, abs=1e-5)
    assert (alone.passes < whole.passes) == (dropout == 0)


def test_rows_that_cannot_be_replayed_after_all() -> None:
    m = made(net())

    def refuse(rows: Tensor) -> Mapping[str, Tensor]:
        raise ValueError("planted")

    m.batches = [replace(b, replay_rows=refuse) for b in m.batches]
    incident = m.localize()
    assert [place(c) for c in incident.culprits] == [m.planted]
    assert incident.culprits[0].grad_norm is not None or "planted" in told(incident)


# -- how the tokens lie ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    sizes = ((3, 10), (3, 8))
    inputs, masks = [], []
    for rows, length in sizes:
        real = torch.ones(rows, length, dtype=torch.long)
        if side == "left":
            real[0, :4] = real[2, :2] = 0
        else:
            real[0, -3:] = real[2, -1:] = 0
        inputs.append({"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)})
        masks.append((real[:, 1:] * real[:, :-1]).bool())
    m = made(net(), sizes, inputs=inputs, masks=masks)
    incident = attributed_truly(m)
    assert all(bool(masks[s.micro_batch][s.row, p - 1]) for s in incident.sequences for p in s.positions)


def packed(corrupt: float = 50.0) -> Made:
    """Two sequences in a row: positions 0-4 and the rest."""
    sizes = ((2, 12), (2, 9))
    inputs, masks, owners = [], [], []
    for rows, length in sizes:
        second = torch.arange(length) >= 5
        seen = (second[:, None] == second[None]) & torch.ones(length, length, dtype=torch.bool).tril()
        position = torch.where(second, torch.arange(length) - 5, torch.arange(length))
        bias = torch.zeros(rows, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
        inputs.append({"attention_mask": bias, "position_ids": position.expand(rows, -1)})
        mask = torch.ones(rows, length - 1, dtype=torch.bool)
        mask[:, 4] = False  # the first token of a sequence is predicted by none of its own
        masks.append(mask)
        owner = 2 * torch.arange(rows)[:, None] + second[None, 1:]
        owners.append(torch.where(mask, owner, -1))
    m = made(net(), sizes, inputs=inputs, masks=masks, corrupt=corrupt)
    m.batches = [replace(b, sequence=owner) for b, owner in zip(m.batches, owners, strict=True)]
    return m


def test_packed_rows() -> None:
    m = packed()
    assert m.planted == (1, 1, 4)
    incident = attributed_truly(m)
    (sequence,) = incident.sequences
    assert sequence.positions == (1, 2, 3, 4)  # the culprit's own, not its neighbour's
    ratios = m.batches[1].logp - m.batches[1].rollout_logp  # type: ignore[operator]
    assert incident.culprits[0].sequence_log_ratio == pytest.approx(float(ratios[1, :4].sum()), abs=1e-5)


def test_two_guilty_sequences_packed_in_one_row() -> None:
    """Each of them has its own bar."""
    m = packed(corrupt=1.0)
    batch = m.batches[1]
    assert batch.rollout_logp is not None
    assert batch.replay is not None
    rollout, advantage = batch.rollout_logp.clone(), torch.full_like(batch.logp, -1.0)
    rollout[1, 2] -= 4.0
    rollout[1, 6] -= 4.0
    m.net.zero_grad()
    logp = batch.replay()
    weight: list[Tensor] = []
    logp.register_hook(weight.append)  # type: ignore[no-untyped-call]
    (-((logp - rollout).exp() * advantage * batch.mask).sum() / 30).backward()  # type: ignore[no-untyped-call]
    batches = [replace(batch, rollout_logp=rollout, advantage=advantage, loss_weight=weight[0])]
    incident = localize(batches, m.net)
    assert {place(c) for c in incident.culprits} == {(0, 1, 3), (0, 1, 7)}
    assert {s.positions for s in incident.sequences} == {(1, 2, 3, 4), (6, 7, 8)}


def test_neighbour_of_a_drifted_sequence_packed_in_its_row_is_not_blamed() -> None:
    m = packed(corrupt=1.0)
    batch = m.batches[1]
    assert batch.rollout_logp is not None
    assert batch.replay is not None
    rollout = batch.rollout_logp.clone()
    rollout[1, :4] -= 1.0  # 4 nats in all
    own = torch.zeros_like(batch.mask)
    own[1, :4] = True
    m.net.zero_grad()
    logp = batch.replay()
    weight: list[Tensor] = []
    logp.register_hook(weight.append)  # type: ignore[no-untyped-call]
    factor = torch.where(own, (logp.detach() - rollout)[1, :4].sum().exp(), 1.0)
    (factor * logp * batch.mask).sum().backward()  # type: ignore[no-untyped-call]
    batches = [replace(batch, rollout_logp=rollout, advantage=torch.full((2, 1), -1.0), loss_weight=weight[0])]
    incident = localize(batches, m.net, top_k=20)
    assert incident.verdict == "A.2", incident.evidence
    assert {place(c) for c in incident.culprits} == {(0, 1, position) for position in (1, 2, 3, 4)}


# -- how the gradient was made --------------------------------------------------------------------------------------


def test_accumulation_over_unequal_micro_batches() -> None:
    m = made(net(), ((1, 5), (4, 12), (2, 7)))
    assert len({b.logp.shape for b in m.batches}) == 3
    incident = attributed_truly(m)
    assert incident.sequences[0].micro_batch == 2


@pytest.mark.parametrize("method", ["auto", "jvp"])
def test_averaged_gradients(method: Method) -> None:
    m = made(net(), scale=0.5)
    plain = made(net()).localize().culprits[0]
    if method == "auto":
        attributed_truly(m, scale=0.5)
    (culprit,) = m.localize(method=method, grad_scale=0.5).culprits
    assert culprit.share == pytest.approx(plain.share, abs=1e-4)
    assert culprit.grad_norm == pytest.approx(0.5 * plain.grad_norm, rel=1e-4)  # type: ignore[operator]
    assert culprit.pull == pytest.approx(plain.pull, rel=1e-2)  # along G/|G|, so whatever the scale


def test_scale_that_is_not_the_gradients_shows() -> None:
    incident = made(net(), scale=0.5).localize(method="attribution")
    assert incident.method == "ratios"
    assert any("make 2 times the step's" in note for note in incident.notes)


# -- what does not pass through logp --------------------------------------------------------------------------------


class WithValue(nn.Module):
    """A value head beside the language model's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.model()
        self.value = nn.Linear(32, 1)

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)

    def off(self, ids: Tensor) -> Tensor:
        found: Tensor = self.value(self.inner.model(input_ids=ids).last_hidden_state)
        return (found - 3).square().mean()


def with_value(dtype: torch.dtype = torch.float32) -> tuple[Made, float]:
    torch.manual_seed(0)
    model = WithValue().to(dtype)
    ids = torch.arange(3, 11)[None]
    m = made(model, corrupt=8.0, beside=lambda i: model.off(ids).float() * 0.1)
    beside = torch.autograd.grad(0.2 * model.off(ids).float(), m.trained, allow_unused=True)
    whole = m.gradient
    along = sum(float((a * b).sum()) for a, b in zip(beside, whole, strict=True) if a is not None)
    return m, along / length_of(whole) ** 2


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("attribution", torch.float32),
        ("jvp", torch.float32),
        ("jvp", torch.bfloat16),
        ("attribution", torch.bfloat16),
    ],
    ids=str,
)
def test_value_head_is_taken_out_and_told(method: Method, dtype: torch.dtype) -> None:
    m, part = with_value(dtype)
    assert 0.1 < abs(part) < 0.9
    incident = m.localize(method=method)
    assert incident.method == method, incident.attempts
    tolerance = 0.01 if dtype == torch.float32 else 0.05
    assert incident.parts["not replayed"] == pytest.approx(part, abs=tolerance)
    assert incident.parts["tokens"] == pytest.approx(1 - part, abs=tolerance)
    assert incident.completeness == pytest.approx(1, abs=tolerance)
    assert [place(c) for c in incident.culprits] == [m.planted]


def test_weight_decay_in_the_loss_is_taken_out_and_told() -> None:
    model = net()
    decay = partial(lambda i: 0.03 * torch.stack([(p**2).sum() for p in model.parameters()]).sum())
    m = made(model, corrupt=8.0, beside=decay)
    whole = m.gradient
    along = sum(float((2 * 2 * 0.03 * p.detach().double() * g).sum()) for p, g in zip(m.trained, whole, strict=True))
    part = along / length_of(whole) ** 2
    assert part > 0.1
    incident = m.localize()
    assert incident.method == "attribution", incident.attempts
    assert incident.parts["not replayed"] == pytest.approx(part, abs=0.01)
    assert incident.completeness == pytest.approx(1, abs=0.01)


def outputs_of(model: nn.Module, ids: Tensor) -> Mapping[str, Tensor]:
    logits: Tensor = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1)
    return {
        "logp": logits.gather(-1, ids[:, 1:, None]).squeeze(-1),
        "entropy": -(logits.exp() * logits).sum(-1),
        "router": logits.square().mean(),
    }


@pytest.mark.parametrize("method", ["attribution", "jvp"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_entropy_bonus_and_router_loss_are_named(method: Method, scale: float) -> None:
    model = net()
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 40, (3, length), generator=generator) for length in (9, 7)]
    plain = [i.clone() for i in ids]

    def beside(i: int) -> Tensor:
        found = outputs_of(model, plain[i])
        return -3.0 * found["entropy"].mean() + 0.3 * found["router"]

    m = made(model, sizes=((3, 9), (3, 7)), corrupt=8.0, beside=beside, scale=scale)
    # The entropy is of other rows than logp, so that one can be told from the other.
    for i, batch in enumerate(m.batches):
        others = {"entropy": torch.full_like(batch.logp, -3.0 / batch.logp.numel()), "router": torch.tensor(0.3)}

        def replay_all(batch: Any = batch, i: int = i) -> Mapping[str, Tensor]:
            return {**outputs_of(model, plain[i]), "logp": batch.replay()}

        m.batches[i] = replace(batch, others=others, replay_all=replay_all)
    whole, true = m.gradient, {}
    for name, factor in (("entropy", -3.0), ("router", 0.3)):
        term = torch.stack([outputs_of(model, x)[name].mean() for x in plain]).sum()
        own = torch.autograd.grad(scale * factor * term, m.trained)
        true[name] = sum(float((a * b).sum()) for a, b in zip(own, whole, strict=True)) / length_of(whole) ** 2
    assert all(abs(part) > 0.02 for part in true.values()), true
    incident = m.localize(method=method, grad_scale=scale)
    assert incident.method == method, incident.attempts
    assert set(incident.parts) == {"tokens", "entropy", "router"}
    assert incident.parts["entropy"] == pytest.approx(true["entropy"], abs=5e-3)
    assert incident.parts["router"] == pytest.approx(true["router"], abs=5e-3)
    assert incident.parts["tokens"] == pytest.approx(1 - sum(true.values()), abs=1e-2)
    assert [place(c) for c in incident.culprits] == [m.planted]


def test_token_of_an_almost_empty_embedding_needs_a_shorter_ladder() -> None:
    """Where the first distance leaves the linear regime, the ladder goes down until the sum is right."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, initializer_range=0.2, tie_word_embeddings=False, pad_token_id=0,
        )
    ).train()  # fmt: skip
    with torch.no_grad():
        model.model.embed_tokens.weight[5] *= 1e-5
    ids = torch.randint(6, 64, (3, 9), generator=torch.Generator().manual_seed(4))
    ids[1, 4] = 5
    logp = logp_of(model, ids)
    weight: list[Tensor] = []
    logp.register_hook(weight.append)  # type: ignore[no-untyped-call]
    given = torch.tensor([[1.0], [-1.0], [1.0]]).repeat(1, 8)
    given[0, 0] = 300.0  # the first distance is made for this one
    (logp * given).sum().backward()  # type: ignore[no-untyped-call]
    batch = replace(
        made(net()).batches[0], input_ids=ids, mask=torch.ones(3, 8, dtype=torch.bool), logp=logp.detach(),
        rollout_logp=logp.detach(), loss_weight=weight[0], advantage=None, replay=partial(logp_of, model, ids),
    )  # fmt: skip
    m = Made(model, [batch], (0, 1, 5))
    incident = m.localize()
    distances = [float(a.detail.split()[2]) for a in incident.attempts if a.method == "attribution"]
    assert len(distances) > 1
    assert distances[-1] < distances[0]
    assert incident.completeness == pytest.approx(1, abs=0.05)
    assert math.isfinite(incident.grad_norm)
    step, replay = stepped(m)
    shares, _ = attribute(step, replay)
    assert shares is not None
    assert by_place(step, shares) == pytest.approx(true_shares(m), abs=0.05)


# -- replays that do more than run the forward ----------------------------------------------------------------------


def zeroing(m: Made, batch: TokenBatch) -> Tensor:
    m.net.zero_grad()
    return logp_of(m.net, batch.input_ids)  # type: ignore[arg-type]


def zeroing_in_place(m: Made, batch: TokenBatch) -> Tensor:
    m.net.zero_grad(set_to_none=False)
    return logp_of(m.net, batch.input_ids)  # type: ignore[arg-type]


def backward_of_its_own(m: Made, batch: TokenBatch) -> Tensor:
    with torch.enable_grad():
        logp_of(m.net, batch.input_ids).sum().backward()  # type: ignore[arg-type, no-untyped-call]
    return logp_of(m.net, batch.input_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("does", [zeroing, zeroing_in_place, backward_of_its_own])
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_that_writes_gradients_changes_neither_them_nor_what_is_found(
    does: Callable[[Made, TokenBatch], Tensor], method: Method
) -> None:
    m = made()
    expected = m.localize(method=method)
    m.batches[:] = [replace(batch, replay=partial(does, m, batch)) for batch in m.batches]
    before = trace(m.net)
    incident = m.localize(method=method)
    assert trace(m.net) == before
    if method in ("attribution", "bisect"):
        assert incident.culprits == expected.culprits


@pytest.mark.parametrize("does", [zeroing_in_place, backward_of_its_own])
def test_a_backward_alone_is_of_its_own_loss(does: Callable[[Made, TokenBatch], Tensor]) -> None:
    model = net()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    m = made(model)
    expected = m.localize(method="bisect")
    m.batches[:] = [replace(batch, replay=partial(does, m, batch)) for batch in m.batches]
    assert m.localize(method="bisect").culprits == expected.culprits


# -- other forwards -------------------------------------------------------------------------------------------------


def scaled(factor: float, batch: TokenBatch) -> Tensor:
    assert batch.replay is not None
    return batch.replay() * factor


def row_of_nan(batch: TokenBatch) -> Tensor:
    assert batch.replay is not None
    logp = batch.replay()
    return torch.cat([logp[:1] * math.nan, logp[1:]])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (partial(scaled, math.nan), "not finite where the step's was"),
        (row_of_nan, "not finite where the step's was"),
        (partial(scaled, 0.5), "nats off|add up to"),
    ],
    ids=["nan", "a row of nan", "half"],
)
@pytest.mark.parametrize("method", METHODS)
def test_another_forward_is_believed_by_no_method(
    other: Callable[[TokenBatch], Tensor], said: str, method: Method
) -> None:
    m = made()
    m.batches[:] = [replace(batch, replay=partial(other, batch)) for batch in m.batches]
    incident = m.localize(method=method)
    assert not [a for a in incident.attempts if a.believed], incident.attempts
    assert incident.method == "ratios"
    assert incident.verdict == localize(m.batches, None).verdict == "A.1"
    assert [place(c) for c in incident.culprits] == [m.planted]
    (note,) = incident.notes
    assert any(words in note for words in said.split("|")), note


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_turned_nan_since_are_another_forward(method: Method) -> None:
    m = made()
    with torch.no_grad():
        m.trained[0].view(-1)[0].fill_(math.nan)
        m.trained[-1].view(-1)[0].fill_(math.nan)
    incident = m.localize(method=method)
    assert incident.method == "ratios"
    assert incident.verdict == "A.1"
    assert "not finite where the step's was" in " ".join(incident.notes)


@pytest.mark.parametrize("method", METHODS)
def test_a_replay_of_another_shape_is_named(method: Method) -> None:
    m = made()
    m.batches[:] = [replace(b, replay=lambda own=b.replay: own()[:, :-1]) for b in m.batches]
    incident = m.localize(method=method)
    assert incident.verdict == "A.1"
    assert incident.method == "ratios"
    (note,) = incident.notes
    assert "run.tokens(replay=...) gave (3, 7), logp has (3, 8)" in note
