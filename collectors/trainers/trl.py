"""TRL's GRPOTrainer (1.16; anything whose forward returns ``.log_probs``).

These places are listened to, all of them public:

* ``trainer.compute_loss`` is wrapped: it shows the loss's inputs, and for its duration a forward hook on the model that
  it is given sees the per-token log-probs. A tensor hook on those catches dL/dlogp in the trainer's own backward.
* ``accelerator.clip_grad_norm_`` is replaced: HF calls it once a step, also (with an infinite bound) where
  max_grad_norm is 0, and it is the last place where the gradients are whole. The replacement does the same operations
  on the same values.
* a callback marks the steps and passes on what the trainer logs; ``trainer.train`` tells it where it resumes from.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from seismograd.collectors.monitor import StepMonitor
from seismograd.collectors.shadow import DTYPES, shadow_logp
from seismograd.collectors.trainers import RunState
from seismograd.collectors.trainers.trl_callback import StepCallback
from seismograd.collectors.trainers.trl_forward import Forward, others_of
from seismograd.collectors.trainers.trl_loss import clip_specs, loss_kind, loss_masks
from seismograd.controls.trl_inputs import ControlledInputs
from seismograd.telemetry.forward_state import ForwardState
from seismograd.telemetry.hub import Hub
from seismograd.telemetry.patching import Patch
from seismograd.telemetry.records import TokenBatch

STATE_FILE = "seismograd.json"

_TOKEN_SIGNALS = "alpha, beta, SNR, clip cells, log-ratios, KL, loss_weight and deployed improvement"
_PROBE_SIGNALS = "alpha, beta, SNR, clip cells and deployed improvement"
_RATIO_SIGNALS = "alpha, SNR, log-ratios, KL and clip cells"
_GRADIENT_SIGNALS = "gradient norms, proportions and the detection of their spikes, and with them LayerClip"


class GRPOAdapter:
    """Listens to one GRPOTrainer.

    Args:
        trainer: a ``trl.GRPOTrainer``.
        run: kept in the callback, so that a second `watch` finds it.
        state: gives and takes the run's detection state, which is saved beside the trainer's checkpoints.
    """

    def __init__(self, trainer: Any, run: Any, state: RunState) -> None:
        self._trainer, self._run, self._state = trainer, run, state
        self._patches: list[Patch] = []
        self._callback: StepCallback | None = None
        self._active = False
        self._said: set[str] = set()
        self._generated_at: int | None = 0
        self._resumed_from: Path | None = None
        self._micro_batch = 0
        self._replays = True
        self._seen_tokens = self._seen_clip = False

    def attach(self, monitor: StepMonitor, hub: Hub) -> None:
        self._monitor, self._hub = monitor, hub
        self._active = True
        trainer = self._trainer
        accelerator: Any = getattr(trainer, "accelerator", None)
        if hasattr(trainer, "compute_loss"):
            self._compute_loss = trainer.compute_loss
            self._patches.append(Patch(trainer, "compute_loss", self._watched_compute_loss))
        else:
            self._lost(_TOKEN_SIGNALS, "the trainer has no compute_loss")
        clips_itself = _clips_itself(accelerator)
        if clips_itself:
            self._lost(_GRADIENT_SIGNALS, f"{clips_itself} reduces and clips gradients itself")
            self._lost(_PROBE_SIGNALS, f"{clips_itself} shards the model, and one rank cannot run a forward alone")
            self._seen_clip, self._replays = True, False
        elif hasattr(accelerator, "clip_grad_norm_"):
            self._clip_grad_norm = accelerator.clip_grad_norm_
            self._patches.append(Patch(accelerator, "clip_grad_norm_", self._watched_clip))
        else:
            self._lost(_GRADIENT_SIGNALS, "the trainer's accelerator has no clip_grad_norm_")
            self._seen_clip = True
        mixed = getattr(accelerator, "mixed_precision", "no")
        if mixed not in ("no", monitor.shadow):
            # The model's forward is wrapped in the trainer's own autocast, which would override the shadow's.
            fix = f", set shadow={mixed!r}" if mixed in DTYPES else ""
            self._lost(_PROBE_SIGNALS, f"a {monitor.shadow} shadow does not run in {mixed} training{fix}")
            self._replays = False
        if hasattr(trainer, "train"):
            self._train = trainer.train
            self._patches.append(Patch(trainer, "train", self._watched_train))
        self._callback = StepCallback(self, self._run)
        trainer.add_callback(self._callback)
        monitor.controls.skips = True

    def detach(self) -> None:
        self._active = False
        for patch in reversed(self._patches):
            patch.undo()
        self._patches.clear()
        if self._callback is not None:
            # A new list: the trainer may be walking through the old one, if a callback of the user's closes the run.
            handler = self._trainer.callback_handler
            handler.callbacks = [callback for callback in handler.callbacks if callback is not self._callback]
            self._callback = None

    # -- the trainer's step ---------------------------------------------------------------------------------------

    def step_begins(self, step: int) -> None:
        self._monitor.begin_step(step)
        self._micro_batch = 0
        with self._monitor.guard("clip_settings") as guard:
            self._monitor.clips = clip_specs(self._trainer)
            if not self._monitor.clips:
                loss = self._trainer.loss_type
                self._lost("clip cells", f"loss_type={loss!r} limits its ratio by no bound that they are defined for")
        if guard.failed:
            self._monitor.clips = ()
            self._lost("clip cells and tokens taken away by the clip", "the trainer's clip settings could not be read")
        with self._monitor.guard("adapter"):
            scaler = getattr(self._trainer.accelerator, "scaler", None)
            self._monitor.overflow_expected = scaler is not None and scaler.is_enabled()

    def before_optimizer(self) -> None:
        """The weights are about to move. A step whose clip was not seen has its tokens probed and judged here; its
        gradients are clipped by now, so their norms are not read."""
        self._monitor.before_optimizer(())
        with self._monitor.guard("adapter"):
            if self._monitor.controls.looks_on:
                self._say(
                    "looks on",
                    "layers are out of proportion, and LayerClip only looks on: it acts where max_grad_norm is above 0",
                )
            self._monitor.controls.withhold(list(self._trainer.model.parameters()))

    def after_optimizer(self) -> None:
        self._monitor.controls.give_back()

    def step_ends(self) -> None:
        self._monitor.end_step()
        if not self._seen_tokens:
            self._lost(
                _TOKEN_SIGNALS, "compute_loss ran no forward with grad that returns .log_probs (TRL's fused LM head)"
            )
        if not self._seen_clip:
            self._lost(_GRADIENT_SIGNALS, "the trainer did not call accelerator.clip_grad_norm_")

    def logged(self, step: int, logs: Mapping[str, Any]) -> None:
        self._monitor.log(step, logs)

    def training_begins(self, step: int) -> None:
        """Resuming from a checkpoint: take up the detection state that was saved beside it."""
        with self._monitor.guard("adapter"):
            # A second train() may go on with completions that the first one left: of unknown age.
            self._generated_at = step if self._generates_next() else None
        if step == 0:
            return
        with self._monitor.guard("checkpoint"):
            path = (self._resumed_from or self._checkpoint(step)) / STATE_FILE
            if path.is_file():
                self._state.load_state_dict(json.loads(path.read_text()))
            else:
                self._state.degraded(f"no detection state at {path}: baselines begin anew at step {step}")

    def saved(self, step: int) -> None:
        with self._monitor.guard("checkpoint"):
            folder = self._checkpoint(step)
            if self._trainer.accelerator.process_index == 0 and folder.is_dir():
                (folder / STATE_FILE).write_text(json.dumps(self._state.state_dict()))

    def training_ends(self) -> None:
        self._monitor.finish()
        # The script may end its W&B run right after, and the last rows belong in there.
        self._hub.flush(5.0)

    def _checkpoint(self, step: int) -> Path:
        return Path(self._trainer.args.output_dir) / f"checkpoint-{step}"

    # -- what is listened to --------------------------------------------------------------------------------------

    @functools.wraps(Trainer.train)
    def _watched_train(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("resume_from_checkpoint")
        self._resumed_from = Path(given) if isinstance(given, (str, os.PathLike)) else None
        return self._train(*args, **kwargs)

    def _watched_compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self._active and torch.is_grad_enabled() and model.training):
            return self._compute_loss(model, inputs, *args, **kwargs)
        seen: list[Forward] = []
        states: list[ForwardState] = []
        handles = []
        controlled = self._controlled(inputs)
        with self._monitor.guard("adapter"):
            handles.append(model.register_forward_pre_hook(partial(self._before_forward, states)))
            handles.append(
                model.register_forward_hook(partial(self._saw_forward, seen, states, controlled), with_kwargs=True)
            )
        try:
            given = inputs if controlled is None else controlled.inputs
            loss = self._compute_loss(model, given, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        with self._monitor.guard("adapter"):
            self._record(inputs, seen, controlled)
        return loss

    def _controlled(self, inputs: Mapping[str, Any]) -> ControlledInputs | None:
        """The inputs with what the controls of the loss change; None where none acts."""
        on = self._monitor.controls.acting
        if not on:
            return None
        with self._monitor.guard("adapter"):
            loss = loss_kind(self._trainer, shadowed=self._replays)
            controlled = ControlledInputs(inputs, self._monitor.controls.policy, sorted(on), loss)
            for name, reason in controlled.idle.items():
                self._say(name, f"{name} is on and does nothing: {reason}")
            self._monitor.controls.idle(controlled.idle)
            return controlled
        return None

    def _before_forward(self, states: list[ForwardState], model: nn.Module, _: Any) -> None:
        with self._monitor.guard("adapter"):
            states.append(ForwardState.take(self._trainer.accelerator.device))

    def _saw_forward(
        self,
        seen: list[Forward],
        states: list[ForwardState],
        controlled: ControlledInputs | None,
        _: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        log_probs = getattr(output, "log_probs", None)
        if not (isinstance(log_probs, Tensor) and log_probs.requires_grad):
            return
        start = sum(len(forward.log_probs) for forward in seen)
        with self._monitor.guard("adapter"):
            forward = Forward(args, dict(kwargs), states[-1] if states else None, log_probs, others_of(output))
            seen.append(forward)
            if controlled is not None:
                replay = partial(shadow_logp, self._trainer.model, forward.replays(self._trainer.model)["replay"])
                rows = slice(start, start + len(log_probs))
                controlled.forward_ran(rows, log_probs, partial(replay, self._monitor.shadow), self._monitor.guard)

    def _watched_clip(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self._active or args or kwargs.get("norm_type", 2) != 2 or _distributed(parameters):
            if self._active and _distributed(parameters):
                self._lost(_GRADIENT_SIGNALS, "the gradients are distributed tensors")
                self._seen_clip = True
            return self._clip_grad_norm(parameters, max_norm, *args, **kwargs)
        self._seen_clip = True
        self._trainer.accelerator.unscale_gradients()
        return self._monitor.clip(parameters, max_norm)

    # -- one micro-batch ------------------------------------------------------------------------------------------

    def _record(self, inputs: Mapping[str, Any], seen: Sequence[Forward], controlled: ControlledInputs | None) -> None:
        """Token batches of the forwards that one compute_loss made: one, or several chunks of its rows in order."""
        if controlled is not None:  # the ratio that is clipped is the one that the control has changed
            inputs = {**controlled.inputs, "advantages": inputs["advantages"]}
        start = 0
        for forward in seen:
            rows = slice(start, start + forward.log_probs.shape[0])
            start = rows.stop
            position = self._monitor.add(
                self._batch(inputs, forward, rows, {} if controlled is None else controlled.left_out)
            )
            self._seen_tokens = True
            if position is not None:
                forward.log_probs.register_hook(  # type: ignore[no-untyped-call]
                    partial(self._caught, position, None)
                )
                for name, output in forward.others.items():
                    if output.requires_grad:
                        output.register_hook(partial(self._caught, position, name))  # type: ignore[no-untyped-call]
        self._micro_batch += 1

    def _caught(self, position: int, name: str | None, gradient: Tensor) -> None:
        with self._monitor.guard("adapter"):
            scaler = getattr(self._trainer.accelerator, "scaler", None)
            scale = getattr(scaler, "_scale", None)
            weight = gradient.detach() if scale is None else gradient.detach() / scale
            if name is None:
                self._monitor.caught(position, weight)
            else:
                self._monitor.caught_other(position, name, weight)

    @torch.no_grad()
    def _batch(
        self, inputs: Mapping[str, Any], forward: Forward, rows: slice, controlled: Mapping[str, Tensor]
    ) -> TokenBatch:
        logp = forward.log_probs.detach()
        completion = inputs["completion_mask"][rows]
        width, length = completion.shape[1], logp.shape[1]

        def wide(x: Tensor | None) -> Tensor | None:
            """(b, C) of the completion to the (b, T-1) of its log-probs."""
            return None if x is None else F.pad(x[rows], (length - width, 0))

        trained = completion.bool()
        left_out: dict[str, Tensor] = {}
        if "tool_mask" in inputs:
            tool = inputs["tool_mask"][rows].bool()
            left_out["tool"] = F.pad(trained & ~tool, (length - width, 0))
            trained = trained & tool
        advantage: Any = inputs["advantages"]
        advantage = advantage[rows].unsqueeze(1) if advantage.dim() == 1 else wide(advantage)
        old, sampling = wide(inputs.get("old_per_token_logps")), wide(inputs.get("sampling_per_token_logps"))
        # TRL takes log-probs from a rollout engine as sampling_per_token_logps; without one, only its own recompute is
        # there. Without old_per_token_logps the PPO ratio is 1: its reference is the forward itself.
        engine = sampling is not None
        if not engine and old is None:
            self._lost(
                _RATIO_SIGNALS, "an on-policy trainer without a rollout engine keeps no log-probs to compare with"
            )
        mask = F.pad(trained, (length - width, 0))
        left_out |= {name: F.pad(flags[rows], (length - width, 0)) for name, flags in controlled.items()}
        left_out |= loss_masks(self._trainer, mask, logp, old, sampling, advantage, forward.others.get("entropy"))
        return TokenBatch(
            step=self._trainer.state.global_step + 1,
            micro_batch=self._micro_batch,
            rank=self._trainer.accelerator.process_index,
            input_ids=forward.kwargs.get("input_ids"),
            attention_mask=forward.kwargs.get("attention_mask"),
            temperature=float(getattr(self._trainer, "temperature", 1.0)),
            mask=mask,
            logp=logp,
            rollout_logp=sampling if engine else old,
            old_logp=(logp if old is None else old) if engine else None,
            advantage=advantage,
            left_out=left_out,
            staleness=self._staleness(),
            engine=engine,
            **(forward.replays(self._trainer.model) if self._replays else {}),
            state=forward.state,
        )

    def _staleness(self) -> int | None:
        """Optimizer steps since the completions in use were generated."""
        if getattr(self._trainer, "_step", None) is None:
            self._lost("alpha_floor", "the trainer has no _step that tells how old its completions are")
            return None
        step = int(self._trainer.state.global_step)
        if self._generates_next():
            self._generated_at = step
        return None if self._generated_at is None else max(0, step - self._generated_at)

    def _generates_next(self) -> bool:
        """Whether the micro-batch at hand is the first of newly generated completions."""
        period = self._trainer.args.steps_per_generation * self._trainer.num_iterations
        return bool(getattr(self._trainer, "_step", 0) % period == 0)

    def _lost(self, signals: str, reason: str) -> None:
        """Say once, loudly, what is not measured in this run and why."""
        self._say(signals, f"not measured in this run: {signals}; {reason}")

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._state.degraded(f"{message}. Training is not affected.")


def _clips_itself(accelerator: Any) -> str | None:
    """The name of a backend that clips outside of accelerator.clip_grad_norm_'s plain path, or None."""
    kind = getattr(getattr(accelerator, "distributed_type", None), "value", "NO")
    return kind if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU") else None


def _distributed(parameters: Sequence[Tensor]) -> bool:
    return any(p.grad is not None and type(p.grad).__name__ == "DTensor" for p in parameters)
