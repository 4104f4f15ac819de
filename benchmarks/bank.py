"""The incident bank: RL steps of small real models with one planted fault each, and the truth beside it.

Every case is made from a seed: a model, completions sampled from it at slightly older weights, rollout log-probs from a
BF16 forward of those weights, group-normalised advantages, and a loss with its backward. The fault is planted where it
arises in life: in the rollout's numbers, the weights, the forward, the rewards or the normaliser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from seismograd import TokenBatch
from seismograd.demo.faults import Collapse, LayerFault

VOCABULARY = 96
PROMPT = 8
GROUP = 8  # completions a prompt


@dataclass(frozen=True)
class Truth:
    """What was planted.

    Args:
        verdict: the right one.
        tokens: (micro_batch, row, position) of the guilty tokens; any token of the guilty places is a right answer.
        rows: (micro_batch, row) of guilty sequences, where the fault is a sequence's.
        micro_batches: guilty ones, where the fault is a whole micro-batch's.
        where: what a non-finite verdict has to name.
        layers: names of those that explode, where the fault is a layer's.
    """

    verdict: str
    tokens: frozenset[tuple[int, int, int]] = frozenset()
    rows: frozenset[tuple[int, int]] = frozenset()
    micro_batches: frozenset[int] = frozenset()
    where: str = ""
    layers: tuple[str, ...] = ()

    def guilty(self, micro_batch: int, row: int, position: int) -> bool:
        return (
            (micro_batch, row, position) in self.tokens
            or (micro_batch, row) in self.rows
            or micro_batch in self.micro_batches
        )


@dataclass
class Case:
    """One step, with its gradients in .grad."""

    name: str
    model: PreTrainedModel
    batches: list[TokenBatch]
    truth: Truth


@dataclass(frozen=True)
class Spec:
    """How to make a case; `make` does.

    Args:
        fault: a key of `FAULTS`.
        model: a key of `MODELS`.
        seed: of everything random.
        size: the fault's strength, in its own unit.
        micro_batches, rows, length: of the step: micro_batches * rows sequences of `length` completion tokens.
        data: seed of all but the model, for further steps of one model; `seed` where None.
    """

    fault: str
    model: str
    seed: int
    size: float = 0.0
    micro_batches: int = 2
    rows: int = 8
    length: int = 48
    data: int | None = None

    @property
    def name(self) -> str:
        return f"{self.fault}/{self.model}/{self.size:g}/{self.seed}"


@dataclass
class Plan:
    """A step before its backward: what a fault may change.

    Args (each (rows, length) by micro-batch unless said otherwise):
        ids: (rows, PROMPT + length).
        rollout: nats.
        advantage: (rows, 1).
        mask: bool.
        factor: () of each micro-batch's loss.
        sequence_weight: whether the loss weighs by the whole sequence's ratio.
    """

    model: PreTrainedModel
    ids: list[Tensor]
    rollout: list[Tensor]
    advantage: list[Tensor]
    mask: list[Tensor]
    factor: list[float]
    sequence_weight: bool = False
    truth: Truth = field(default_factory=lambda: Truth("D"))


def model(kind: str, seed: int) -> PreTrainedModel:
    """A small random model with logits as spread as a trained one's, or SmolLM2-135M-Instruct."""
    if kind == SMOLLM2:
        from rich.console import Console

        from seismograd.demo.model import load

        real: PreTrainedModel = load(Console(stderr=True))[0]
        return real
    torch.manual_seed(seed)
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    sizes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.15, **common,
    }  # fmt: skip
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(n_embd=64, n_layer=4, n_head=4, n_positions=512, initializer_range=0.15, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=1e-8, **common)
        )  # fmt: skip
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=1e-8))
    return Qwen3ForCausalLM(Qwen3Config(head_dim=16, tie_word_embeddings=kind == "qwen3-tied", **sizes))


MODELS = ("qwen3", "qwen3-tied", "llama", "gpt2")
SMOLLM2 = "smollm2"


def slow_specs() -> Iterator[Spec]:
    """One of most faults on a real language model. Its norm's eps bounds what a collapsed embedding can do to it."""
    for fault, size in (
        ("honest", 0.0), ("ratio", 1e4), ("ratios", 300.0), ("drift", 6.0), ("advantage", 300.0), ("normaliser", 64.0),
        ("nan", 1.0), ("engine nan", 0.0), ("silenced", 1e4),
    ):  # fmt: skip
        yield Spec(fault, SMOLLM2, 0, size, micro_batches=2, rows=4, length=32)


def logp_of(net: nn.Module, ids: Tensor, length: int, temperature: float = 1.0) -> Tensor:
    """(rows, length) log-probs of the last `length` tokens."""
    logits = net(input_ids=ids[:, :-1]).logits[:, -length:].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[:, -length:, None]).squeeze(-1)


@torch.no_grad()
def sampled(net: PreTrainedModel, rows: int, length: int) -> Tensor:
    """(rows, PROMPT + length) ids: random prompts, completions from the model."""
    ids = torch.randint(2, VOCABULARY, (rows, PROMPT))
    cache = None
    step = ids
    for _ in range(length):
        out = net(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        step = torch.multinomial(torch.softmax(out.logits[:, -1].float(), -1), 1)
        ids = torch.cat([ids, step], 1)
    return ids


def plan(spec: Spec) -> Plan:
    """An honest step."""
    net = model(spec.model, spec.seed).train()
    torch.manual_seed(1000 + (spec.seed if spec.data is None else spec.data))
    older = {name: p.detach().clone() for name, p in net.named_parameters()}
    ids = sampled(net, spec.micro_batches * spec.rows, spec.length)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            rounded = logp_of(net, ids, spec.length).float()
        for name, p in net.named_parameters():  # the policy has moved on by a few small steps
            p.add_(older[name].std() * 0.002 * torch.randn_like(p))
        # Random weights give rare tokens gaps of several nats, by rounding and by the move: mismatches of their own,
        # which nobody planted (without this bound A.1 names 3 in 72 honest steps). SmolLM2's own samples have no gap of
        # rounding above 0.2.
        now = logp_of(net, ids, spec.length)
        rollout = now - (now - rounded).clamp(-0.5, 0.5)
    reward = (torch.rand(len(ids)) < 0.5).float().reshape(-1, GROUP)
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
    ends = torch.randint(spec.length // 2, spec.length + 1, (len(ids), 1))
    mask = torch.arange(spec.length)[None] < ends
    split = partial(torch.split, split_size_or_sections=spec.rows)
    return Plan(
        net, list(split(ids)), [x.clone() for x in split(rollout)], [x.clone() for x in split(advantage)],
        [x.clone() for x in split(mask)], [1.0] * spec.micro_batches,
    )  # fmt: skip


def finish(spec: Spec, p: Plan) -> Case:
    """The losses and their backwards, as a trainer runs them, watched as the hook does it."""
    p.model.zero_grad()
    total = sum(int(m.sum()) for m in p.mask)
    batches = []
    for i in range(spec.micro_batches):
        replay = partial(logp_of, p.model, p.ids[i], spec.length)
        logp = replay()
        weight: list[Tensor] = []
        logp.register_hook(weight.append)
        log_ratio = logp - p.rollout[i]
        if p.sequence_weight:
            whole = (log_ratio.detach() * p.mask[i]).sum(1, keepdim=True).exp()
            per_token = -whole * p.advantage[i] * logp
        else:
            ratio = log_ratio.exp()
            per_token = -torch.min(ratio * p.advantage[i], ratio.clamp(0.8, 1.2) * p.advantage[i])
        (p.factor[i] * (per_token * p.mask[i]).sum() / total).backward()
        pad = (PROMPT - 1, 0)
        wide = partial(nn.functional.pad, pad=pad)
        batches.append(
            TokenBatch(
                step=1, micro_batch=i, rank=0, input_ids=p.ids[i], mask=wide(p.mask[i]), logp=wide(logp.detach()),
                rollout_logp=wide(p.rollout[i]), loss_weight=wide(weight[0]), advantage=p.advantage[i],
                replay=lambda replay=replay, wide=wide: wide(replay()),
                replay_rows=lambda rows, i=i, wide=wide: {"logp": wide(logp_of(p.model, p.ids[i][rows], spec.length))},
            )
        )  # fmt: skip
    return Case(spec.name, p.model, batches, p.truth)


# -- faults -------------------------------------------------------------------------------------------------------


def trained_token(p: Plan, sign: float, generator: torch.Generator, taken: frozenset[Any] = frozenset()) -> Any:
    """A random trained token whose sequence's advantage has the sign: (micro_batch, row, column of the completion)."""
    places = [
        (i, row, column)
        for i in range(len(p.ids))
        for row in range(len(p.ids[i]))
        if float(p.advantage[i][row]) * sign > 0.1
        for column in range(1, int(p.mask[i][row].sum()))
        if (i, row, column) not in taken
    ]
    return places[int(torch.randint(len(places), (), generator=generator))]


def honest(p: Plan, size: float, g: torch.Generator) -> None:
    """Nothing."""


def corrupt_ratio(p: Plan, size: float, g: torch.Generator, sign: float = -1.0, count: int = 1) -> None:
    """The rollout's log-prob of a token is off by ln(size)."""
    places: set[Any] = set()
    for _ in range(count):
        i, row, column = trained_token(p, sign, g, frozenset(places))
        p.rollout[i][row, column] -= math.log(size)
        places.add((i, row, column))
    tokens = frozenset((i, row, column + PROMPT) for i, row, column in places)
    p.truth = Truth("A.1" if sign < 0 else "S", tokens=tokens)


def drift(p: Plan, size: float, g: torch.Generator) -> None:
    """Each rollout log-prob of a sequence is a little off, `size` nats in all; the loss weighs by the sequence."""
    p.sequence_weight = True
    i, row, _ = trained_token(p, -1.0, g)
    p.rollout[i][row] -= size / int(p.mask[i][row].sum())
    p.truth = Truth("A.2", rows=frozenset({(i, row)}))


def collapsed_embedding(p: Plan, size: float, g: torch.Generator) -> None:
    """The residual stream starts almost at zero at one position: the first normalisation divides by its length."""
    i, row, column = trained_token(p, -1.0, g)
    position = PROMPT + column - 1  # the input from which the token at `column` is predicted
    token = VOCABULARY - 1
    with torch.no_grad():
        for ids in p.ids:  # it occurs nowhere else
            ids[ids == token] = token - 1
        p.ids[i][row, position] = token
        embedding = p.model.get_input_embeddings().weight
        if isinstance(p.model, GPT2LMHeadModel):
            embedding[token] = size * embedding[token] - p.model.transformer.wpe.weight[position]
        else:
            embedding[token] *= size
    engine_agrees(p, g)
    p.truth = Truth("B", rows=frozenset({(i, row)}), layers=("embedding",))


def cancelled_residual(p: Plan, size: float, g: torch.Generator) -> None:
    """What a shallow layer adds all but cancels the residual stream at one position: the next one divides by little."""
    i, row, column = trained_token(p, -1.0, g)
    Collapse(p.model, p.ids[i][row, :-1], PROMPT + column - 1, LayerFault(step=1, layer=1, left=size))
    engine_agrees(p, g)
    p.truth = Truth("B", rows=frozenset({(i, row)}), layers=("embedding", "0"))


@torch.no_grad()
def engine_agrees(p: Plan, g: torch.Generator) -> None:
    """Ratios are near 1 everywhere, whatever has been done to the model."""
    for k, ids in enumerate(p.ids):
        length = p.mask[k].shape[1]
        p.rollout[k] = logp_of(p.model, ids, length).float() + 0.01 * torch.randn(ids.shape[0], length, generator=g)


def outlying_advantage(p: Plan, size: float, g: torch.Generator) -> None:
    """A reward that was not scaled."""
    i, row, _ = trained_token(p, -1.0, g)
    p.advantage[i][row] = -size
    p.truth = Truth("W", rows=frozenset({(i, row)}))


def wrong_normaliser(p: Plan, size: float, g: torch.Generator) -> None:
    """A micro-batch's loss was divided by too little."""
    i = int(torch.randint(len(p.ids), (), generator=g))
    p.factor[i] = size
    p.truth = Truth("W", micro_batches=frozenset({i}))


def too_far(p: Plan, size: float, g: torch.Generator) -> None:
    """The learning rate was too high: every weight has been thrown about."""
    with torch.no_grad():
        for q in p.model.parameters():
            if q.dim() > 1:
                q.add_(size * q.std() * torch.randn(q.shape, generator=g))
        for k, ids in enumerate(p.ids):
            with torch.autocast("cpu", torch.bfloat16):
                p.rollout[k] = logp_of(p.model, ids, p.mask[k].shape[1]).float()
    p.truth = Truth("D")


def nan_in_layer(p: Plan, size: float, g: torch.Generator) -> None:
    """A layer gives NaN (or, with a negative size, an infinity) for one token."""
    i, row, column = trained_token(p, -1.0, g)
    position = PROMPT + column - 1
    ids = p.ids[i]
    layers = next(m for m in p.model.modules() if isinstance(m, nn.ModuleList))
    k = int(torch.randint(len(layers), (), generator=g))
    module = dict(layers[k].mlp.named_modules())["c_proj" if isinstance(p.model, GPT2LMHeadModel) else "down_proj"]
    name = next(n for n, m in p.model.named_modules() if m is module)
    bad = math.nan if size >= 0 else math.inf

    guilty = [False]

    def start(_: nn.Module, args: Any, kwargs: Any) -> None:
        guilty[0] = torch.equal(kwargs["input_ids"], ids[:, :-1])

    def spoil(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if guilty[0]:
            output = output.clone()
            output[row, position] = bad
        return output

    p.model.register_forward_pre_hook(start, with_kwargs=True)
    module.register_forward_hook(spoil)
    p.truth = Truth("N", rows=frozenset({(i, row)}), where=name)


def zero_times_infinity(p: Plan, size: float, g: torch.Generator) -> None:
    """A masked position holds an infinite log-prob, and 0 * inf is NaN."""
    i, row, _ = trained_token(p, -1.0, g)
    column = p.mask[i].shape[1] - 1
    p.mask[i][row, column] = False
    p.rollout[i][row, column] = -math.inf
    p.truth = Truth("N", tokens=frozenset({(i, row, column + PROMPT)}), where="0 * inf")


def nan_from_the_rollout(p: Plan, size: float, g: torch.Generator) -> None:
    """The engine could not score a token."""
    i, row, column = trained_token(p, -1.0, g)
    p.rollout[i][row, column] = math.nan
    p.truth = Truth("N", tokens=frozenset({(i, row, column + PROMPT)}), where="rollout_logp")


Fault = Callable[[Plan, float, torch.Generator], None]
FAULTS: dict[str, tuple[Fault, tuple[float, ...]]] = {
    "honest": (honest, (0.0,)),
    "ratio": (corrupt_ratio, (3.0, 10.0, 100.0, 1e5, 1e30)),
    "ratios": (partial(corrupt_ratio, count=2), (300.0, 1e4)),
    "ratios8": (partial(corrupt_ratio, count=6), (300.0,)),
    "drift": (drift, (4.0, 6.0, 8.0)),
    "embedding": (collapsed_embedding, (1e-3, 1e-4)),
    "residual": (cancelled_residual, (1e-3, 3e-4)),
    "advantage": (outlying_advantage, (30.0, 300.0)),
    "normaliser": (wrong_normaliser, (8.0, 64.0)),
    "nan": (nan_in_layer, (1.0, -1.0)),
    "0*inf": (zero_times_infinity, (0.0,)),
    "engine nan": (nan_from_the_rollout, (0.0,)),
    "too far": (too_far, (0.5, 1.0)),
    "silenced": (partial(corrupt_ratio, sign=1.0), (100.0, 1e5)),
}


def specs(seeds: int = 3, **sizes: int) -> Iterator[Spec]:
    """The bank: every fault at every size on every model, `seeds` times; honest steps four times as often."""
    for fault, (_, strengths) in FAULTS.items():
        for k, size in enumerate(strengths * (4 if fault == "honest" else 1)):
            for kind in MODELS:
                for seed in range(seeds):
                    yield Spec(fault, kind, 100 * seed + k, size, **sizes)


def make(spec: Spec) -> Case:
    """The case, with its gradients in place."""
    p = plan(spec)
    FAULTS[spec.fault][0](p, spec.size, torch.Generator().manual_seed(spec.seed))
    return finish(spec, p)


__all__ = ["FAULTS", "MODELS", "SMOLLM2", "Case", "Spec", "Truth", "make", "slow_specs", "specs"]
