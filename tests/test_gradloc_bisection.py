"""Bisection, the published GradLoc and the fallback: what it finds, at what price, and what it cannot see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import bank
from seismograd.gradloc import Alone, Bisection, Incident, localize
from seismograd.gradloc.attribution import Step
from seismograd.gradloc.bisection import bisect
from seismograd.gradloc.replay import ModelReplay
from seismograd.gradloc.tokens import Tokens
from seismograd.gradloc.vectors import norm_of
from tests import tiny
from tests.test_gradloc import Made, gradients, length_of, logp_of, made, place, stepped

SEARCHES: dict[str, Callable[..., Bisection]] = {"default": Bisection, "published": Bisection.published}


def probes_of(incident: Incident) -> int:
    (attempt,) = [a for a in incident.attempts if a.method == "bisect"]
    return int(attempt.detail.split()[0])


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", bank.MODELS)
def test_planted_token_is_found(search: str, kind: str) -> None:
    case = bank.make(bank.Spec("ratio", kind, 5, 300.0, length=24))
    incident = localize(case.batches, case.model, method="bisect", bisection=SEARCHES[search]())
    assert incident.method == "bisect"
    assert {place(c) for c in incident.culprits} == case.truth.tokens
    assert incident.verdict == "A.1"
    assert incident.completeness is None  # norms do not add up to anything
    assert incident.parts == {}


@pytest.mark.parametrize("search", SEARCHES)
def test_price_of_one_culprit(search: str) -> None:
    """Each micro-batch once, then two halves at each level, and the culprit alone is not tried again."""
    m = made(sizes=((3, 9), (4, 17), (5, 14)), corrupt=1e4)
    incident = m.localize(method="bisect", bisection=SEARCHES[search]())
    assert [place(c) for c in incident.culprits] == [m.planted]
    weighty = 5 * 13
    assert 3 + 2 * math.floor(math.log2(weighty)) <= probes_of(incident) <= 3 + 2 * math.ceil(math.log2(weighty))
    (attempt,) = [a for a in incident.attempts if a.method == "bisect"]
    assert attempt.forwards == attempt.backwards == pytest.approx(probes_of(incident) / 3)
    # A share, an order of magnitude, of what attribution costs.
    assert attempt.forwards + attempt.backwards > 4 * 2.0


@pytest.mark.parametrize(
    "search",
    ["default", "published"],
)
def test_norms_it_gives_are_the_tokens_own(search: str) -> None:
    m = made()
    step, replay = stepped(m)
    shares, _ = bisect(step, replay, SEARCHES[search]())
    assert shares is not None
    (found,) = np.flatnonzero(shares.tokens)
    t = step.tokens
    at = (int(t.batch[found]), int(t.row[found]), int(t.column[found]) + 1)
    assert at == m.planted
    own = length_of(dict(gradients(m))[at])
    assert shares.tokens[found] == pytest.approx(own / length_of(m.gradient), rel=1e-4)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7, 10])
def test_budget_is_kept(budget: int) -> None:
    m = made(sizes=((3, 9), (4, 17), (5, 14)))
    incident = m.localize(method="bisect", bisection=Bisection(budget=budget))
    assert probes_of(incident) <= budget


def test_search_that_ran_out_of_its_budget_says_so() -> None:
    m = made(sizes=((3, 9), (4, 17), (5, 14)))
    incident = m.localize(method="bisect", bisection=Bisection(budget=6))
    assert incident.method == "ratios"  # and what is said comes from those
    said = [*incident.notes, *(a.outcome + a.detail for a in incident.attempts)]
    assert any("budget" in text for text in said), said


def test_several_culprits_are_all_found_and_the_published_search_stays_in_one_micro_batch() -> None:
    case = bank.make(bank.Spec("ratios8", "gpt2", 3, 300.0, length=24))
    assert len({at[0] for at in case.truth.tokens}) == 2
    ours = localize(case.batches, case.model, method="bisect", bisection=Bisection(budget=400))
    published = localize(case.batches, case.model, method="bisect", bisection=Bisection.published(400))
    assert {place(c) for c in ours.culprits} <= case.truth.tokens
    assert len({c.micro_batch for c in ours.culprits}) == 2
    assert len({c.micro_batch for c in published.culprits}) <= 1


def test_search_ends_after_as_many_as_asked() -> None:
    case = bank.make(bank.Spec("ratios8", "gpt2", 3, 300.0, length=24))
    step, replay = stepped(Made(case.model, case.batches, (0, 0, 0)))
    shares, _ = bisect(step, replay, Bisection(found=1))
    assert shares is not None
    assert np.count_nonzero(shares.tokens) == 1


def with_nan() -> Made:
    """One token's backward, and no number of its own, is not finite."""
    m = made(corrupt=1.0)
    place = (1, m.planted[1], m.planted[2] - 1)
    ids = m.batches[1].input_ids
    assert ids is not None

    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logp: torch.Tensor) -> torch.Tensor:
            return logp.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            bad = torch.zeros_like(gradient)
            bad[place[1:]] = math.inf
            return gradient + gradient * bad.where(gradient != 0, 0)

    def replay() -> torch.Tensor:
        return Root.apply(logp_of(m.net, ids))  # type: ignore[no-any-return, no-untyped-call]

    m.batches[1] = replace(m.batches[1], replay=replay)
    weight = m.batches[1].loss_weight
    assert weight is not None
    (replay() * weight).sum().backward()  # type: ignore[no-untyped-call]
    return m


def test_nan_of_a_backward_is_found_by_bisection_and_not_by_the_published_one() -> None:
    m = with_nan()
    replay = ModelReplay(m.net, m.batches)
    step = Step(m.batches, Tokens.of(m.batches), norm_of(list(replay.gradient)), 1.0, Alone())
    assert not math.isfinite(step.norm)
    shares, _ = bisect(step, replay, Bisection())
    assert shares is not None
    (found,) = np.flatnonzero(~np.isfinite(shares.tokens))
    assert (int(step.tokens.row[found]), int(step.tokens.column[found]) + 1) == m.planted[1:]
    shares, _ = bisect(step, replay, Bisection.published())
    assert shares is not None
    assert np.isfinite(shares.tokens).all()
    assert not shares.tokens.any()


@pytest.mark.parametrize("method", ["auto", "bisect", "attribution"])
def test_nan_of_a_backward_is_named(method: Any) -> None:
    m = with_nan()
    incident = m.localize(method=method)
    assert (incident.verdict, incident.method) == ("N", "nonfinite")
    assert [place(c) for c in incident.culprits] == [m.planted]
    assert any("its backward made the NaN" in sentence for sentence in incident.evidence)


@pytest.mark.parametrize("method", ["jvp", "attribution", "bisect"])
def test_each_method_alone_tries_nothing_else(method: Any) -> None:
    m = made()
    incident = m.localize(method=method)
    assert incident.method == method
    assert {a.method for a in incident.attempts} == {method, "verification"}
    assert [place(c) for c in incident.culprits] == [m.planted]


def test_attribution_asks_for_two_forwards_and_jvp_for_one() -> None:
    m = made()
    forwards = [0]

    def count(*_: Any) -> None:
        forwards[0] += 1

    m.net.register_forward_pre_hook(count)
    passes = {}
    for method in ("attribution", "jvp", "bisect"):
        forwards[0] = 0
        incident = m.localize(method=method, verified=0)
        passes[method] = forwards[0] / len(m.batches)
        assert sum(a.forwards for a in incident.attempts) == pytest.approx(passes[method])
    assert passes["attribution"] == 2
    assert passes["jvp"] == 1
    assert passes["bisect"] >= 4


def test_where_attribution_and_jvp_fail_bisection_is_tried() -> None:
    torch.manual_seed(0)
    net = tiny.model().train()
    m = made(net)

    class Stuck(ModelReplay):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                raise RuntimeError("this forward needs a graph")
            return super().forward(*args, **kwargs)

    incident = localize(m.batches, Stuck(net, m.batches))
    assert [a.method for a in incident.attempts if a.method != "verification"] == ["attribution", "jvp", "bisect"]
    assert [a.believed for a in incident.attempts][:3] == [False, False, True]
    assert incident.method == "bisect"
    assert [place(c) for c in incident.culprits] == [m.planted]


@pytest.mark.parametrize("search", SEARCHES)
def test_step_without_a_culprit_gives_none(search: str) -> None:
    case = bank.make(bank.Spec("honest", "qwen3", 2))
    incident = localize(case.batches, case.model, method="bisect", bisection=SEARCHES[search]())
    assert (incident.verdict, incident.culprits) == ("D", ())
