"""The plain PyTorch loop: the user says where a step begins and what its tokens are."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from seismograd.collectors.monitor import StepMonitor
from seismograd.collectors.trainers import RunState
from seismograd.collectors.trainers.plain_batch import Inputs, idle_batch, token_batch
from seismograd.telemetry.forward_state import ForwardState
from seismograd.telemetry.hub import Hub
from seismograd.telemetry.records import ClipSpec


class PlainLoop:
    """Listens to a loop that calls `step`, `tokens` and `clip_grad_norm_`.

    Args:
        model: the trained model.
        optimizer: or None; with it, norms are read and spikes found also in steps that do not clip.
        clips: how the loop's loss limits its ratios.
        run: is told what cannot be measured.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, clips: Sequence[ClipSpec], run: RunState) -> None:
        self._model, self._optimizer, self._clips, self._run = model, optimizer, tuple(clips), run
        self._said: set[str] = set()
        self._handles: list[RemovableHandle] = []
        self._steps = 0
        self._micro_batch = 0
        self._active = False
        self._clipped: set[int] = set()  # ids of the parameters that this step has clipped
        self._unclipped = _Repeats()
        self._last_replay: tuple[Any, ...] = ()
        self._state: ForwardState | None = None  # of the last training forward that no tokens have come of yet
        self._inputs: Inputs | None = None  # of that forward, while the step has no tokens

    @property
    def parameters(self) -> list[Tensor]:
        """Those that are trained: the model's with requires_grad."""
        return [p for p in self._model.parameters() if p.requires_grad]

    def attach(self, monitor: StepMonitor, hub: Hub) -> None:
        self._monitor, self._active = monitor, True
        monitor.clips = self._clips
        self._handles.append(self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        if self._optimizer is not None:
            # Wrappers such as Accelerate's keep the optimizer itself inside.
            inner: Any = getattr(self._optimizer, "optimizer", self._optimizer)
            if isinstance(inner, Optimizer):
                self._handles.append(inner.register_step_pre_hook(self._before_optimizer))
                self._handles.append(inner.register_step_post_hook(lambda *_: self._monitor.controls.give_back()))
                monitor.controls.skips = True
            else:
                self._run.degraded(
                    f"optimizer={type(inner).__name__} is no torch.optim.Optimizer: steps that do not call "
                    "run.clip_grad_norm_() have no gradient norms"
                )

    def detach(self) -> None:
        """The loop may go on with its calls: they do what torch does, and nothing else."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """Around one optimizer step. An exception of the loop's own passes through, and the step is not recorded."""
        if not self._active:
            yield
            return
        with self._monitor.guard("adapter"):
            self._steps = self._steps + 1 if number is None else operator.index(number)
            self._micro_batch, self._state, self._inputs = 0, None, None
            self._clipped.clear()
            self._monitor.begin_step(self._steps)
        try:
            yield
        except BaseException:
            self._monitor.abandon()
            raise
        with self._monitor.guard("adapter"):
            if self._monitor.uncaught:
                self._say(
                    "backward",
                    "not measured where no backward followed run.tokens(): loss_weight and what follows from it. Call "
                    "it between a micro-batch's forward and its backward, with the log-probs that the loss uses",
                )
            if not self._clipped and self._optimizer is None:
                self._say(
                    "unread",
                    "gradient norms, spikes in them and probes need run.clip_grad_norm_() or watch(optimizer=...), and "
                    "this loop has neither",
                )
        self._monitor.end_step()

    def tokens(self, logp: Tensor, loss_scale: Tensor | float | None, **given: Any) -> None:
        """See `seismograd.Run.tokens`."""
        if not self._active:
            return
        with self._monitor.guard("tokens"):
            if not self._monitor.collecting:
                self._say(
                    "tokens",
                    "run.tokens() was called outside of `with run.step():`, or after the step's clip: these tokens are "
                    "not recorded",
                )
                return
            self._monitor.overflow_expected = loss_scale is not None
            if given["replay"] is None:
                self._say(
                    "replay",
                    "not measured without run.tokens(replay=...): alpha, beta, SNR, clip cells and deployed "
                    "improvement",
                )
            if logp.dim() == 1 and given["sequence"] is None:
                self._say(
                    "sequence",
                    "not measured for packed tokens without run.tokens(sequence=...): what is summed or averaged by "
                    "sequence",
                )
            elif self._shares_variables(given["replay"]):
                self._say(
                    "late",
                    "the replays of a step's micro-batches share their variables, so all would run the last one's: "
                    "bind them, as in replay=lambda batch=batch: ...; they are not used",
                )
                given["replay"] = None
            if not _fits(given["input_ids"], logp):
                self._say(
                    "ids",
                    f"run.tokens(input_ids=...) has shape {tuple(given['input_ids'].shape)}, where logp has "
                    f"{tuple(logp.shape)}: each row needs one id more than log-probs. Incidents name positions only",
                )
                given["input_ids"] = None
            batch = token_batch(self._steps, self._micro_batch, logp, state=self._state, **given)
            self._state = self._inputs = None
            position = self._monitor.add(batch)
            self._micro_batch += 1
            if position is not None and logp.requires_grad:
                logp.register_hook(  # type: ignore[no-untyped-call]
                    partial(self._caught, position, loss_scale)
                )

    def clip_grad_norm_(self, max_norm: float, parameters: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """See `seismograd.Run.clip_grad_norm_`."""
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        chosen = self.parameters if parameters is None else list(parameters)
        if not (self._active and self._watches(chosen)):
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm)
        self._stand_in()
        return self._monitor.clip(chosen, max_norm)

    def finish(self) -> None:
        self._monitor.finish()

    def _watches(self, chosen: Sequence[Tensor]) -> bool:
        """Whether these are the parameters that the run watches; says so where they are not."""
        with self._monitor.guard("adapter"):
            if not self._monitor.in_step:
                self._say("outside", "run.clip_grad_norm_() was called outside of `with run.step():`: not recorded")
                return False
            ids = set(map(id, chosen))
            if not ids.intersection(map(id, self._model.parameters())):
                self._say("foreign", "run.clip_grad_norm_() was given parameters of another model: not recorded")
                return False
            if self._clipped and not ids <= self._clipped:
                self._say(
                    "parts",
                    "parameters are clipped in several parts: gradient norms and their spikes are those of the part "
                    "that a step clips first, and LayerClip knows and clips no other",
                )
            self._clipped |= ids
        return True

    def _caught(self, position: int, scale: Tensor | float | None, gradient: Tensor) -> None:
        with self._monitor.guard("tokens"):
            weight = gradient.detach() if scale is None else gradient.detach() / scale
            self._monitor.caught(position, weight if weight.dim() > 1 else weight.unsqueeze(0))

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._monitor.collecting and torch.is_grad_enabled() and model.training:
            with self._monitor.guard("adapter"):
                self._state = ForwardState.take(next(model.parameters()).device)
                self._inputs = (args, kwargs) if self._micro_batch == 0 and _several() else None

    def _stand_in(self) -> None:
        """Where this rank has no tokens in the step, its last forward can be run again when the others run theirs."""
        inputs, self._inputs = self._inputs, None
        if inputs is not None and self._monitor.collecting:
            with self._monitor.guard("adapter"):
                self._monitor.add(idle_batch(self._steps, self._model, inputs, self._state))

    def _shares_variables(self, replay: Any) -> bool:
        """Whether the step's replay before was the same function of the same variables."""
        code = getattr(replay, "__code__", None)
        if code is None:
            return False
        cells = tuple(map(id, getattr(replay, "__closure__", None) or ()))
        mine = (code, cells, tuple(map(id, replay.__defaults__ or ())))
        shared, self._last_replay = self._micro_batch > 0 and mine == self._last_replay, mine
        return shared

    def _before_optimizer(self, optimizer: Any, *_: Any) -> None:
        if not self._monitor.in_step:
            with self._monitor.guard("adapter"):
                self._say("step", "optimizer.step() was called outside of `with run.step():`: not recorded")
            return
        self._stand_in()
        # A fused optimizer takes the loss scale out itself, in its step.
        self._monitor.before_optimizer(self.parameters, getattr(optimizer, "grad_scale", None))
        with self._monitor.guard("adapter"):
            if self._monitor.controls.looks_on:
                self._say(
                    "looks on",
                    "layers are out of proportion, and LayerClip only looks on: it acts in run.clip_grad_norm_() "
                    "with a finite max_norm",
                )
            self._monitor.controls.withhold(self.parameters)
            if not self._clipped and self._unclipped.seen(self._monitor.grad_norm):
                self._say(
                    "clipped",
                    f"the gradient norm is {self._monitor.grad_norm:.4g} step after step: the loop seems to clip "
                    "before it is read. Clip with run.clip_grad_norm_(max_norm), which is torch's to the bit",
                )

    def _say(self, what: str, message: str) -> None:
        """Say once, loudly, what is not measured and why."""
        if what not in self._said:
            self._said.add(what)
            self._run.degraded(f"{message}. Training is not affected.")


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _fits(ids: Any, logp: Tensor) -> bool:
    """Whether column p of input_ids is the token whose log-prob stands at p - 1."""
    rows = logp.shape if logp.dim() > 1 else (1, *logp.shape)
    return ids is None or tuple(ids.shape) == (rows[0], rows[1] + 1)


class _Repeats:
    """Notices the same norm time after time, which no gradient has that nobody has clipped."""

    def __init__(self) -> None:
        self._last, self._times = math.nan, 0

    def seen(self, norm: float | None) -> bool:
        """Whether `norm` has come eight times in a row, to 5 digits. Torch's clip divides by norm + 1e-6."""
        if norm is None:
            return False
        alike = norm > 0 and math.isclose(norm, self._last, rel_tol=1e-5)
        self._last, self._times = norm, self._times + 1 if alike else 1
        return self._times >= 8
