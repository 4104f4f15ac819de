"""What small GRPO runs of the benchmarks and the tests are made of: nothing is downloaded, one token is a character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

_PAD, _EOS = 0, 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; decoding puts spaces between them."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *"0123456789abcdefghijklmnopqrstuvwxyz +-*/=?.,"]
    tok = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model(**config: Any) -> Qwen3ForCausalLM:
    """A Qwen3 for `tokenizer`, drawn from torch's global generator.

    Args:
        config: Qwen3Config's sizes.
    """
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer()), pad_token_id=_PAD, eos_token_id=_EOS, bos_token_id=None, **config
        )
    )  # fmt: skip


def prompts(count: int) -> Dataset:
    """So many sums."""
    return Dataset.from_list([{"prompt": f"{i}+{i + 1}=?"} for i in range(count)])


def settings(folder: Path | str, **config: Any) -> GRPOConfig:
    """Float32 on the CPU; logs every step, to nobody, and saves nothing.

    Args:
        folder: output_dir.
        config: GRPOConfig's, also in place of these.
    """
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    return GRPOConfig(**{**usual, **config})


class EngineTrainer(GRPOTrainer):  # type: ignore[misc]
    """Rollout log-probs come from a BF16 forward, as a BF16 engine would give them, so that every signal exists."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        attention = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        training = self.model.training
        self.model.eval()
        with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16):
            logp: Tensor = self._get_per_token_logps_and_entropies(
                self.model, ids, attention, out["completion_ids"].shape[1]
            )[0]
        self.model.train(training)
        out["old_per_token_logps"] = out["sampling_per_token_logps"] = logp.float()
        return out
