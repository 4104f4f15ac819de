"""The workload: TRL's GRPOTrainer on a random Qwen3 of 12.6 million parameters, with BF16 rollout log-probs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from benchmarks import small

COMPLETIONS, TOKENS = 8, 64  # a step's batch: one group of completions, and the length of each


class SteppedTrainer(small.EngineTrainer):
    """Lets something be done between its steps.

    Attributes:
        between: called before each step, outside of it.
    """

    between: Callable[[], None] | None = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        if self.between is not None:
            self.between()
        return super().get_batch_samples(*args, **kwargs)


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


def trainer(folder: Path, steps: int, seconds: float) -> SteppedTrainer:
    """A trainer of so many steps, each of 8 completions of 64 characters, that stops early after so many seconds."""
    torch.manual_seed(0)
    model = small.model(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.05,
    )
    made = SteppedTrainer(
        model=model,
        args=small.settings(
            folder,
            per_device_train_batch_size=COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},  # random weights would end at once
            max_steps=steps,
            use_cpu=not torch.cuda.is_available(),
            seed=1,
            learning_rate=1e-5,
        ),
        train_dataset=small.prompts(4096),
        processing_class=small.tokenizer(),
        reward_funcs=_reward,
        callbacks=[TimeLimit(seconds)],
    )
    made.remove_callback(PrinterCallback)
    return made


def parameters(trainer: SteppedTrainer) -> int:
    """How many the model has."""
    return sum(p.numel() for p in trainer.model.parameters())


def _reward(completions: list[str], **_: Any) -> list[float]:
    """Digits are good, and no two completions are quite equal, so that there is always a gradient."""
    return [sum(c.isdigit() for c in text) / TOKENS + random.random() / 100 for text in completions]
