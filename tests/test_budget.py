"""Probes stay within their budget."""

from __future__ import annotations

import pytest

from seismograd.collectors.budget import ProbeBudget, Spacing


def run(budget: float, spacing: dict[str, Spacing], steps: int, cost: float) -> dict[str, list[int]]:
    """The steps at which each probe ran, of steps of one second and probes of `cost`."""
    plan = ProbeBudget(budget, spacing)
    ran: dict[str, list[int]] = {"shadow": [], "deployed": []}
    for step in range(1, steps + 1):
        for probe in ran:
            if (probe == "shadow" or step in ran["shadow"]) and plan.due(probe, step):
                plan.ran(probe, step)
                plan.spent(probe, cost)
                ran[probe].append(step)
        plan.trained(1.0)
    return ran


@pytest.mark.parametrize("cost", [0.001, 0.05, 0.5])
def test_all_probes_together_stay_within_the_budget(cost: float) -> None:
    ran = run(0.01, {}, 2000, cost)
    spent = cost * (len(ran["shadow"]) + len(ran["deployed"]))
    assert spent <= 0.01 * 2000 + cost  # the first one is on credit
    assert spent >= min(0.005 * 2000 - 2 * cost, 2 * 2000 * cost - cost)  # used, or run at every step


def test_first_probe_is_at_the_first_step() -> None:
    assert run(0.01, {}, 50, 0.1)["shadow"][0] == 1


def test_fixed_spacing() -> None:
    assert run(0.01, {"shadow": 3, "deployed": 0}, 10, 9.9) == {"shadow": [1, 4, 7, 10], "deployed": []}
    assert run(0.01, {"shadow": 1, "deployed": 1}, 4, 9.9)["deployed"] == [1, 2, 3, 4]


def test_budget_of_nothing() -> None:
    assert run(0.0, {}, 100, 0.001) == {"shadow": [], "deployed": []}


def test_ages() -> None:
    plan = ProbeBudget(0.01, {})
    assert plan.ages(5) == {}
    plan.ran("shadow", 3)
    assert plan.ages(5) == {"shadow": 2}
