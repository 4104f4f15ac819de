"""What GRPOTrainer's loss takes away, by its own settings and formulas (TRL 1.16, ``GRPOTrainer._compute_loss``)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seismograd.controls.trl_inputs import LossKind
from seismograd.telemetry.records import ClipSpec


def clip_specs(trainer: Any) -> tuple[ClipSpec, ...]:
    """How the trainer's loss limits its ratios, from its settings (TRL 1.16, GRPOTrainer._compute_loss)."""
    specs = []
    args = trainer.args
    if trainer.loss_type == "cispo":
        specs.append(ClipSpec("ppo", math.inf, trainer.epsilon_high - 1, "cap", _level(trainer)))
    elif trainer.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        specs.append(
            ClipSpec(
                "ppo", trainer.epsilon_low, trainer.epsilon_high, "clip", _level(trainer), getattr(args, "delta", None)
            )
        )
    corrected = getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_importance_sampling_correction", False)
    if corrected and trainer.loss_type != "vespo":  # which puts these ratios into its own sequence weight
        scope, kind = trainer.vllm_importance_sampling_mode.split("_")
        low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        specs.append(
            ClipSpec(
                "importance",
                math.inf if low is None else 1 - low,
                math.inf if high is None else high - 1,
                "mask" if kind == "mask" else "truncate",
                "sequence_sum" if scope == "sequence" else "token",
            )
        )
    return tuple(specs)


def loss_kind(trainer: Any, shadowed: bool) -> LossKind:
    """What the controls of the loss have to know of it.

    Args:
        trainer: a GRPOTrainer.
        shadowed: whether a shadow forward can be run.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    own = type(trainer)._compute_loss is GRPOTrainer._compute_loss
    corrected = getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_importance_sampling_correction", False)
    return LossKind(own, _level(trainer) == "token", bool(corrected), trainer.loss_type == "vespo", shadowed)


def loss_masks(
    trainer: Any,
    mask: Tensor,
    logp: Tensor,
    old: Tensor | None,
    sampling: Tensor | None,
    advantage: Tensor,
    entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Trained tokens that the loss's own masks leave out, (b, T-1) bool by reason, by the trainer's own formulas."""
    found = {}
    threshold = getattr(trainer, "off_policy_mask_threshold", None)
    if threshold is not None:
        rollout = sampling if sampling is not None else (logp if old is None else old)
        keep = trainer.get_off_policy_mask(
            advantages=advantage,
            per_token_logps=logp,
            sampling_per_token_logps=rollout,
            mask=mask,
            off_policy_threshold=threshold,
        )
        found["off_policy"] = mask & ~keep.bool()
    quantile = getattr(trainer, "top_entropy_quantile", 1.0)
    # The trainer's threshold is taken over all ranks; with more than one it is not repeated here.
    if quantile < 1.0 and entropy is not None and trainer.accelerator.num_processes == 1 and mask.any():
        bound = torch.quantile(entropy[mask].float(), 1 - quantile)
        found["entropy"] = mask & (entropy < bound)
    return found


def _level(trainer: Any) -> Any:
    return "sequence_mean" if trainer.importance_sampling_level == "sequence" else "token"
