"""A tiny real GRPOTrainer, without downloads, and a plain loop."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOTrainer

from benchmarks import small
from seismograd.collectors.budget import PROBES

EVERY_STEP = dict.fromkeys(PROBES, 1)
NO_PROBES = dict.fromkeys(PROBES, 0)


def model(dropout: float = 0.0, layers: int = 2, tied: bool = False) -> PreTrainedModel:
    """A random Qwen3 with logits as spread as a real one's."""
    return small.model(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, initializer_range=0.2, attention_dropout=dropout, tie_word_embeddings=tied,
    )  # fmt: skip


def reward(completions: list[str], **_: Any) -> list[float]:
    """Digits are good."""
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def trainer(
    folder: Path | str,
    steps: int = 4,
    cls: type[GRPOTrainer] = small.EngineTrainer,
    dropout: float = 0.0,
    net: PreTrainedModel | None = None,
    peft_config: Any = None,
    callbacks: Any = None,
    **config: Any,
) -> GRPOTrainer:
    """A trainer of `steps` steps; the same arguments give the same training, bit for bit."""
    torch.manual_seed(0)
    net = model(dropout) if net is None else net
    if config.get("beta"):  # the reference model is loaded by the trained one's path
        net.save_pretrained(Path(folder) / "reference")
        net.config._name_or_path = str(Path(folder) / "reference")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": steps,
        "seed": 1,
        "learning_rate": 1e-3,
    }
    return cls(
        model=net,
        args=small.settings(folder, **{**settings, **config}),
        train_dataset=small.prompts(64),
        processing_class=small.tokenizer(),
        reward_funcs=reward,
        peft_config=peft_config,
        callbacks=callbacks,
    )


def fingerprint(net: nn.Module) -> str:
    """Of all parameters and buffers, to the bit."""
    tensors = [*net.named_parameters(), *net.named_buffers()]
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def losses(watched: GRPOTrainer) -> list[tuple[Any, Any]]:
    """(loss, gradient norm) of each step, as the trainer logged them."""
    return [(log["loss"], log["grad_norm"]) for log in watched.state.log_history if "loss" in log]


class PlainModel(nn.Module):
    """Three tokens of context in, the next one's distribution out."""

    def __init__(self, vocabulary: int = 20, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)])
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) token ids to (B, T-1) log-probs of the tokens after the first."""
        x = self.embed(input_ids[:, :-1])
        for layer in self.layers:
            x = x + layer(x)
        return torch.log_softmax(self.lm_head(x).float(), -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
