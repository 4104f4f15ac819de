"""TRL's GRPOTrainer with what the demo needs: a BF16 engine's log-probabilities, and one fault planted in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from trl.trainer.grpo_trainer import GRPOTrainer


@dataclass(frozen=True)
class PlantedFault:
    """One corrupted rollout log-probability, as a damaged transfer from the engine would leave it.

    Args:
        step: optimizer step, the first being 1, from which on it is planted: in the first batch with a fitting token.
        ratio: exp(logp - rollout_logp) of the token afterwards.
        advantage: "negative": PPO's minimum keeps ratio * advantage, whatever its size, and the gradient explodes.
            "positive": the minimum takes the clipped side, and the token's gradient is silenced.
        after: steps with a gradient that must have gone before, so that a detector knows what is usual.
    """

    step: int
    ratio: float = 1e4
    advantage: Literal["negative", "positive"] = "negative"
    after: int = 12

    def __post_init__(self) -> None:
        if not self.ratio > 1:
            raise ValueError(f"fault.ratio must be above 1, got {self.ratio!r}")
        if self.advantage not in ("negative", "positive"):
            raise ValueError(f"fault.advantage must be negative or positive, got {self.advantage!r}")


@dataclass(frozen=True)
class Planted:
    """Where a fault was planted.

    Args:
        step: optimizer step, the first being 1.
        row: of the micro-batch.
        position: column of input_ids (prompt and completion) of the predicted token.
        token: its text.
        advantage: of its sequence.
        logp: of the training forward, nats.
        rollout_logp: before and after, nats.
    """

    step: int
    row: int
    position: int
    token: str
    advantage: float
    logp: float
    rollout_logp: tuple[float, float]

    def sentence(self) -> str:
        """One line for people."""
        before, after = self.rollout_logp
        return (
            f"step {self.step}: planting the fault in row {self.row}, position {self.position}, token {self.token!r} "
            f"(advantage {self.advantage:+.2f}): its rollout log-prob {before:.2f} becomes {after:.2f}, "
            f"a ratio of {math.exp(self.logp - after):.3g}"
        )


class EngineGRPOTrainer(GRPOTrainer):
    """GRPO with rollout log-probabilities from a BF16 forward, as a BF16 engine beside an FP32 trainer gives them.

    They stand in both places that TRL has for them: ``old_per_token_logps``, the reference of the PPO ratio, and
    ``sampling_per_token_logps``, which says that an engine gave them.

    Args:
        fault: planted once, or None.
        on_planted: called in the training thread with what was planted.
        args, kwargs: GRPOTrainer's.
    """

    def __init__(
        self,
        *args: Any,
        fault: PlantedFault | None = None,
        on_planted: Callable[[Planted], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if fault is not None and getattr(self.args, "delta", None) is not None:
            raise ValueError("GRPOConfig.delta caps the ratio, so that a planted fault shows nothing: leave it None")
        self.fault = fault
        self.planted: Planted | None = None
        self._on_planted = on_planted
        self._steps_with_gradient: set[int] = set()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        device = batch["completion_ids"].device
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logp = self._logp(batch)
        batch["old_per_token_logps"] = logp
        batch["sampling_per_token_logps"] = logp.clone()
        return batch

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # TRL has shuffled and split the generated batch by now: this is what the step will see.
        batch: dict[str, Any] = super()._prepare_inputs(generation_batch)
        step = int(self.state.global_step) + 1
        fault = self.fault
        if fault is not None and self.planted is None and self._policy.training:
            if step >= fault.step and len(self._steps_with_gradient - {step}) >= fault.after:
                batch = self._plant(fault, batch, step)
            if batch["advantages"].any():
                self._steps_with_gradient.add(step)
        return batch

    @property
    def _policy(self) -> nn.Module:
        assert self.model is not None  # the constructor needs one
        return self.model

    def _plant(self, fault: PlantedFault, batch: dict[str, Any], step: int) -> dict[str, Any]:
        """The batch with the fault in it, or as it is where no token fits. The buffered tensors are left alone."""
        sign = -1.0 if fault.advantage == "negative" else 1.0
        fits = batch["completion_mask"].bool() & (sign * batch["advantages"] > 0)[:, None]  # (B, C)
        if not fits.any():
            return batch
        logp = self._logp(batch)  # (B, C)
        # The token with the most gradient to lose or to blow up: |d logp / d logits| grows with 1 - p.
        weight = batch["advantages"].abs()[:, None] * -torch.expm1(logp)
        row, column = divmod(int(weight.masked_fill(~fits, -1.0).argmax()), logp.shape[1])
        rollout = batch["sampling_per_token_logps"].clone()
        before = rollout[row, column].item()
        rollout[row, column] = logp[row, column] - math.log(fault.ratio)
        tokenizer: Any = self.processing_class
        self.planted = Planted(
            step=step,
            row=row,
            position=batch["prompt_ids"].shape[1] + column,
            token=str(tokenizer.decode([int(batch["completion_ids"][row, column])])),
            advantage=batch["advantages"][row].item(),
            logp=logp[row, column].item(),
            rollout_logp=(before, rollout[row, column].item()),
        )
        if self._on_planted is not None:
            self._on_planted(self.planted)
        return {**batch, "old_per_token_logps": rollout, "sampling_per_token_logps": rollout.clone()}

    def _logp(self, batch: dict[str, Any]) -> Tensor:
        """(B, C) float32 log-probabilities of the completion, 0 where it is padded. Draws no random number."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        policy, columns = self._policy, batch["completion_ids"].shape[1]
        with torch.no_grad(), _evaluating(policy):
            logp: Tensor = self._get_per_token_logps_and_entropies(policy, ids, mask, columns)[0]
        return logp.float().masked_fill(batch["completion_mask"] == 0, 0.0)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, so that dropout draws nothing; then each module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
