"""TRL's GRPOTrainer with what the demo needs: a BF16 engine's log-probabilities, and the planted faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.grpo_trainer import GRPOTrainer

from seismograd.demo.faults import Collapse, LayerFault, Planted, PlantedFault, PlantedLayer


class EngineGRPOTrainer(GRPOTrainer):
    """GRPO with rollout log-probabilities from a BF16 forward, as a BF16 engine beside an FP32 trainer gives them.

    They stand in both places that TRL has for them: ``old_per_token_logps``, the reference of the PPO ratio, and
    ``sampling_per_token_logps``, which says that an engine gave them.

    Args:
        fault: planted once, or None.
        layer_fault: planted once, or None.
        on_planted: called in the training thread with what was planted.
        args, kwargs: GRPOTrainer's.
    """

    def __init__(
        self,
        *args: Any,
        fault: PlantedFault | None = None,
        layer_fault: LayerFault | None = None,
        on_planted: Callable[[Planted | PlantedLayer], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if fault is not None and getattr(self.args, "delta", None) is not None:
            raise ValueError("GRPOConfig.delta caps the ratio, so that a planted fault shows nothing: leave it None")
        self.fault, self.layer_fault = fault, layer_fault
        self.planted: Planted | None = None
        self.planted_layer: PlantedLayer | None = None
        self._collapse: Collapse | None = None
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
        if self._collapse is not None:
            self._collapse.remove()
            self._collapse = None
        if not self._policy.training:
            return batch
        if self.planted_layer is None and self._due(self.layer_fault, step):
            batch = self._plant_layer(batch, step)
        elif self.planted is None and self._due(self.fault, step):
            batch = self._plant(batch, step)
        if batch["advantages"].any():
            self._steps_with_gradient.add(step)
        return batch

    def _due(self, fault: PlantedFault | LayerFault | None, step: int) -> bool:
        return fault is not None and step >= fault.step and len(self._steps_with_gradient - {step}) >= fault.after

    @property
    def _policy(self) -> nn.Module:
        assert self.model is not None  # the constructor needs one
        return self.model

    @property
    def faults(self) -> tuple[Planted | PlantedLayer, ...]:
        """Those that have been planted."""
        return tuple(fault for fault in (self.planted_layer, self.planted) if fault is not None)

    def _plant_layer(self, batch: dict[str, Any], step: int) -> dict[str, Any]:
        """The batch, the model hooked until the next one. The engine has the same fault, so that ratios stay near 1."""
        fault = self.layer_fault
        assert fault is not None
        weight = (batch["completion_mask"] * batch["advantages"].abs()[:, None]).sum(1)  # (B,)
        row = int(weight.argmax())
        if not weight[row] > 0:
            return batch
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        position = batch["prompt_ids"].shape[1] + int(batch["completion_mask"][row].sum()) // 2
        before = self._logp(batch)
        self._collapse = Collapse(self._policy, ids[row], position, fault)
        moved = self._logp(batch) - before
        tokenizer: Any = self.processing_class
        self.planted_layer = PlantedLayer(
            step=step, row=row, position=position, token=str(tokenizer.decode([int(ids[row, position])])),
            layer=fault.layer,
        )  # fmt: skip
        if self._on_planted is not None:
            self._on_planted(self.planted_layer)
        rollout = batch["sampling_per_token_logps"] + moved
        return {**batch, "old_per_token_logps": rollout, "sampling_per_token_logps": rollout.clone()}

    def _plant(self, batch: dict[str, Any], step: int) -> dict[str, Any]:
        """The batch with the fault in it, or as it is where no token fits. The buffered tensors are left alone."""
        fault = self.fault
        assert fault is not None
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
