"""One run: GRPO in a plain loop on completions of an engine that is some steps behind, watched by seismograd."""

from __future__ import annotations

import copy
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from phantom.engine import Engine, Rollout
from phantom.policy import Policy, completion_logp
from phantom.variants import Variant
from seismograd import watch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SYNC_EVERY = 4
"""Steps between weight syncs: rollouts are 0, 1, 2, 3, 0, ... steps old."""


@dataclass(frozen=True)
class Setting:
    """Sizes of a run.

    Args:
        steps: optimizer steps.
        prompts: a step.
        group: completions a prompt.
        limit: tokens a completion.
        rate: learning rate of AdamW.
    """

    steps: int
    prompts: int
    group: int
    limit: int
    rate: float


def train(policy: Policy, variant: Variant, eps: float, seed: int, setting: Setting, runs: Path, name: str) -> Path:
    """Train a copy of the policy's model; the run's folder, with its store and rewards.json."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(policy.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate, weight_decay=0.0)
    engine = Engine(policy, DTYPES[variant.rollout])
    run = watch(
        model=model, optimizer=optimizer, runs=runs, name=name, clip=variant.clip(eps), shadow=variant.rollout,
        probes={"shadow": 1, "deployed": 1}, gradloc="off", sinks=(), text="none",
    )  # fmt: skip
    rewards = []
    for step in range(setting.steps):
        staleness = step % SYNC_EVERY
        if staleness == 0:
            engine.sync(model)
        rollout = engine.sample(policy.prompts(setting.prompts, generator), setting.group, setting.limit, generator)
        reward = -rollout.length.float()
        rewards.append(float(reward.mean()))
        advantage = group_advantage(reward, setting.group)
        with run.step():
            logp = _training_logp(model, rollout, variant)
            old_logp = rollout.logp
            shadow = _shadow_logp(model, rollout, variant) if variant.clean else None
            run.tokens(
                logp=logp,
                rollout_logp=rollout.logp,
                # A loop that clips the clean ratio says so by the reference that it clips against.
                old_logp=None if shadow is None else rollout.logp + (logp - shadow).detach(),
                advantage=advantage,
                mask=rollout.mask,  # nothing after EOS: a mask error looks exactly like the phenomenon
                staleness=staleness,
                replay=lambda rollout=rollout: _training_logp(model, rollout, variant),
                loss_scale=variant.scale,
            )
            per_token = variant.loss(logp, old_logp, advantage[:, None], shadow, eps)
            loss = (per_token * rollout.mask).sum() / rollout.mask.sum()
            (loss * variant.scale).backward()
            _unscale(model, variant.scale)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    assert run.folder is not None
    (run.folder / "rewards.json").write_text(json.dumps(rewards) + "\n")
    return run.folder


def group_advantage(reward: Tensor, group: int) -> Tensor:
    """(B,) rewards, groups side by side, to (B,) advantages: centred and scaled within their group (GRPO)."""
    by_group = reward.reshape(-1, group)
    centred = by_group - by_group.mean(1, keepdim=True)
    return (centred / (by_group.std(1, keepdim=True) + 1e-4)).reshape(-1)


def _training_logp(model: PreTrainedModel, rollout: Rollout, variant: Variant) -> Tensor:
    with _precision(variant.training):
        return completion_logp(model, rollout.ids, rollout.logp.shape[1])


@torch.no_grad()
def _shadow_logp(model: PreTrainedModel, rollout: Rollout, variant: Variant) -> Tensor:
    with _precision(variant.rollout):
        return completion_logp(model, rollout.ids, rollout.logp.shape[1])


def _precision(name: str) -> AbstractContextManager[object]:
    return nullcontext() if name == "fp32" else torch.autocast("cpu", dtype=DTYPES[name], cache_enabled=False)


def _unscale(model: PreTrainedModel, scale: float) -> None:
    if scale != 1.0:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
