"""A watched run: the handle that `watch` returns."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from seismograd.collectors.monitor import StepMonitor
from seismograd.collectors.signals import SignalWorker
from seismograd.collectors.trainers import Adapter
from seismograd.collectors.trainers.plain import PlainLoop
from seismograd.protection import Protection
from seismograd.telemetry.detector import Detector
from seismograd.telemetry.faults import Faults, announce, warn
from seismograd.telemetry.hub import Hub
from seismograd.telemetry.records import Event, RunInfo, Spike


class _Part(Protocol):
    """What a saved state has a part of. Where that cannot be read it stays as it is."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Take up where the part left off."""

    def reset(self) -> None:
        """Begin anew."""


class Run:
    """One watched run. Closed by `close`, by ``with watch(...):``, or at the end of the process.

    Attributes:
        info: name, folder and settings.
        prometheus_url: of /metrics, or None.
    """

    def __init__(
        self,
        info: RunInfo,
        hub: Hub,
        worker: SignalWorker,
        detector: Detector,
        monitor: StepMonitor,
        faults: Faults,
        protection: Protection,
        prometheus_url: str | None,
        mute: bool = False,
    ) -> None:
        self._faults, self._mute, self._protection = faults, mute, protection
        self.info, self.prometheus_url = info, prometheus_url
        self._hub, self._worker, self._detector, self._monitor = hub, worker, detector, monitor
        self._adapter: Adapter | None = None
        self._closed = False
        # Holds no model and no optimizer: a sweep in one process may drop its runs without closing them.
        self._at_exit = partial(_close_at_exit, weakref.ref(self), hub, info.name, os.getpid())
        atexit.register(self._at_exit)

    def attach(self, adapter: Adapter) -> None:
        """Begin to listen. Called by `watch`, once."""
        self._adapter = adapter
        where = self.info.folder or "nowhere (see the warning above)"
        self._hub.event(Event("run_start", f"run {self.info.name} is written to {where}", data=dict(self.info.config)))
        metrics = "" if self.prometheus_url is None else f", metrics at {self.prometheus_url}"
        if not self._mute:
            announce(f"run {self.info.name} is written to {where}{metrics}")
        adapter.attach(self._monitor, self._hub)

    # -- where it is ----------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def folder(self) -> Path | None:
        """The run's folder, or None where it could not be made."""
        return None if self.info.folder is None else Path(self.info.folder)

    @property
    def store_path(self) -> Path | None:
        """The run store; read it with ``seismograd.RunStore.read``."""
        return None if self.folder is None else self.folder / "run.db"

    @property
    def spikes(self) -> tuple[Spike, ...]:
        """The gradient spikes of the step in progress, known once it has been clipped."""
        return self._monitor.spikes

    @property
    def controls(self) -> dict[str, str]:
        """The state of each control: off, observing, armed or on."""
        return {name: state.name.lower() for name, state in self._protection.states.items()}

    # -- the plain loop -------------------------------------------------------------------------------------------

    def step(self, number: int | None = None) -> AbstractContextManager[None]:
        """``with run.step():`` around one optimizer step: forward, backward, clip, ``optimizer.step()``.

        Args:
            number: the loop's own step number; counted from 1 where None.
        """
        return self._loop("step").step(number)

    def tokens(
        self,
        *,
        logp: Tensor,
        rollout_logp: Tensor | None = None,
        advantage: Tensor | None = None,
        mask: Tensor | None = None,
        input_ids: Tensor | None = None,
        replay: Callable[[], Tensor] | None = None,
        old_logp: Tensor | None = None,
        sequence: Tensor | None = None,
        staleness: Tensor | int | None = None,
        engine: bool = True,
        loss_scale: Tensor | float | None = None,
    ) -> None:
        """The tokens of one micro-batch, between its forward and its backward.

        Args:
            logp: (B, T-1) or packed (N,) log-probs of the training forward, in nats, with grad: the loss's dL/dlogp is
                caught from it.
            rollout_logp: same shape, as the rollout engine gave them.
            advantage: (B,), (B, 1) or the shape of `logp`.
            mask: the shape of `logp`, true where a token is trained; all where None.
            input_ids: (B, T) int64.
            replay: runs the same forward again and returns logp; needed for alpha, beta and all that follows from them.
                It runs after the step's last backward, so bind its batch: ``lambda batch=batch: ...``.
            old_logp: the PPO ratio's reference, where that is not `rollout_logp`.
            sequence: the shape of `logp`, int64: which sequence each token belongs to, for packed tokens.
            staleness: optimizer steps between the rollout's weights and this step's, (B,) or one int.
            engine: False where `rollout_logp` was recomputed in the training precision.
            loss_scale: what the loss is multiplied by before its backward (``scaler.get_scale()``).
        """
        self._loop("tokens").tokens(
            logp,
            loss_scale,
            rollout_logp=rollout_logp,
            advantage=advantage,
            mask=mask,
            input_ids=input_ids,
            replay=replay,
            old_logp=old_logp,
            sequence=sequence,
            staleness=staleness,
            engine=engine,
        )

    def clip_grad_norm_(self, max_norm: float, parameters: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` to the bit, with the detection before it, and LayerClip where it is on.

        Args:
            max_norm: of the global norm; ``math.inf`` reads the norms and clips nothing.
            parameters: the model's trained ones where None.

        Returns:
            The norm before clipping, a scalar tensor.
        """
        return self._loop("clip_grad_norm_").clip_grad_norm_(max_norm, parameters)

    # -- state and end --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Detection state and counters, JSON-serialisable, for a checkpoint of one's own; a trainer's has it
        already.
        """
        self._hub.settle(1.0)  # the last steps may still be with the worker
        return {
            "version": 1,
            "step": self._detector.state_dict(),
            "worker": self._worker.state_dict(),
            "controls": self._protection.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where `state_dict` left off. Parts that cannot be read begin anew, which is said in one line."""
        given: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        parts: dict[str, tuple[str, _Part]] = {
            "step": ("the detection in the step", self._detector),
            "worker": ("the signals and counters", self._worker),
            "controls": ("the controls", self._protection),
        }
        if given and "controls" not in given:  # of a version without them
            del parts["controls"]
        unread: dict[str, str] = {}
        anew: Sequence[str] = ()
        for name, (words, part) in parts.items():
            saved = given.get(name)
            try:
                if not isinstance(saved, Mapping) or not saved:
                    raise TypeError(name)
                anew = part.load_state_dict(saved) or ()
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
                part.reset()
                unread[name] = f"{words} ({type(e).__name__ if saved else 'missing'})"
        if unread:
            rest = "" if len(unread) == len(parts) else "; the rest is taken over"
            self.degraded(f"the saved state of {', '.join(unread.values())} cannot be read: they begin anew{rest}")
        if "controls" in parts and "controls" not in unread:
            self._taken_up(anew)

    def _taken_up(self, anew: Sequence[str]) -> None:
        """Say which controls are on by the saved state, and which layers it does not know."""
        for control, now in self.controls.items():
            if now == "on":
                reason = "taken up from the saved state"
                data = {"control": control, "before": "on", "after": "on", "reason": reason}
                self._hub.event(Event("control", f"{control} is on: {reason}", data=data))
        if anew:
            named = ", ".join(anew[:8]) + (f" and {len(anew) - 8} more" if len(anew) > 8 else "")
            self.degraded(f"the saved state knows no norms of these layers, so LayerClip warms up anew there: {named}")

    def degraded(self, message: str) -> None:
        """Say loudly that something is not measured, and why."""
        if not self._mute:
            warn(message)
        self._hub.event(Event("degraded", message))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything up to now has been written; False where a sink is still busy after `timeout`
        seconds.
        """
        return self._hub.flush(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Put the trainer back exactly as it was, write what is queued, close the sinks. Twice is once."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        with self._faults.fence("close"):
            if self._adapter is not None:
                self._adapter.detach()
        with self._faults.fence("close"):
            self._monitor.finish()
        _end(self._hub, self.info.name, timeout)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<seismograd.Run {self.info.name!r} in {self.info.folder!r}{' (closed)' if self._closed else ''}>"

    def _loop(self, method: str) -> PlainLoop:
        if not isinstance(self._adapter, PlainLoop):
            raise TypeError(
                f"run.{method}() is for plain loops; this run listens to a trainer, which needs no further call"
            )
        return self._adapter


def _end(hub: Hub, name: str, timeout: float = 10.0) -> None:
    hub.event(Event("run_end", f"run {name} ended"))
    if not hub.close(timeout):
        warn(f"a sink was still busy after {timeout:.0f} s and was left behind")


def _close_at_exit(run: weakref.ref[Run], hub: Hub, name: str, process: int) -> None:
    """A run nobody has closed, or nobody holds any more. Not in a forked child, which has none of our threads."""
    if os.getpid() != process:
        return
    held = run()
    if held is None:
        _end(hub, name)
    else:
        held.close()
