"""TokenClip, SeqClip and the clean ratio in TRL's GRPO loss, through the inputs that it takes anyway (TRL 1.16).

``GRPOTrainer._compute_loss`` runs its forward first and reads these inputs after it:

    advantages                  (B,) or (B, C); multiplies each token's term
    old_per_token_logps         (B, C); reference of the PPO ratio exp(logp - old)
    importance_sampling_ratio   (B, C) or (B, 1); multiplies each token's term where the engine's correction is on

So they are handed over as copies, and filled in when the forward has told logp. Three cases, by where the engine's
log-probs are in the loss:

    the PPO ratio compares with the engine (old is the engine's)     its excess is divided out of the advantage
    the importance ratio does (vLLM with its correction)             the ratio is replaced
    neither does                                                     the advantage is multiplied by the weight

The weights are constants of the step: no gradient passes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from seismograd.controls.policy import Policy
from seismograd.controls.seqclip import mis
from seismograd.controls.tokenclip import icepop, tis

_ADVANTAGES, _OLD, _ENGINE, _IMPORTANCE = (
    "advantages",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


class ControlledInputs:
    """One micro-batch's inputs with what the controls change.

    Args:
        inputs: as the trainer made them; left as they are.
        policy: the controls' settings.
        on: those that act, of "tokenclip", "seqclip" and "cleanratio".
        corrected: whether the loss multiplies by the importance ratio.
    """

    def __init__(self, inputs: Mapping[str, Any], policy: Policy, on: Collection[str], corrected: bool) -> None:
        self.inputs: dict[str, Any] = dict(inputs)
        self.left_out: dict[str, Tensor] = {}
        self._policy, self._corrected = policy, corrected
        engine, old = inputs.get(_ENGINE), inputs.get(_OLD)
        self._compares = engine is not None and old is not None and torch.equal(engine, old)
        self.idle = _idle(on, engine is not None, self._compares)
        self._on = [name for name in on if name not in self.idle]
        if not self._on:
            return
        completion = inputs["completion_mask"]
        trained = completion * inputs["tool_mask"] if "tool_mask" in inputs else completion
        self._trained: Tensor = trained.bool()
        advantages = inputs[_ADVANTAGES]
        wide = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        self.inputs[_ADVANTAGES] = wide.expand(trained.shape).clone()
        if self._compares:
            self.inputs[_OLD] = inputs[_OLD].clone()
        if self._corrected and "tokenclip" in self._on:
            self.inputs[_IMPORTANCE] = inputs[_IMPORTANCE].expand(trained.shape).clone()

    @torch.no_grad()
    def forward_ran(self, rows: slice, logp: Tensor, shadow: Callable[[], Tensor]) -> None:
        """Fill in the rows whose forward has run, before the loss reads them.

        Args:
            rows: of the micro-batch.
            logp: (b, T-1) nats, of the training forward.
            shadow: runs the same forward in the rollout's precision; (b, T-1).
        """
        if not self._on:
            return
        now = logp.detach().float()[:, -self._trained.shape[1] :]
        if "cleanratio" in self._on:
            beta = now - shadow()[:, -now.shape[1] :]
            self.inputs[_OLD][rows] += torch.where(self._trained[rows], beta, 0.0)
        old = self.inputs.get(_OLD)
        policy = now if old is None or self._compares else old[rows]
        reference = self.inputs[_OLD][rows] if self._compares else self.inputs[_ENGINE][rows]
        log_ratio = torch.where(self._trained[rows], policy - reference, 0.0)
        if "tokenclip" in self._on:
            self._clip_tokens(rows, log_ratio)
        if "seqclip" in self._on:
            settings = self._policy.seqclip
            kept = mis(log_ratio, self._trained[rows], settings.of, settings.low, settings.high)
            self.inputs[_ADVANTAGES][rows] *= kept
            self._leave_out("seqclip", rows, (kept == 0).expand(log_ratio.shape))

    def _clip_tokens(self, rows: slice, log_ratio: Tensor) -> None:
        settings = self._policy.tokenclip
        weight = (
            tis(log_ratio, settings.cap) if settings.method == "tis" else icepop(log_ratio, settings.low, settings.high)
        )
        if self._corrected:
            self.inputs[_IMPORTANCE][rows] = weight
        elif self._compares:
            # The loss has the whole ratio: what is left of it is the weight.
            left = (weight.log() - log_ratio.nan_to_num(nan=0.0)).exp()
            self.inputs[_ADVANTAGES][rows] *= torch.where(weight > 0, left, 0.0)
        else:
            self.inputs[_ADVANTAGES][rows] *= weight
        self._leave_out("tokenclip", rows, weight == 0)

    def _leave_out(self, control: str, rows: slice, flags: Tensor) -> None:
        whole = self.left_out.setdefault(control, torch.zeros_like(self._trained))
        whole[rows] = flags & self._trained[rows]


def _idle(on: Collection[str], engine: bool, compares: bool) -> dict[str, str]:
    """Those of `on` that have nothing to act on, and why."""
    found = {}
    for name in on:
        if not engine:
            found[name] = "there are no log-probs of a rollout engine to compare with (sampling_per_token_logps)"
        elif name == "cleanratio" and not compares:
            found[name] = "the PPO ratio compares two passes of the trainer, and has no precision gap in it"
    return found
