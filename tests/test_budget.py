"""Probes stay within their budget, and the choice is known."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from seismograd.collectors.budget import PROBES, ProbeBudget, Spacing

COSTS = {"shadow": 1.0, "deployed": 1.0, "geometry": 6.0, "weights": 0.1}
"""As they are to each other."""


def run(
    plan: ProbeBudget, steps: int, costs: Mapping[str, float], late: int = 0, seconds: float = 1.0
) -> dict[str, list[int]]:
    """The steps at which each probe ran, of steps of `seconds`; what one takes is known `late` steps later."""
    ran: dict[str, list[int]] = {probe: [] for probe in PROBES}
    unknown: list[tuple[int, str]] = []
    for step in range(1, steps + 1):
        for probe in plan.due(step):
            plan.ran(probe, step)
            ran[probe].append(step)
            unknown.append((step, probe))
        for at, probe in [x for x in unknown if x[0] + late <= step]:
            plan.spent(probe, costs[probe])
            unknown.remove((at, probe))
        plan.trained(seconds)
    return ran


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("scale", [0.0005, 0.01, 0.1])
def test_all_probes_together_stay_within_the_budget(scale: float, late: int) -> None:
    costs = {probe: scale * cost for probe, cost in COSTS.items()}
    ran = run(ProbeBudget(0.01, {}), 4000, costs, late)
    spent = {probe: costs[probe] * len(steps) for probe, steps in ran.items()}
    credit = costs["shadow"] + costs["weights"]  # first runs
    assert sum(spent.values()) <= 0.01 * 4000 + credit
    for probe, part in {"shadow": 0.004, "deployed": 0.002, "geometry": 0.002, "weights": 0.002}.items():
        assert spent[probe] <= part * 4000 + costs[probe]
        assert spent[probe] >= min(part * 4000, 4000 * costs[probe]) - 3 * costs[probe]  # used, or run at every step
    assert set(ran["deployed"]) <= set(ran["shadow"])


def test_probes_that_are_off_leave_their_part_to_the_others() -> None:
    only: dict[str, Spacing] = {"deployed": 0, "geometry": 0, "weights": 0}
    ran = run(ProbeBudget(0.01, only), 2000, dict.fromkeys(PROBES, 0.1))
    assert len(ran["shadow"]) == pytest.approx(0.01 * 2000 / 0.1, abs=2)
    assert ran["geometry"] == ran["deployed"] == ran["weights"] == []


def test_first_probes_are_at_the_first_step() -> None:
    ran = run(ProbeBudget(0.01, {}), 1, dict.fromkeys(PROBES, 0.1))
    assert ran == {"shadow": [1], "weights": [1], "deployed": [], "geometry": []}
    alone = run(ProbeBudget(0.01, {"shadow": 0}), 50, dict.fromkeys(PROBES, 1.0))
    assert alone["geometry"] == [1]  # no shadow tells what it would cost
    assert alone["deployed"] == []


def test_a_probe_s_first_cost_is_guessed_from_the_shadow_s() -> None:
    """Geometry is taken for 6 shadows until it has run: 0.6 s, of which 0.002 s a step go to it."""
    ran = run(ProbeBudget(0.01, {}), 1000, {**dict.fromkeys(PROBES, 0.1), "geometry": 1.0})
    assert ran["geometry"] == [pytest.approx(0.6 / 0.002, abs=2)]


def test_fixed_spacing() -> None:
    costs = dict.fromkeys(PROBES, 9.9)
    fixed: dict[str, Spacing] = {"shadow": 3, "deployed": 0, "geometry": 5, "weights": 0}
    assert run(ProbeBudget(0.01, fixed), 10, costs) == {
        "shadow": [1, 4, 7, 10], "deployed": [], "geometry": [1, 6], "weights": [],
    }  # fmt: skip
    every: dict[str, Spacing] = dict.fromkeys(PROBES, 1)
    assert run(ProbeBudget(0.0, every), 4, costs) == {probe: [1, 2, 3, 4] for probe in PROBES}
    brought = run(ProbeBudget(0.01, {"deployed": 5, "shadow": 0}), 6, costs)
    assert brought["shadow"] == brought["deployed"] == [1, 6]


def test_budget_of_nothing() -> None:
    assert run(ProbeBudget(0.0, {}), 100, dict.fromkeys(PROBES, 0.001)) == {probe: [] for probe in PROBES}


@pytest.mark.parametrize("seconds", [4.0, 20.0])
def test_spacings_are_those_of_the_runs(seconds: float) -> None:
    """What is told is what happens, wherever it is not every step."""
    plan = ProbeBudget(0.01, {"weights": 7})
    ran = run(plan, 4000, COSTS, seconds=seconds)
    told = plan.spacings()
    assert told["weights"] == 7
    for probe in ("shadow", "deployed", "geometry"):
        later = ran[probe][len(ran[probe]) // 2 :]
        seen = (later[-1] - later[0]) / (len(later) - 1)
        assert seen == pytest.approx(told[probe], rel=0.1)


def test_spacings_that_nothing_tells() -> None:
    plan = ProbeBudget(0.01, {"geometry": 0, "weights": 3})
    assert plan.spacings() == {"weights": 3}
    plan.trained(1.0)
    assert plan.spacings() == {"weights": 3}
    plan.spent("shadow", 0.001)
    assert plan.spacings() == {"shadow": 1.0, "deployed": 1.0, "weights": 3}


def test_a_run_in_two_parts_is_one() -> None:
    plan = ProbeBudget(0.01, {"shadow": 0, "deployed": 0, "geometry": 0})
    plan.trained(1.0)
    plan.spent("weights", 0.02, ended=False)
    assert plan.spacings() == {}
    plan.spent("weights", 0.02)
    assert plan.spacings() == {"weights": pytest.approx(4.0)}


def test_ages() -> None:
    plan = ProbeBudget(0.01, {})
    assert plan.ages(5) == {}
    plan.ran("shadow", 3)
    assert plan.ages(5) == {"shadow": 2}
    assert plan.ages(1) == {"shadow": 0}
