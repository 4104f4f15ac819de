"""The plain PyTorch loop: the user says where a step begins and what its tokens are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from seismograd.collectors.monitor import StepMonitor
from seismograd.collectors.trainers import RunState
from seismograd.telemetry.hub import Hub
from seismograd.telemetry.records import ClipSpec, TokenBatch


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
        self._said_replay = False
        self._handles: list[RemovableHandle] = []
        self._steps = 0
        self._active = False

    @property
    def parameters(self) -> list[Tensor]:
        """Those that are trained: the model's with requires_grad."""
        return [p for p in self._model.parameters() if p.requires_grad]

    def attach(self, monitor: StepMonitor, hub: Hub) -> None:
        self._monitor, self._active = monitor, True
        monitor.clips = self._clips
        if self._optimizer is not None:
            # Wrappers such as Accelerate's keep the optimizer itself inside.
            inner: Any = getattr(self._optimizer, "optimizer", self._optimizer)
            if isinstance(inner, Optimizer):
                self._handles.append(inner.register_step_pre_hook(self._before_optimizer))
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
        self._steps = self._steps + 1 if number is None else number
        with self._monitor.guard("adapter"):
            self._monitor.begin_step(self._steps)
        yield
        self._monitor.end_step()

    def tokens(
        self,
        logp: Tensor,
        rollout_logp: Tensor | None,
        advantage: Tensor | None,
        mask: Tensor | None,
        input_ids: Tensor | None,
        replay: Callable[[], Tensor] | None,
        old_logp: Tensor | None,
        staleness: Tensor | int | None,
        engine: bool,
        loss_scale: Tensor | float | None,
    ) -> None:
        """See `seismograd.Run.tokens`."""
        if not self._active:
            return
        with self._monitor.guard("tokens"):
            self._monitor.overflow_expected = loss_scale is not None
            flat = logp.detach()
            batch = TokenBatch(
                step=self._steps,
                micro_batch=0,
                rank=0,
                mask=_shaped("mask", torch.ones_like(flat) if mask is None else mask, flat).bool(),
                logp=flat if flat.dim() > 1 else flat.unsqueeze(0),
                input_ids=input_ids,
                rollout_logp=_shaped("rollout_logp", rollout_logp, flat),
                old_logp=_shaped("old_logp", old_logp, flat),
                advantage=_advantage(advantage, flat),
                staleness=staleness,
                engine=engine,
                replay=None if replay is None else partial(_replayed, replay, flat.dim()),
            )
            if replay is None and not self._said_replay:
                self._said_replay = True
                self._run.degraded(
                    "not measured without run.tokens(replay=...): alpha, beta, SNR, clip cells and deployed improvement"
                )
            position = self._monitor.add(batch)
            if position is not None and logp.requires_grad:
                logp.register_hook(  # type: ignore[no-untyped-call]
                    partial(self._caught, position, loss_scale)
                )

    def clip_grad_norm_(self, max_norm: float, parameters: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """See `seismograd.Run.clip_grad_norm_`."""
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        chosen = self.parameters if parameters is None else list(parameters)
        return (
            self._monitor.clip(chosen, max_norm) if self._active else torch.nn.utils.clip_grad_norm_(chosen, max_norm)
        )

    def finish(self) -> None:
        self._monitor.finish()

    def _caught(self, position: int, scale: Tensor | float | None, gradient: Tensor) -> None:
        with self._monitor.guard("tokens"):
            weight = gradient.detach() if scale is None else gradient.detach() / scale
            self._monitor.caught(position, weight if weight.dim() > 1 else weight.unsqueeze(0))

    def _before_optimizer(self, *_: Any) -> None:
        self._monitor.before_optimizer(self.parameters)


def _shaped(name: str, x: Any, logp: Tensor) -> Any:
    """x checked against logp, (B, T-1) or packed (N,), and given a row where logp is packed."""
    if x is None:
        return None
    if x.shape != logp.shape:
        raise ValueError(
            f"run.tokens({name}=...) has shape {tuple(x.shape)}, logp has {tuple(logp.shape)}: "
            "give one value a predicted token"
        )
    return x.detach() if x.dim() > 1 else x.detach().unsqueeze(0)


def _advantage(x: Tensor | None, logp: Tensor) -> Tensor | None:
    if x is not None and logp.dim() > 1 and x.shape in ((logp.shape[0],), (logp.shape[0], 1)):
        return x.detach().reshape(-1, 1)
    shaped: Tensor | None = _shaped("advantage", x, logp)
    return shaped


def _replayed(replay: Callable[[], Tensor], dim: int) -> Tensor:
    logp = replay()
    return logp if dim > 1 else logp.unsqueeze(0)
