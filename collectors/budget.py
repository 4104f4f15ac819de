"""When probes may run: so often that all of them together stay within the overhead budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Spacing = Literal["auto"] | int

PROBES = ("shadow", "deployed")


@dataclass
class _Account:
    spent: float = 0.0
    runs: int = 0
    last: int | None = None


class ProbeBudget:
    """Spaces the probes. Each that is on "auto" has an equal share of the budget.

    A probe is due once its share of the time trained so far covers what it has spent and one more run at its mean cost.
    The first probe runs at the first step, on credit, so that its signals are there from the beginning.

    Args:
        budget: share of step time that all probes together may take, e.g. 0.01.
        spacing: by probe: "auto", or every k-th step, or 0 for never. Probes that it does not name are on "auto".
    """

    def __init__(self, budget: float, spacing: Mapping[str, Spacing]) -> None:
        self._spacing: dict[str, Spacing] = {probe: spacing.get(probe, "auto") for probe in PROBES}
        automatic = sum(value == "auto" for value in self._spacing.values())
        self._share = budget / automatic if automatic else 0.0
        self._trained = 0.0
        self._accounts = {probe: _Account() for probe in PROBES}

    def due(self, probe: str, step: int) -> bool:
        """Whether the probe runs at this step."""
        spacing, account = self._spacing[probe], self._accounts[probe]
        if spacing != "auto":
            return spacing > 0 and (step - 1) % spacing == 0
        deployed = self._spacing["deployed"]
        if probe == "shadow" and deployed != "auto" and self.due("deployed", step):
            return True  # which starts from it
        if self._share <= 0:
            return False
        # The deployed probe repeats the shadow's forward, so its cost is known before its first run.
        known = account if account.runs else self._accounts["shadow"]
        if not known.runs:
            return probe == "shadow" and account.last is None
        return account.spent + known.spent / known.runs <= self._share * self._trained

    def ran(self, probe: str, step: int) -> None:
        """The probe has run at this step; what it took is booked when it is known."""
        self._accounts[probe].last = step

    def spent(self, probe: str, seconds: float) -> None:
        """Book the time of one run of a probe."""
        account = self._accounts[probe]
        account.spent, account.runs = account.spent + seconds, account.runs + 1

    def trained(self, seconds: float) -> None:
        """Book one training step."""
        self._trained += seconds

    def ages(self, step: int) -> dict[str, int]:
        """Steps since each probe's last run; probes that never ran are left out.

        0 where the step's number lies before that run's: a loop may count anew.
        """
        return {probe: max(0, step - a.last) for probe, a in self._accounts.items() if a.last is not None}
