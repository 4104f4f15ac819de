"""When probes may run: so often that what all of them cost together stays within the overhead budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Spacing = Literal["auto"] | int

PROBES = ("shadow", "deployed", "geometry", "weights")

_PARTS = {"shadow": 2.0, "deployed": 1.0, "geometry": 1.0, "weights": 1.0}
"""Of the budget, among the probes that are on "auto"."""

_AS_SHADOWS = {"deployed": 1.0, "geometry": 6.0}
"""What a run is taken to cost before the first one, in shadow forwards: the deployed probe is one, and geometry is a
forward and two backwards in the training's precision."""


@dataclass
class _Account:
    spent: float = 0.0
    runs: int = 0
    last: int | None = None
    running: bool = False
    """It has run, and what that took is not known yet."""


class ProbeBudget:
    """Spaces the probes. Each that is on "auto" has a fixed part of the budget.

    A probe is due once its part of the time trained so far covers what it has spent and one more run at its mean cost.
    The first probe runs at the first step, on credit, so that its signals are there from the beginning; a probe whose
    cost nothing tells (`weights`, or where the shadow is off) as well.

    Args:
        budget: share of step time that all probes together may take, e.g. 0.01.
        spacing: by probe: "auto", or every k-th step, or 0 for never. Probes that it does not name are on "auto".
    """

    def __init__(self, budget: float, spacing: Mapping[str, Spacing]) -> None:
        self._spacing: dict[str, Spacing] = {probe: spacing.get(probe, "auto") for probe in PROBES}
        parts = sum(_PARTS[probe] for probe, value in self._spacing.items() if value == "auto")
        self._share = {probe: budget * _PARTS[probe] / parts if parts else 0.0 for probe in PROBES}
        self._trained, self._steps = 0.0, 0
        self._accounts = {probe: _Account() for probe in PROBES}

    def due(self, step: int) -> frozenset[str]:
        """The probes that run at this step. The deployed one starts from a shadow: it brings one along where its own
        spacing is fixed, and waits for one where it is on "auto".
        """
        due = {probe for probe in PROBES if self._due(probe, step)}
        if "deployed" in due and self._spacing["deployed"] != "auto":
            due.add("shadow")
        return frozenset(due if "shadow" in due else due - {"deployed"})

    def ran(self, probe: str, step: int) -> None:
        """The probe has run at this step; what it took is booked when it is known."""
        self._accounts[probe].last, self._accounts[probe].running = step, True

    def spent(self, probe: str, seconds: float, ended: bool = True) -> None:
        """Book the time of one run of a probe, or of its first part where it has not `ended` with that."""
        account = self._accounts[probe]
        account.spent, account.runs = account.spent + seconds, account.runs + ended
        account.running = account.running and not ended

    def trained(self, seconds: float) -> None:
        """Book one training step."""
        self._trained, self._steps = self._trained + seconds, self._steps + 1

    def ages(self, step: int) -> dict[str, int]:
        """Steps since each probe's last run; probes that never ran are left out.

        0 where the step's number lies before that run's: a loop may count anew.
        """
        return {probe: max(0, step - a.last) for probe, a in self._accounts.items() if a.last is not None}

    def spacings(self) -> dict[str, float]:
        """Steps from one run of each probe to the next: as set, or what its mean cost, its part of the budget and the
        mean step come to. Probes that are off, or whose cost is not known yet, are left out.
        """
        found: dict[str, float] = {}
        for probe, spacing in self._spacing.items():
            cost = self._cost(probe)
            if spacing != "auto":
                found[probe] = float(spacing)
            elif cost is not None and self._share[probe] * self._trained > 0:
                found[probe] = max(1.0, cost / (self._share[probe] * self._trained / self._steps))
        if self._spacing["deployed"] == "auto" and "shadow" in found and "deployed" in found:
            found["deployed"] = max(found["deployed"], found["shadow"])  # which it waits for
        return {probe: steps for probe, steps in found.items() if steps > 0}

    def _due(self, probe: str, step: int) -> bool:
        spacing, account, share = self._spacing[probe], self._accounts[probe], self._share[probe]
        if spacing != "auto":
            return spacing > 0 and (step - 1) % spacing == 0
        if share <= 0:
            return False
        cost = self._cost(probe)
        if cost is None:
            waits = probe in _AS_SHADOWS and self._spacing["shadow"] != 0
            return account.last is None and not waits
        return account.spent + cost * (1 + account.running) <= share * self._trained

    def _cost(self, probe: str) -> float | None:
        """Seconds that a run takes, or None where nothing tells."""
        account, shadow = self._accounts[probe], self._accounts["shadow"]
        if account.runs:
            return account.spent / account.runs
        if probe in _AS_SHADOWS and shadow.runs:
            return _AS_SHADOWS[probe] * shadow.spent / shadow.runs
        return None
