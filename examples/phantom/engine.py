"""The rollout engine: a copy of the weights, as old as its last sync, that samples in its own precision."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from phantom.policy import Policy


@dataclass(frozen=True)
class Rollout:
    """What an engine returns.

    Args:
        ids: (B, P+C) prompts and completions, padded after EOS.
        logp: (B, C) log-probs of the sampled tokens, as the engine had them when it sampled.
        mask: (B, C) bool, true up to and including EOS.
        length: (B,) completion tokens.
    """

    ids: Tensor
    logp: Tensor
    mask: Tensor
    length: Tensor


class Engine:
    """Samples with a KV cache at temperature 1.

    Its matrix products are in its precision; between them it is float32, as autocast is. So at equal weights it rounds
    exactly as the shadow forward does. (An engine that is BF16 throughout, as vLLM is, rounds the residual stream too;
    that part of its gap no shadow under autocast sees, and it stands in alpha.)

    Args:
        policy: whose model is copied.
        dtype: of its matrix products.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self._policy, self._dtype = policy, dtype
        self._model = copy.deepcopy(policy.model).eval().requires_grad_(False)
        # What autocast would round at each product is rounded once. The head is tied to the embedding, which stays.
        for module in self._model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.to(dtype)

    @torch.no_grad()
    def sync(self, model: PreTrainedModel) -> None:
        """Take over the trainer's present weights."""
        for mine, theirs in zip(self._model.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def sample(self, prompts: Tensor, group: int, limit: int, generator: torch.Generator) -> Rollout:
        """`group` completions of each (N, P) prompt, of at most `limit` tokens."""
        ids = prompts.repeat_interleave(group, 0)
        given, cache, columns, masks = ids, None, [], []
        ended = torch.zeros(len(ids), dtype=torch.bool)
        with torch.autocast("cpu", dtype=self._dtype, cache_enabled=False):
            for _ in range(limit):
                out = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                logp = torch.log_softmax(out.logits[:, -1].float(), -1)
                token = torch.multinomial(logp.exp(), 1, generator=generator)
                columns.append(logp.gather(-1, token).squeeze(-1))
                masks.append(~ended)
                given = torch.where(ended[:, None], self._policy.pad, token)
                ids = torch.cat([ids, given], 1)
                ended = ended | (token.squeeze(-1) == self._policy.eos)
                if ended.all():
                    break
        mask = torch.stack(masks, 1)
        return Rollout(ids, torch.stack(columns, 1), mask, mask.sum(1))
