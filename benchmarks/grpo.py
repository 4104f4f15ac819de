"""The workload: TRL's GRPOTrainer on a random Qwen3 of 12.6 million parameters, with BF16 rollout log-probs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

COMPLETIONS, TOKENS = 8, 64  # a step's batch: one group of completions, and the length of each
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class EngineTrainer(GRPOTrainer):  # type: ignore[misc]
    """Takes its rollout log-probs from a BF16 forward, as an engine would give them, so that every signal exists.

    Attributes:
        between: called before each step, outside of it.
    """

    between: Callable[[], None] | None = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self.between is not None:
            self.between()
        return super().get_batch_samples(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        attention = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            logp, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, attention, out["completion_ids"].shape[1]
            )
        out["old_per_token_logps"] = out["sampling_per_token_logps"] = logp.float()
        return out


LEAST = 14
"""Steps of the shortest run."""


class TimeLimit(TrainerCallback):  # type: ignore[misc]
    """Ends training after so many seconds, so that a busy machine gives fewer steps and not a longer wait.

    Not before `LEAST` steps: with fewer there is nothing to make a figure of.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._end = time.monotonic() + self._seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= time.monotonic() > self._end and state.global_step >= LEAST


def trainer(folder: Path, steps: int, seconds: float) -> EngineTrainer:
    """A trainer of so many steps, each of 8 completions of 64 characters, that stops early after so many seconds."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            initializer_range=0.05,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    made = EngineTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},  # random weights would end at once
            max_steps=steps,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=DEVICE == "cpu",
            bf16=False,
            seed=1,
            learning_rate=1e-5,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{i}+{i + 1}=?"} for i in range(4096)]),
        processing_class=tokenizer,
        reward_funcs=_reward,
        callbacks=[TimeLimit(seconds)],
    )
    made.remove_callback(PrinterCallback)
    return made


def parameters(trainer: EngineTrainer) -> int:
    """How many the model has."""
    return sum(p.numel() for p in trainer.model.parameters())


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *"0123456789abcdefghijklmnopqrstuvwxyz +-*/=?.,"]
    tok = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def _reward(completions: list[str], **_: Any) -> list[float]:
    """Digits are good, and no two completions are quite equal, so that there is always a gradient."""
    return [sum(c.isdigit() for c in text) / TOKENS + random.random() / 100 for text in completions]
