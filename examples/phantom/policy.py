"""The policies: a small Qwen3 trained on the spot on made-up text, or SmolLM2-135M-Instruct, and prompts for either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, START, FIRST_WORD = 0, 1, 2, 4
WORDS, SUCCESSORS = 252, 12


@dataclass(frozen=True)
class Policy:
    """A model and what to ask it.

    Args:
        name: for the report.
        model: float32, attention as plain matrix products, so that the engine's cached forward and the trainer's full
            one round alike.
        prompts: (number of prompts, generator) to (N, P) token ids, all of one length.
        eos, pad: token ids.
        trained: how it was made, for the report.
    """

    name: str
    model: PreTrainedModel
    prompts: Callable[[int, torch.Generator], Tensor]
    eos: int
    pad: int
    trained: str


def completion_logp(model: PreTrainedModel, ids: Tensor, length: int) -> Tensor:
    """(B, T) token ids to (B, length) log-probs of the last `length` of them, float32."""
    logits = model(ids[:, :-1], logits_to_keep=length).logits.float()
    targets = ids[:, -length:, None]
    return logits.gather(-1, targets).squeeze(-1) - logits.logsumexp(-1)


class Text:
    """Sentences of a made-up language: after each word one of 12 others, by Zipf's law.

    Args:
        ends: probability that a word is the last, from the fifth on.
    """

    def __init__(self, ends: float) -> None:
        self._ends = ends
        grammar = torch.Generator().manual_seed(0)
        orders = [torch.randperm(WORDS, generator=grammar)[:SUCCESSORS] for _ in range(WORDS)]
        self._next = torch.stack(orders) + FIRST_WORD
        rank = torch.arange(1, SUCCESSORS + 1, dtype=torch.float32)
        self._weights = rank**-2.2

    def sentences(self, n: int, generator: torch.Generator, length: int) -> Tensor:
        """(n, length) token ids: START, words, EOS, PAD."""
        ids = torch.full((n, length), PAD)
        ids[:, 0] = START
        ids[:, 1] = torch.randint(FIRST_WORD, FIRST_WORD + WORDS, (n,), generator=generator)
        ended = torch.zeros(n, dtype=torch.bool)
        for t in range(2, length):
            word = ids[:, t - 1].clamp(min=FIRST_WORD) - FIRST_WORD
            chosen = torch.multinomial(self._weights, n, replacement=True, generator=generator)
            ends = (torch.rand(n, generator=generator) < self._ends) & (t > 4)
            ids[:, t] = torch.where(ended, PAD, torch.where(ends, EOS, self._next[word, chosen]))
            ended |= ends
        return ids


def small(seed: int, steps: int = 480, ends: float = 0.06, sentence: int = 32) -> Policy:
    """A Qwen3 of 0.4 million parameters, made and trained from the seed.

    Its embeddings start with a standard deviation of 2 and its last norm with a gain of 3: so it becomes peaked and its
    logits large (20 to 160), as those of large models are, and a BF16 ULP of a logit is up to 1. With the usual 0.02
    the same model has a mean |beta| of 0.006.

    Args:
        seed: of everything.
        steps: of its training.
        ends: see `Text`.
        sentence: tokens of a training sentence.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=FIRST_WORD + WORDS, hidden_size=64, intermediate_size=192, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.2, tie_word_embeddings=True,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=START, max_position_embeddings=128,
        attn_implementation="eager",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=2.0)
    torch.nn.init.constant_(model.model.norm.weight, 3.0)
    text, generator = Text(ends), torch.Generator().manual_seed(seed)
    rate = 1.5e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
        ids = text.sentences(32, generator, sentence)
        known = ids[:, 1:] != PAD
        loss = -(completion_logp(model, ids, sentence - 1) * known).sum() / known.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return Policy(
        "Qwen3, 0.4M parameters, 8 layers",
        model,
        lambda n, g: text.sentences(n, g, 5),
        EOS,
        PAD,
        f"{steps} steps on sentences of a made-up language, loss {float(loss.detach()):.2f} nats at the end",
    )


def smollm2() -> Policy:
    """SmolLM2-135M-Instruct out of a PyPI package, asked which of two numbers is larger: answers of two to many tokens.

    Raises:
        seismograd.demo.model.ModelMissing: the package is not installed; the message names the command.
    """
    from seismograd.demo.model import NAME, load
    from seismograd.demo.progress import console

    model, tokenizer = load(console())
    model.set_attn_implementation("eager")
    _apart_from_ties(model)

    def prompts(n: int, generator: torch.Generator) -> Tensor:
        pairs = torch.randint(10, 100, (n, 2), generator=generator).tolist()
        system = {"role": "system", "content": ""}  # else the template puts in one that is longer than the question
        asked = [[system, {"role": "user", "content": f"Is {a} more than {b}? Answer yes or no."}] for a, b in pairs]
        chats = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        return torch.tensor(chats)

    made = "as published, its 4-bit weights dithered by 2^-12"
    return Policy(NAME, model, prompts, tokenizer.eos_token_id, tokenizer.pad_token_id, made)


@torch.no_grad()
def _apart_from_ties(model: PreTrainedModel) -> None:
    """Move weights that were read from a 4-bit file a little (2^-12 of each), off the ties between two BF16 values.

    8% of them lie on one. There the smallest step decides how a weight is rounded, and all are pushed the way of the
    gradient: a first step of 3e-7 took mean |beta| from 0.035 to 0.76 nats. Weights as training leaves them lie on ties
    by chance only.
    """
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.mul_(1 + 2**-12 * torch.randn(weight.shape, generator=generator))
