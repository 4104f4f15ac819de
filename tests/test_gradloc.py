"""GradLoc: its shares are the true ones, it names the planted fault, leaves no trace, and survives what it is given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import bank
from seismograd import TokenBatch
from seismograd.gradloc import METHODS, Alone, Bisection, Incident, Method, ModelReplay, Thresholds, localize
from seismograd.gradloc.attribution import Shares, Step, attribute
from seismograd.gradloc.jvp import differentiate
from seismograd.gradloc.replay import Replay
from seismograd.gradloc.tokens import Tokens
from seismograd.gradloc.vectors import norm_of
from seismograd.telemetry.forward_state import ForwardState
from seismograd.telemetry.incidents import VERDICTS, Culprit
from tests import tiny

Place = tuple[int, int, int]  # micro-batch, row, position
Sizes = Sequence[tuple[int, int]]


# -- steps --------------------------------------------------------------------------------------------------------


@dataclass
class Made:
    """A step with its gradient in .grad, and the token whose ratio was corrupted."""

    net: nn.Module
    batches: list[TokenBatch]
    planted: Place

    @property
    def trained(self) -> list[Tensor]:
        return [p for p in self.net.parameters() if p.requires_grad and p.grad is not None]

    @property
    def gradient(self) -> list[Tensor]:
        return [p.grad.double() for p in self.trained if p.grad is not None]

    def localize(self, **how: Any) -> Incident:
        return localize(self.batches, self.net, **how)


def logp_of(net: nn.Module, ids: Tensor, **inputs: Any) -> Tensor:
    """(B, T-1)."""
    logits = net(input_ids=ids, **inputs).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def made(
    net: nn.Module | None = None,
    sizes: Sizes = ((3, 9), (2, 7)),
    forward: Callable[..., Tensor] = logp_of,
    inputs: Sequence[dict[str, Any]] = (),
    masks: Sequence[Tensor] = (),
    corrupt: float = 50.0,
    state: bool = False,
    autocast: bool = False,
    scale: float = 1.0,
    beside: Callable[[int], Tensor] | None = None,
) -> Made:
    """A step as a loop runs it: one token of the last micro-batch has a ratio of about `corrupt`.

    Args:
        inputs: more arguments of the forward, by micro-batch.
        masks: (B, T-1) of the trained tokens, by micro-batch; all where there are none.
        state: whether what the forward ran under is taken.
        scale: of the gradients, after their backward.
        beside: of micro-batch i, a term of the loss that does not pass through logp.
    """
    torch.manual_seed(0)
    net = tiny.model().train() if net is None else net
    generator = torch.Generator().manual_seed(1)
    planted = (len(sizes) - 1, 1, sizes[-1][1] // 2)
    total = sum(rows * (length - 1) for rows, length in sizes)
    batches = []
    net.zero_grad()
    for i, (rows, length) in enumerate(sizes):
        ids = torch.randint(3, 40, (rows, length), generator=generator)
        kwargs = inputs[i] if inputs else {}
        mask = masks[i] if masks else torch.ones(rows, length - 1, dtype=torch.bool)
        taken = None
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            if state:
                taken = ForwardState.take(torch.device("cpu"))
            logp = forward(net, ids, **kwargs)
        rollout = logp.detach() + 0.01 * torch.randn(logp.shape, generator=generator)
        advantage = torch.randn(rows, 1, generator=generator).sign() * (0.5 + torch.rand(rows, 1, generator=generator))
        if i == planted[0]:
            rollout[1, planted[2] - 1] -= math.log(corrupt)
            advantage[1] = -1.0
        weight: list[Tensor] = []
        logp.register_hook(weight.append)  # type: ignore[no-untyped-call]
        loss = -((logp - rollout).exp() * advantage * mask).sum() / total
        (loss if beside is None else loss + beside(i)).backward()  # type: ignore[no-untyped-call]
        batches.append(
            TokenBatch(
                step=3, micro_batch=i, rank=0, input_ids=ids, mask=mask, logp=logp.detach(), rollout_logp=rollout,
                loss_weight=weight[0], advantage=advantage, replay=partial(forward, net, ids, **kwargs), state=taken,
            )
        )  # fmt: skip
    for p in net.parameters():
        if p.grad is not None:
            p.grad *= scale
    return Made(net, batches, planted)


def stepped(m: Made, scale: float = 1.0) -> tuple[Step, ModelReplay]:
    """What the methods get."""
    replay = ModelReplay(m.net, m.batches)
    return Step(m.batches, Tokens.of(m.batches), norm_of(list(replay.gradient)), scale, Alone()), replay


def place(c: Culprit) -> Place:
    return (c.micro_batch, c.row, c.position)


def length_of(gradient: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradient))


def gradients(m: Made, scale: float = 1.0) -> Iterator[tuple[Place, list[Tensor]]]:
    """Each token's own gradient in the step, by a backward of its own."""
    for i, batch in enumerate(m.batches):
        assert batch.replay is not None
        assert batch.loss_weight is not None
        with batch.state.restored() if batch.state is not None else nullcontext():
            logp = batch.replay()
        for row, column in (batch.mask | (batch.loss_weight != 0)).nonzero().tolist():
            found = torch.autograd.grad(logp[row, column], m.trained, retain_graph=True, allow_unused=True)
            w = scale * float(batch.loss_weight[row, column])
            yield (
                (i, row, column + 1),
                [
                    torch.zeros_like(p).double() if g is None else w * g.double()
                    for g, p in zip(found, m.trained, strict=True)
                ],
            )


def true_shares(m: Made, scale: float = 1.0) -> dict[Place, float]:
    """g_t . G / |G|^2 of each token."""
    whole = m.gradient
    square = length_of(whole) ** 2
    return {
        at: sum(float((a * b).sum()) for a, b in zip(own, whole, strict=True)) / square
        for at, own in gradients(m, scale)
    }


def by_place(step: Step, shares: Shares) -> dict[Place, float]:
    t = step.tokens
    places = zip(t.batch.tolist(), t.row.tolist(), (t.column + 1).tolist(), strict=True)
    return dict(zip(places, shares.tokens.tolist(), strict=True))


NETS: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: tiny.model().train(),
    "qwen3-tied": lambda: tiny.model(tied=True).train(),
    "gpt2": lambda: bank.model("gpt2", 0).train(),
    "plain": tiny.PlainModel,
}


def net_of(kind: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(0)
    net = NETS[kind]()
    if kind != "plain":
        return net, logp_of
    return tiny.PlainModel(vocabulary=40), lambda net, ids: net(ids)


# -- the shares are the true ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["attribution", "jvp"])
def test_shares_are_the_true_ones(kind: str, method: str) -> None:
    net, forward = net_of(kind)
    m = made(net, forward=forward)
    step, replay = stepped(m)
    shares, _ = (attribute if method == "attribution" else differentiate)(step, replay)
    assert shares is not None
    true = true_shares(m)
    assert sum(true.values()) == pytest.approx(1, abs=1e-4)  # the reference is one
    exact = method == "jvp"
    assert by_place(step, shares) == pytest.approx(true, abs=1e-5 if exact else 1e-3)
    assert shares.completeness == pytest.approx(1, abs=1e-4 if exact else 5e-3)


@pytest.mark.parametrize("kind", NETS)
def test_verified_numbers_are_those_of_a_backward_of_its_own(kind: str) -> None:
    net, forward = net_of(kind)
    m = made(net, forward=forward, corrupt=20.0)
    incident = m.localize(thresholds=Thresholds(share=0.01))
    assert incident.method == "attribution"
    own = dict(gradients(m))
    whole = m.gradient
    norm = length_of(whole)
    assert incident.grad_norm == pytest.approx(norm, rel=1e-5)
    checked = [c for c in incident.culprits if c.grad_norm is not None]
    assert place(checked[0]) == m.planted
    for c in checked:
        g = own[place(c)]
        assert c.grad_norm == pytest.approx(length_of(g), rel=1e-4)
        without = length_of([a - b for a, b in zip(whole, g, strict=True)])
        assert c.influence == pytest.approx(1 - without / norm, abs=1e-5)
        assert c.share == pytest.approx(
            sum(float((a * b).sum()) for a, b in zip(g, whole, strict=True)) / norm**2, abs=1e-5
        )
        assert c.pull == pytest.approx(c.share * norm / c.loss_weight, rel=1e-2)
        assert c.norms is not None
        assert math.hypot(*(groups["all"] for groups in c.norms.values())) == pytest.approx(c.grad_norm, rel=1e-4)
    assert incident.without_culprits is not None


def test_norms_by_layer_and_module() -> None:
    m = made()
    (culprit,) = m.localize(verified=1).culprits
    own = dict(zip([n for n, _ in m.net.named_parameters()], dict(gradients(m))[m.planted], strict=True))
    found = culprit.norms
    assert found is not None
    for layer in ("0", "1"):
        for group, inside in (("attention", "self_attn"), ("mlp", "mlp"), ("all", "")):
            parts = [g for n, g in own.items() if f"layers.{layer}." in n and inside in n]
            if group != "all":  # norms inside of a block count as norms, not as the block
                parts = [g for n, g in own.items() if f"layers.{layer}.{inside}." in n and "norm" not in n]
            assert found[layer][group] == pytest.approx(length_of(parts), rel=1e-4), (layer, group)
    assert found["head"]["all"] == pytest.approx(length_of([own["lm_head.weight"]]), rel=1e-4)
    assert found["embedding"]["all"] == pytest.approx(length_of([own["model.embed_tokens.weight"]]), rel=1e-4)


def test_norm_without_the_verified_tokens() -> None:
    m = made(corrupt=5.0)
    incident = m.localize(verified=2)
    true = true_shares(m)
    first = sorted(true, key=lambda at: -abs(true[at]))[:2]
    assert min(abs(true[at]) for at in first) > Thresholds().share / 2
    own = dict(gradients(m))
    left = [w - own[first[0]][k] - own[first[1]][k] for k, w in enumerate(m.gradient)]
    assert incident.without_culprits == pytest.approx(length_of(left), rel=1e-4)


def test_sequence_of_the_culprit_has_the_true_shares() -> None:
    m = made()
    (sequence,) = m.localize().sequences
    true = {at[2]: share for at, share in true_shares(m).items() if at[:2] == m.planted[:2]}
    assert dict(zip(sequence.positions, sequence.shares, strict=True)) == pytest.approx(true, abs=1e-3)
    assert sequence.log_ratios is not None
    assert max(sequence.log_ratios) == pytest.approx(math.log(50), abs=0.1)


def test_what_is_told_of_the_culprit_is_what_the_batch_says() -> None:
    m = made()
    (c,) = m.localize().culprits
    batch, row, column = m.batches[c.micro_batch], c.row, c.position - 1
    assert batch.input_ids is not None
    assert batch.rollout_logp is not None
    assert batch.loss_weight is not None
    assert c.token_id == int(batch.input_ids[row, c.position])
    assert c.logp == float(batch.logp[row, column])
    assert c.rollout_logp == float(batch.rollout_logp[row, column])
    assert c.log_ratio == pytest.approx(math.log(50), abs=0.1)
    assert c.sequence_log_ratio == pytest.approx(float((batch.logp - batch.rollout_logp)[row].sum()), abs=1e-5)
    assert c.loss_weight == float(batch.loss_weight[row, column])
    assert c.advantage == -1.0


def test_capped_ratio_gives_the_norm_that_is_told() -> None:
    """What TIS would have made of the step, beside a step that is trained with it."""
    m = made()
    told = m.localize().controls["tis"]
    batch = m.batches[m.planted[0]]
    assert batch.loss_weight is not None
    assert batch.rollout_logp is not None
    at = (m.planted[1], m.planted[2] - 1)
    ratio = float((batch.logp - batch.rollout_logp)[at].exp())
    own = dict(gradients(m))[m.planted]
    capped = [w - (1 - told["weights"][0] / ratio) * g for w, g in zip(m.gradient, own, strict=True)]
    assert told["grad_norm"] == pytest.approx(length_of(capped), rel=1e-3)


# -- the bank -------------------------------------------------------------------------------------------------------


def bank_cases() -> list[Any]:
    """Every fault at every size, on models in turn."""
    found: list[Any] = []
    for fault, (_, sizes) in bank.FAULTS.items():
        for size in sizes:
            spec = bank.Spec(fault, bank.MODELS[len(found) % len(bank.MODELS)], 7 + len(found), size)
            found.append(pytest.param(spec, id=spec.name))
    return found


def left_out(case: bank.Case, token: Place) -> float:
    """1 - |G without the token| / |G|, exact."""
    m = Made(case.model, case.batches, token)
    batch = case.batches[token[0]]
    assert batch.replay is not None
    assert batch.loss_weight is not None
    at = (token[1], token[2] - 1)
    own = torch.autograd.grad(batch.replay()[at] * batch.loss_weight[at], m.trained)
    return 1 - length_of([w - g for w, g in zip(m.gradient, own, strict=True)]) / length_of(m.gradient)


def case_judged_rightly(case: bank.Case) -> None:
    incident = localize(case.batches, case.model)
    truth = case.truth
    named = {place(c) for c in incident.culprits}
    assert all(truth.guilty(*at) for at in named), (incident.verdict, incident.evidence)
    heavy = set()
    if truth.verdict == "A.1":
        heavy = {at for at in truth.tokens if abs(left_out(case, at)) >= 0.1}
        assert heavy <= named, incident.evidence
    if heavy or truth.verdict != "A.1":  # a token that changes nothing is no spike
        assert incident.verdict == truth.verdict, incident.evidence
    assert bool(named) == (incident.verdict != "D")
    if truth.verdict == "B":  # later tokens of the sequence look back at the guilty one and pull as hard, on little
        unproven = [c for c in incident.culprits if c.heterogeneity is None]
        assert all(abs(c.share) >= Thresholds().share for c in unproven)
    assert truth.where in " ".join(incident.evidence)
    assert Incident.from_json(incident.to_json()).to_json() == incident.to_json()


@pytest.mark.parametrize("spec", bank_cases())
def test_planted_fault_is_found_and_nobody_else_is_blamed(spec: bank.Spec) -> None:
    case_judged_rightly(bank.make(spec))


@pytest.mark.parametrize("seed", range(4))
def test_honest_step_has_no_culprit(seed: int) -> None:
    case = bank.make(bank.Spec("honest", bank.MODELS[seed], 40 + seed))
    incident = localize(case.batches, case.model)
    assert (incident.verdict, incident.culprits, incident.notes) == ("D", (), ())
    assert incident.completeness == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_two_tokens_of_one_sequence(kind: str) -> None:
    p = bank.plan(bank.Spec("ratios", kind, 7, 1e4))
    i, row = next((i, r) for i, a in enumerate(p.advantage) for r in range(len(a)) if float(a[r]) < -0.1)
    p.rollout[i][row, [3, 9]] -= math.log(1e4)
    p.truth = bank.Truth("A.1", tokens=frozenset((i, row, bank.PROMPT + column) for column in (3, 9)))
    case_judged_rightly(bank.finish(bank.Spec("ratios", kind, 7, 1e4), p))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_norms_of_an_enormous_gradient_are_finite(kind: str) -> None:
    case = bank.make(bank.Spec("ratio", kind, 3, 1e30))
    incident = localize(case.batches, case.model)
    assert incident.verdict == "A.1"
    assert incident.grad_norm > 1e20
    (culprit,) = incident.culprits
    assert culprit.grad_norm == pytest.approx(incident.grad_norm, rel=1e-3)
    assert culprit.norms is not None
    for norms in (incident.norms, culprit.norms):
        assert all(math.isfinite(x) for groups in norms.values() for x in groups.values())


# -- without a trace ------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its forwards in buffers: one written in place, one put anew."""

    def __init__(self, anew: bool = False) -> None:
        super().__init__()
        self.inner = tiny.model()
        self.anew = anew
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, **inputs: Any) -> Any:
        if self.anew:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return self.inner(**inputs)


# The attention kernels that may be chosen.
SDP: tuple[Any, ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


def trace(net: nn.Module) -> dict[str, Any]:
    """Everything that a training loop might miss afterwards."""
    generator: Any = np.random.get_state()
    hooks = [[(k, len(h)) for k, h in vars(m).items() if k.endswith("hooks")] for m in net.modules()]
    return {
        "parameters and buffers": tiny.fingerprint(net),
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone().tolist()) for p in net.parameters()],
        "order": [(n, id(p), p.data_ptr(), p.requires_grad, p._version) for n, p in net.named_parameters()],
        "buffers": [(n, id(b)) for n, b in net.named_buffers()],
        "training": [m.training for m in net.modules()],
        "hooks": hooks,
        "forward": [vars(m).get("forward") for m in net.modules()],
        "random": (torch.get_rng_state().tolist(), random.getstate(), generator[1].tobytes(), generator[2]),
        "modes": (
            torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(), *(enabled() for enabled in SDP),
        ),
    }  # fmt: skip


def mixed_modes(net: nn.Module) -> nn.Module:
    """In train mode, but for one layer."""
    net.train()
    next(m for m in net.modules() if isinstance(m, nn.ModuleList))[0].eval()
    return net


TRACED: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: mixed_modes(tiny.model(dropout=0.1)),
    "bf16, tied": lambda: mixed_modes(tiny.model(tied=True).bfloat16()),
    "counting": lambda: mixed_modes(Counting()),
    "counting anew": lambda: mixed_modes(Counting(anew=True)),
}


def traced(kind: str) -> Made:
    torch.manual_seed(0)
    net = TRACED[kind]()
    for p in list(net.parameters())[3:5]:
        p.requires_grad_(False)
    return made(net, state=True)


@pytest.mark.parametrize(
    "kind",
    list(TRACED),
)
@pytest.mark.parametrize("method", METHODS)
def test_no_trace_is_left(kind: str, method: Method) -> None:
    m = traced(kind)
    before = trace(m.net)
    incident = m.localize(method=method)
    assert trace(m.net) == before
    assert incident.attempts


@pytest.mark.parametrize("method", METHODS)
def test_random_numbers_that_replays_draw_are_given_back(method: Method) -> None:
    m = made(tiny.model(dropout=0.1).train(), state=False)
    before = trace(m.net)
    m.localize(method=method)
    assert trace(m.net) == before


class Failing:
    """A hook in the middle of the model that raises in the k-th forward from now on."""

    def __init__(self, net: nn.Module, k: int, error: Exception) -> None:
        self.left, self.error = k, error
        last = next(m for m in net.modules() if isinstance(m, nn.ModuleList))[-1]
        last.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left <= 0:
            raise self.error


@pytest.mark.parametrize("kind", ["qwen3", "bf16, tied", "counting"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [RuntimeError("planted"), torch.OutOfMemoryError("planted")], ids=["error", "oom"])
def test_no_trace_is_left_where_a_replay_fails(kind: str, method: Method, error: Exception) -> None:
    m = traced(kind)
    failing = Failing(m.net, 10**6, error)
    before = trace(m.net)
    for k in (1, 2, 3, 4, 5, 7):
        failing.left = k
        incident = m.localize(method=method)
        assert trace(m.net) == before, k
        assert survived(incident)
        assert failing.left > 0 or "planted" in told(incident)


def test_graph_of_the_loop_is_still_good() -> None:
    m = made()
    graph = logp_of(m.net, torch.arange(3, 12)[None]).sum()
    m.localize()
    graph.backward()  # type: ignore[no-untyped-call]


def test_interruption_is_let_through_and_leaves_no_trace() -> None:
    m = made()
    failing = Failing(m.net, 10**6, KeyboardInterrupt())  # type: ignore[arg-type]
    before = trace(m.net)
    failing.left = 3
    with pytest.raises(KeyboardInterrupt):
        m.localize()
    assert trace(m.net) == before


def test_localising_twice_gives_the_same() -> None:
    m = made(tiny.model(dropout=0.1).train(), state=True)
    first, second = (replace(m.localize(), seconds=0.0, time=0.0) for _ in range(2))
    assert first == second


def test_inside_of_the_loop_s_own_modes() -> None:
    m = made()
    plain = m.localize()
    for mode in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=False)):
        with mode:
            before = trace(m.net)
            incident = m.localize()
            assert trace(m.net) == before
        assert incident.culprits == plain.culprits


# -- bad input ------------------------------------------------------------------------------------------------------


def told(incident: Incident) -> str:
    """What the incident says of what could not be done."""
    return " ".join([*incident.notes, *(a.outcome for a in incident.attempts)])


def survived(incident: Incident) -> bool:
    assert incident.verdict in VERDICTS
    assert incident.evidence
    assert incident.advice
    assert incident.headline()
    text = incident.to_json()
    assert Incident.from_json(text).to_json() == text
    return True


def changed(m: Made, i: int = -1, **fields: Any) -> Made:
    m.batches[i] = replace(m.batches[i], **fields)
    return m


def spoiled(m: Made, field: str, value: float) -> Made:
    """The planted token's number is something else."""
    x: Tensor = getattr(m.batches[-1], field).clone()
    x[m.planted[1], m.planted[2] - 1] = value
    fields: dict[str, Any] = {field: x}
    return changed(m, **fields)


def empty_mask(m: Made) -> None:
    for i, b in enumerate(m.batches):
        changed(m, i, mask=torch.zeros_like(b.mask), loss_weight=torch.zeros_like(b.logp))


def no_weight(m: Made) -> None:
    for i, b in enumerate(m.batches):
        changed(m, i, loss_weight=torch.zeros_like(b.logp))


def zeroed(m: Made) -> None:
    for p in m.net.parameters():
        p.grad = torch.zeros_like(p)


def zero_advantages(m: Made) -> None:
    for i, b in enumerate(m.batches):
        changed(m, i, advantage=torch.zeros(len(b.logp), 1), loss_weight=torch.zeros_like(b.logp))
    zeroed(m)


def without_gradients(m: Made) -> None:
    m.net.zero_grad()


def without_replays(m: Made) -> None:
    for i in range(len(m.batches)):
        changed(m, i, replay=None)


def without_batches(m: Made) -> None:
    m.batches.clear()


def infinite_gradient(m: Made) -> None:
    m.trained[0].grad[0, 0] = math.inf  # type: ignore[index]


def refusing(m: Made) -> None:
    Failing(m.net, 1, ValueError("one forward a step is enough"))


def other_shape(m: Made) -> None:
    changed(m, replay=lambda: torch.zeros(1, 1, requires_grad=True))


def without_graph(m: Made) -> None:
    for i, b in enumerate(m.batches):
        changed(m, i, replay=partial(lambda logp: logp, b.logp))


# What is done to a step, and what its incident says.
BAD: dict[str, tuple[Callable[[Made], Any], str]] = {
    "empty mask": (empty_mask, "weight"),
    "no weight": (no_weight, "no token has a finite weight"),
    "zero gradient": (zeroed, "gradient is exactly zero"),
    "all advantages 0": (zero_advantages, "all advantages 0"),
    "no gradient": (without_gradients, "no parameter has a gradient"),
    "no replay": (without_replays, "has no replay"),
    "no batches": (without_batches, "token|micro-batch"),
    "refusing model": (refusing, "one forward a step is enough"),
    "other shape": (other_shape, r"gave (1, 1), logp has (2, 6)"),
    "replay without graph": (without_graph, "does not require grad|another forward|add up|no slope|does not depend"),
    "infinite gradient": (infinite_gradient, ""),
    "nan in logp": (lambda m: spoiled(m, "logp", math.nan), ""),
    "nan in the weight": (lambda m: spoiled(m, "loss_weight", math.nan), "weight"),
    "infinite weight": (lambda m: spoiled(m, "loss_weight", math.inf), "weight"),
    "nan in the rollout": (lambda m: spoiled(m, "rollout_logp", math.nan), ""),
    "infinite rollout": (lambda m: spoiled(m, "rollout_logp", math.inf), ""),
    "rollout of probability 0": (lambda m: spoiled(m, "rollout_logp", -math.inf), ""),
    "logp of probability 0": (lambda m: spoiled(m, "logp", -math.inf), ""),
    "no rollout": (lambda m: changed(m, rollout_logp=None), ""),
    "no weight recorded": (lambda m: changed(m, loss_weight=None), ""),
    "no ids, no advantage": (lambda m: changed(m, input_ids=None, advantage=None), ""),
}


@pytest.mark.parametrize("bad", list(BAD))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_bad_input_never_raises(bad: str, method: Method) -> None:
    m = made()
    BAD[bad][0](m)
    before = trace(m.net)
    incident = m.localize(method=method)
    assert survived(incident)
    assert trace(m.net) == before
    assert (incident.verdict == "N") == (bad in ("infinite gradient", "nan in the weight", "infinite weight"))


@pytest.mark.parametrize("bad", [name for name, (_, words) in BAD.items() if words])
def test_bad_input_is_named_in_words(bad: str) -> None:
    m = made()
    BAD[bad][0](m)
    incident = m.localize()
    words = BAD[bad][1]
    assert any(word in told(incident) for word in words.split("|")), (incident.notes, incident.attempts)
    assert incident.notes, incident.attempts


@pytest.mark.parametrize("corrupt", [1e10, 1e30])
@pytest.mark.parametrize("method", METHODS)
def test_enormous_ratio_is_found_by_every_method(corrupt: float, method: Method) -> None:
    m = made(corrupt=corrupt)
    incident = m.localize(method=method)
    assert survived(incident)
    assert incident.verdict == "A.1", told(incident)
    assert [place(c) for c in incident.culprits] == [m.planted]
    assert incident.culprits[0].share == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("logp", [-math.inf, -800.0])
def test_token_that_the_policy_cannot_give_is_silenced(logp: float) -> None:
    """A policy that masks a token which the rollout sampled: a ratio of 0, which the clip leaves without gradient."""
    m = made(corrupt=1.0)
    spoiled(spoiled(m, "logp", logp), "loss_weight", 0.0)
    incident = localize(m.batches, None)
    assert survived(incident)
    assert incident.verdict == "S"
    assert [place(c) for c in incident.culprits] == [m.planted]


def test_copy_of_the_parameters_that_finds_no_memory() -> None:
    m = made()

    class Small(ModelReplay):
        def movable(self) -> Any:
            raise torch.OutOfMemoryError("planted")

    incident = localize(m.batches, Small(m.net, m.batches))
    assert survived(incident)
    assert "planted" in told(incident)
    assert incident.method == "jvp"


@pytest.mark.parametrize("method", METHODS)
def test_masked_token_of_probability_0_harms_no_replay(method: Method) -> None:
    masks = [torch.ones(3, 8, dtype=torch.bool), torch.ones(2, 6, dtype=torch.bool)]
    masks[0][0, 2] = masks[1][0, 1] = False
    m = made(masks=masks)
    for i, b in enumerate(m.batches):
        assert b.replay is not None
        changed(m, i, replay=lambda own=b.replay, mask=b.mask: own().masked_fill(~mask, -math.inf))
    incident = m.localize(method=method)
    assert [place(c) for c in incident.culprits] == [m.planted]
    assert incident.culprits[0].grad_norm == pytest.approx(incident.grad_norm, rel=0.05)


def test_nothing_can_be_run_again() -> None:
    m = made()
    incident = localize(m.batches, None)
    assert survived(incident)
    assert incident.method == "ratios"
    assert incident.completeness is None
    assert any("known without" in note for note in incident.notes)
    assert (incident.verdict, [place(c) for c in incident.culprits]) == ("A.1", [m.planted])
    assert incident.sequences == ()  # shares that are not known are not drawn


def test_replay_protocol_is_all_that_a_replay_needs() -> None:
    m = made()
    replay: Replay = ModelReplay(m.net, m.batches)
    given, own = localize(m.batches, replay), m.localize()
    assert given.culprits == own.culprits


@pytest.mark.parametrize(
    "setting",
    [
        {"method": "best"},
        {"top_k": 0},
        {"top_k": 1.5},
        {"top_k": "a"},
        {"top_k": True},
        {"verified": 1.5},
        {"grad_scale": "1"},
        {"verified": -1},
        {"grad_scale": 0.0},
        {"grad_scale": -1.0},
        {"grad_scale": math.nan},
        {"grad_scale": math.inf},
    ],
    ids=str,
)
def test_impossible_setting(setting: dict[str, Any]) -> None:
    m = made()
    with pytest.raises(ValueError, match=rf"localize\({next(iter(setting))}="):
        m.localize(**setting)


def test_replay_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"localize\(replay='model'\): give the model"):
        localize(made().batches, "model")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_mask_of_numbers(dtype: torch.dtype) -> None:
    m = made()
    expected = m.localize()
    for i, b in enumerate(m.batches):
        changed(m, i, mask=b.mask.to(dtype))
    incident = m.localize()
    assert incident.culprits == expected.culprits
    assert incident.notes == ()


@pytest.mark.parametrize("name", [*vars(Thresholds())])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, True, "0.1"])
def test_impossible_threshold(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"thresholds\.{name}"):
        Thresholds(**{name: value})


@pytest.mark.parametrize("setting", [{"budget": 0}, {"found": 0}, {"spike": 0.0}, {"spike": math.nan}], ids=str)
def test_impossible_search(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bisection"):
        Bisection(**setting)


@pytest.mark.parametrize("top_k", [1, 3])
def test_no_more_than_top_k_are_named(top_k: int) -> None:
    case = bank.make(bank.Spec("advantage", "qwen3", 5, 300.0))
    incident = localize(case.batches, case.model, top_k=top_k)
    assert len(incident.culprits) == top_k
    assert incident.verdict == "W"


@pytest.mark.parametrize("verified", [0, 1, 3])
def test_no_more_than_asked_are_verified(verified: int) -> None:
    case = bank.make(bank.Spec("advantage", "qwen3", 5, 300.0))
    incident = localize(case.batches, case.model, verified=verified)
    assert sum(c.grad_norm is not None for c in incident.culprits) == verified
    assert incident.verdict == "W"


def test_what_a_control_leaves_is_exact_also_of_a_token_that_is_nearly_all_of_the_gradient() -> None:
    case = bank.make(bank.Spec("ratio", "qwen3", 2, 1e5))
    incident = localize(case.batches, case.model)
    worst = incident.culprits[0]
    assert incident.without_culprits is not None
    assert worst.log_ratio is not None
    assert incident.controls["icepop"]["grad_norm"] == pytest.approx(incident.without_culprits, rel=1e-3)
    i, row, position = place(worst)
    weight = torch.zeros_like(case.batches[i].logp)
    loss_weight = case.batches[i].loss_weight
    assert loss_weight is not None
    weight[row, position - 1] = loss_weight[row, position - 1] * (1 - 2 / math.exp(worst.log_ratio))
    ((_, gradient),) = ModelReplay(case.model, case.batches).backward(i, [{"logp": weight}])
    whole = [p.grad for p in case.model.parameters() if p.grad is not None]
    left = length_of([w - g for w, g in zip(whole, gradient, strict=True) if g is not None])
    assert incident.controls["tis"]["grad_norm"] == pytest.approx(left, rel=1e-2)
