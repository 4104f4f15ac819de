"""Whether a control acts: its state, what changes it, and for how long it stays on.

off ........ nothing is computed
observing .. what it would have done is a metric
armed ...... as observing, and a reason switches it on
on ......... it acts; where a reason switched it on, it is armed again `hold` steps after the last one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

Mode = Literal["off", "observe", "auto", "on"]
MODES: tuple[Mode, ...] = ("off", "observe", "auto", "on")


class State(IntEnum):
    """The value of ``control_state``."""

    OFF = 0
    OBSERVING = 1
    ARMED = 2
    ON = 3


_AT_FIRST: Mapping[str, State] = {
    "off": State.OFF,
    "observe": State.OBSERVING,
    "auto": State.ARMED,
    "on": State.ON,
}


@dataclass(frozen=True)
class Change:
    """A control changed its state.

    Args:
        control: its name.
        before, after: states.
        step: optimizer step.
        reason: a clause that goes on after the control's name and state.
    """

    control: str
    before: State
    after: State
    step: int
    reason: str

    @property
    def message(self) -> str:
        """One line."""
        return f"step {self.step}: {self.control} is {self.after.name.lower()}: {self.reason}"

    @property
    def data(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "control": self.control,
            "before": self.before.name.lower(),
            "after": self.after.name.lower(),
            "reason": self.reason,
        }


class Switch:
    """One control's state.

    Args:
        control: its name.
        mode: "auto" begins armed.
        hold: steps that it stays on after the last reason.
    """

    def __init__(self, control: str, mode: Mode, hold: int) -> None:
        self.control, self._mode, self._hold = control, mode, hold
        self.state = _AT_FIRST[mode]
        self._since = 0

    @property
    def on(self) -> bool:
        return self.state is State.ON

    def ask(self, step: int, reason: str) -> Change | None:
        """There is a reason to act: an armed control is switched on, one that is on stays so for longer."""
        self._since = step
        return self._to(State.ON, step, reason) if self.state is State.ARMED else None

    def renew(self, step: int) -> None:
        """It has acted: the hold begins anew."""
        self._since = step

    def tick(self, step: int) -> Change | None:
        """A step has been judged: hand back where the hold is over. Step numbers may begin anew."""
        if self._mode != "auto" or not self.on or 0 <= step - self._since < self._hold:
            return None
        if step < self._since:
            return self._to(State.ARMED, step, "the run's steps are counted anew, and it hands back")
        return self._to(State.ARMED, step, f"it had nothing to do for {self._hold} steps, and hands back")

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {"mode": self._mode, "state": self.state.name, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off; another mode begins anew."""
        if state["mode"] == self._mode:
            self.state, self._since = State[state["state"]], int(state["since"])

    def _to(self, state: State, step: int, reason: str) -> Change:
        change = Change(self.control, self.state, state, step, reason)
        self.state = state
        return change
