"""TokenClip, SeqClip and the clean ratio in TRL's GRPO loss, through the inputs that it takes anyway (TRL 1.16).

``GRPOTrainer._compute_loss`` runs its forward first and reads these inputs after it:

    advantages                  (B,) or (B, C); multiplies each token's term
    old_per_token_logps         (B, C); reference of the PPO ratio exp(logp - old)
    importance_sampling_ratio   (B, C) or (B, 1); multiplies each token's term where the engine's correction is on

So they are handed over as copies, and filled in when the forward has told logp. Where TokenClip acts, by where the
engine's log-probs are in the loss:

    the PPO ratio compares with the engine    old is moved, so that the ratio of a token beyond the bounds is the weight
    the importance ratio does                 it is lowered to the weight, never raised: the trainer's own bounds stay
    neither does                              the advantage is multiplied by the weight

The weights are constants of the step: no gradient passes through them. A subclass with a loss of its own may read its
inputs otherwise, so there all three do nothing and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
_NOTHING = 60.0  # nats: a ratio of exp(-60) is 0 beside any other, and finite where the loss sums log-ratios


@dataclass(frozen=True)
class LossKind:
    """What the controls have to know of the trainer's loss.

    Args:
        own: it is GRPOTrainer's, not a subclass's.
        by_token: its PPO ratio is that of a token, not of a sequence.
        corrected: it multiplies by the importance ratio.
        whole: it makes one weight of a sequence's importance ratios (vespo).
        shadowed: a shadow forward can be run.
    """

    own: bool = True
    by_token: bool = True
    corrected: bool = False
    whole: bool = False
    shadowed: bool = True


class ControlledInputs:
    """One micro-batch's inputs with what the controls change.

    Args:
        inputs: as the trainer made them; left as they are.
        policy: the controls' settings.
        on: those that act, of "tokenclip", "seqclip" and "cleanratio".
        loss: the trainer's.
    """

    def __init__(self, inputs: Mapping[str, Any], policy: Policy, on: Collection[str], loss: LossKind) -> None:
        self.inputs: dict[str, Any] = dict(inputs)
        self.left_out: dict[str, Tensor] = {}
        self._policy, self._loss = policy, loss
        engine, old = inputs.get(_ENGINE), inputs.get(_OLD)
        self._compares = engine is not None and old is not None and _alike(engine, old)
        self.idle = {name: reason for name in on if (reason := self._idle(name, engine is not None)) is not None}
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
        if loss.corrected and "tokenclip" in self._on:
            self.inputs[_IMPORTANCE] = inputs[_IMPORTANCE].expand(trained.shape).clone()

    @torch.no_grad()
    def forward_ran(
        self,
        rows: slice,
        logp: Tensor,
        shadow: Callable[[], Tensor],
        fence: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        """Fill in the rows whose forward has run, before the loss reads them.

        Args:
            rows: of the micro-batch.
            logp: (b, T-1) nats, of the training forward.
            shadow: runs the same forward in the rollout's precision; (b, T-1).
            fence: keeps a fault of one control from the others.
        """
        if not self._on:
            return
        now = logp.detach().float()[:, -self._trained.shape[1] :]
        if "cleanratio" in self._on:
            with fence("cleanratio"):
                beta = now - shadow()[:, -now.shape[1] :]
                self.inputs[_OLD][rows] += torch.where(self._trained[rows], beta, 0.0)
        old = self.inputs.get(_OLD)
        policy = now if old is None or self._compares else old[rows]
        reference = self.inputs[_OLD][rows] if self._compares else self.inputs[_ENGINE][rows]
        log_ratio = torch.where(self._trained[rows], policy - reference, 0.0)
        if "tokenclip" in self._on:
            with fence("tokenclip"):
                self._clip_tokens(rows, now, log_ratio)
        if "seqclip" in self._on:
            with fence("seqclip"):
                settings = self._policy.seqclip
                kept = mis(log_ratio, self._trained[rows], settings.of, settings.low, settings.high)
                self.inputs[_ADVANTAGES][rows] *= kept
                self._leave_out("seqclip", rows, (kept == 0).expand(log_ratio.shape))

    def _clip_tokens(self, rows: slice, now: Tensor, log_ratio: Tensor) -> None:
        settings = self._policy.tokenclip
        if settings.method == "tis":
            weight = tis(log_ratio, settings.cap)
        else:
            weight = icepop(log_ratio, settings.low, settings.high)
        ratio = log_ratio.nan_to_num(nan=0.0).exp()
        if self._loss.corrected:
            theirs = self.inputs[_IMPORTANCE][rows]
            # One ratio for a whole sequence is no token's: it is lowered by what the token is beyond the bounds.
            by_sequence = theirs.shape[1] > 1 and bool((theirs == theirs[:, :1]).all())
            left = torch.where(weight < ratio, weight / ratio, 1.0)
            self.inputs[_IMPORTANCE][rows] = theirs * left if by_sequence else torch.minimum(theirs, weight)
        elif self._compares:
            moved = now - weight.log().clamp(min=-_NOTHING)
            self.inputs[_OLD][rows] = torch.where(weight < ratio, moved, self.inputs[_OLD][rows])
        else:
            self.inputs[_ADVANTAGES][rows] *= weight
        self._leave_out("tokenclip", rows, weight == 0)

    def _leave_out(self, control: str, rows: slice, flags: Tensor) -> None:
        whole = self.left_out.setdefault(control, torch.zeros_like(self._trained))
        whole[rows] = flags & self._trained[rows]

    def _idle(self, name: str, engine: bool) -> str | None:
        """Why a control that is on has nothing that it could act on; None where it has."""
        if not engine:
            return "there are no log-probs of a rollout engine to compare with (sampling_per_token_logps)"
        if not self._loss.own:
            return "the trainer has a _compute_loss of its own, which may read its inputs otherwise"
        if name == "tokenclip" and self._compares and not self._loss.by_token:
            return 'with importance_sampling_level="sequence" no token has a ratio of its own (use seqclip)'
        if name == "tokenclip" and self._loss.corrected and self._loss.whole:
            return 'loss_type="vespo" makes one weight of all ratios of a sequence (use seqclip)'
        if name == "cleanratio" and not self._compares:
            return "the PPO ratio compares two passes of the trainer, and has no precision gap in it"
        if name == "cleanratio" and not self._loss.shadowed:
            return "no shadow forward can be run in this training"
        return None


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal, NaN in the same places included."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
