"""Steps of real GRPO with no fault in them: the gradient norms that a control has to leave alone.

python -m benchmarks.honest tests/data --seeds 3 4 5    # honest_layers_SEED.csv.gz; minutes a seed on one core

TRL's GRPOTrainer on a random Qwen3 of 3 layers, hidden size 64, one token a character; lr 3e-4, 8 completions of up to
8 tokens for each of 2 prompts, 2 iterations; reward = digits / 8 - 0.02 * length. Odd seeds have a head of their own,
even ones share the embedding. Norms are of what the trainer would clip, before it does, a column for each layer's
module group: a layer's norm is the root of the sum of its groups' squares.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import logging
import math
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.trainer_callback import PrinterCallback
from trl import GRPOTrainer

from benchmarks import small
from seismograd.telemetry.layers import Grouping, ModelMap, Place
from seismograd.telemetry.norms import take_norms

LENGTH = 8


def main() -> None:
    """Train a run for each seed and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for seed in args.seeds:
        write(args.folder / f"honest_layers_{seed}.csv.gz", run(seed, args.steps))


def run(seed: int, steps: int) -> list[dict[str, str]]:
    """One row a step: reward, entropy, and the norms by layer and module group, 4 significant digits."""
    random.seed(seed)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(Path(folder), model(seed), seed, steps)
        norms = _record(trainer)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
    reward = math.nan
    rows = []
    for i, (log, row) in enumerate(zip(logs, norms, strict=True)):
        reward = log.get("reward", reward)  # logged where completions are new
        rows.append({"step": str(i), "reward": f"{reward:.4g}", "entropy": f"{log['entropy']:.4g}", **row})
    return rows


def read(path: Path) -> tuple[Grouping, list[dict[str, float]]]:
    """The grouping of a table's (layer, group) columns, as if each were a parameter, and its rows."""
    with gzip.open(path, "rt") as file:
        rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    return Grouping.of([_place(name) for name in columns(rows)]), rows


def columns(rows: list[dict[str, float]]) -> list[str]:
    """The names of the columns that hold norms."""
    return [name for name in rows[0] if name.startswith("norm_")]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """As compressed CSV, the same bytes for the same rows."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def model(seed: int) -> Qwen3ForCausalLM:
    """Random, with logits as spread as a trained one's."""
    return small.model(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
        tie_word_embeddings=seed % 2 == 0,
    )


def _trainer(folder: Path, net: Qwen3ForCausalLM, seed: int, steps: int) -> GRPOTrainer:
    made = GRPOTrainer(
        model=net,
        args=small.settings(
            folder,
            per_device_train_batch_size=16,
            num_generations=8,
            num_iterations=2,
            max_completion_length=LENGTH,
            max_steps=steps,
            seed=seed,
            learning_rate=3e-4,
        ),
        train_dataset=small.prompts(256),
        processing_class=small.tokenizer(),
        reward_funcs=_reward,
    )
    made.remove_callback(PrinterCallback)
    return made


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / LENGTH - 0.02 * len(text) for text in completions]


def _record(trainer: GRPOTrainer) -> list[dict[str, str]]:
    """Rows that the trainer's clip adds to, before it clips."""
    kept: list[dict[str, str]] = []
    names = ModelMap(trainer.model)
    clip = trainer.accelerator.clip_grad_norm_

    def recorded(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        parameters = list(parameters)
        norms = take_norms(parameters)
        if norms is None:
            raise RuntimeError("a step without gradients")
        grouping = names.grouping(norms.parameters)
        sums = grouping.norms(norms.per_parameter.double().numpy(), float(norms.total))
        first = 1 + len(grouping.layers)
        pairs = zip(grouping.series[first:], sums[first:], strict=True)
        kept.append({f"norm_{layer}_{group}": f"{x:.4g}" for (layer, group), x in pairs})
        return clip(parameters, max_norm, norm_type)

    trainer.accelerator.clip_grad_norm_ = recorded
    return kept


def _place(column: str) -> Place:
    _, layer, group = column.split("_")
    return Place(layer, group)


if __name__ == "__main__":
    main()
