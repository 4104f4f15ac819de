"""`seismograd demo`: GRPO on a real language model, watched, with two planted faults."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any

from seismograd.demo.options import PORT, REAL, TINY, Scale

if TYPE_CHECKING:
    from rich.console import Console

    from seismograd.demo.faults import Planted, PlantedLayer
    from seismograd.demo.seen import Seen
    from seismograd.demo.trainer import EngineGRPOTrainer

EPSILON = 0.06
"""Width of the PPO clip. Published runs of large models clip at 0.2, beside a precision gap beta whose standard
deviation is 0.149. Beta grows with a model's size and deviates by 0.045 here: the clip is narrowed in proportion."""

ROUND = 4
"""Steps on one round of rollouts, which are so 0 to 3 steps stale, as those of an engine beside the trainer are."""

WARMUP = 12
"""Steps with a gradient before the faults: the detector learns from 10 what is usual."""

LEARNT = 10
"""Steps with a gradient from which LayerClip learns what is usual; 16 by default, in runs that are longer than this."""

_NEEDED = ("rich", "transformers", "trl", "datasets", "gguf", "reasoning_gym")


def run_demo(arguments: argparse.Namespace) -> int:
    """`demo` with the options of `seismograd.demo.options`; returns the exit code."""
    a = arguments
    return demo(tiny=a.tiny, steps=a.steps, port=a.port, runs=a.runs, seed=a.seed, hold=a.hold, serve=a.serve)


def demo(
    *,
    tiny: bool = False,
    steps: int | None = None,
    port: int = PORT,
    runs: str = "runs",
    seed: int = 0,
    hold: float = 0.0,
    serve: bool = True,
) -> int:
    """Train, watch, plant two faults, say what was found. The arguments are those of the command.

    With `serve` the live page is there from the start, and stays up at the end until Ctrl-C where a person runs it.

    Returns:
        0; 1 where something is missing or a planted fault was not found and answered.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(f"the demo needs {', '.join(missing)}, not installed here: pip install 'seismograd[demo]'")
        return 1
    _quieten()
    # Imported here, after the settings above, which these read when they are imported.
    from seismograd import watch
    from seismograd.demo import console, model, progress, summary
    from seismograd.demo.live_page import live_page

    scale = TINY if tiny else REAL
    slow = None if tiny else _slow()
    steps = scale.steps if steps is None else steps
    out = progress.console()
    out.print("seismograd demo: GRPO, FP32 training against BF16 rollout log-probabilities, two planted faults")
    if slow is not None:
        out.print(slow, style="yellow")
    with tempfile.TemporaryDirectory(prefix="seismograd-demo-") as scratch:
        try:
            trainer = _trainer(out, scale, tiny=tiny, steps=steps, seed=seed, scratch=scratch)
        except model.ModelMissing as e:
            out.print(str(e), style="bold red")
            return 1
        sink = console.ConsoleSink(out, steps)
        name = f"demo-{'tiny' if tiny else 'smollm2'}-{time.strftime('%Y%m%d-%H%M%S')}"
        with live_page(out, runs, name, serve):
            with watch(
                trainer,
                runs=runs,
                name=name,
                prometheus=port,
                probes={"shadow": 1, "deployed": 1, "weights": 1, "geometry": 5},
                sinks=["auto", sink],
                controls={"layerclip.warmup": LEARNT, "tokenclip": "auto"},
            ) as run:
                out.print(
                    "Probes run on every step (geometry: every fifth), to show all signals; "
                    "by default they keep to 1% of the step time."
                )
                if run.prometheus_url is not None:
                    out.print(f"Metrics: {run.prometheus_url}")
                start = time.perf_counter()
                trainer.train()
                seconds = time.perf_counter() - start
                if hold > 0 and run.prometheus_url is not None:
                    out.print(f"Metrics stay up for {hold:g} s more")
                    time.sleep(hold)
            summary.print_summary(out, sink.seen, trainer.faults, steps, seconds, run.store_path, run.prometheus_url)
    return 0 if all(_found(fault, sink.seen) for fault in trainer.faults) else 1


def _trainer(out: Console, scale: Scale, *, tiny: bool, steps: int, seed: int, scratch: str) -> EngineGRPOTrainer:
    import torch
    from transformers import PrinterCallback, set_seed
    from trl.trainer.grpo_config import GRPOConfig

    from seismograd.demo import model, problems
    from seismograd.demo import tiny as small
    from seismograd.demo.faults import LayerFault, PlantedFault
    from seismograd.demo.trainer import EngineGRPOTrainer

    policy: Any
    if tiny:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # a model of this size only loses time where threads wait for each other
        tokenizer = small.tokenizer()
        policy = small.model(len(tokenizer), seed)
        out.print(f"Model: {small.NAME}")
    else:
        policy, tokenizer = model.load(out)
    set_seed(seed)
    config = GRPOConfig(
        output_dir=scratch,
        max_steps=steps,
        per_device_train_batch_size=scale.batch,
        num_generations=scale.group,
        steps_per_generation=ROUND,
        max_completion_length=scale.completion,
        temperature=1.0,
        epsilon=EPSILON,
        learning_rate=scale.rate,
        lr_scheduler_type="constant",
        bf16=False,  # FP32. TRL's default is BF16, where beta is 0 by construction
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    late = steps - max(2, steps // 6)
    if late <= WARMUP:
        out.print(f"{steps} steps are too few to plant a fault, the detector learns for {WARMUP}: none is planted")
    rounds = -(-steps // ROUND)
    trainer = EngineGRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=problems.reward,
        args=config,
        train_dataset=problems.problems(rounds * ROUND * scale.batch // scale.group, seed, chat=not tiny),
        fault=PlantedFault(step=late, after=WARMUP) if late > WARMUP else None,
        layer_fault=LayerFault(late - 3, scale.layer, scale.left, WARMUP) if late > WARMUP else None,
        on_planted=lambda planted: out.print(f"FAULT PLANTED  {planted.sentence()}", style="bold magenta"),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _slow() -> str | None:
    """What to expect of a CPU without BF16 instructions, where the rollout's forward takes ten times FP32's."""
    import torch

    supported: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if torch.cuda.is_available() or supported is None or supported():
        return None
    return (
        "This CPU has no BF16 instructions, and the BF16 rollout is slow on it: a step takes a minute or more. "
        "seismograd demo --tiny shows the same in about a minute."
    )


def _found(planted: Planted | PlantedLayer, seen: Seen) -> bool:
    """Whether a planted fault spiked, the first culprit of its incident is guilty, and a control was switched on."""
    from seismograd.demo.summary import names

    spiked = any(e.step == planted.step and e.data.get("signal") == "grad_norm" for e in seen.spikes)
    named = any(names(e, planted, e.data["culprits"][0]) for e in seen.incidents if e.data["culprits"])
    answered = any(e.step == planted.step and e.data["after"] == "on" for e in seen.changes)
    return spiked and named and answered


def _quieten() -> None:
    """No bars, warnings and look-ups of other libraries, so that what the demo itself says can be read."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    bars: Any = transformers.utils.logging
    bars.disable_progress_bar()
    bars.set_verbosity_error()
    for library in ("trl", "datasets", "accelerate", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
    # Everything that seismograd logs is also an event, which the console shows.
    logging.getLogger("seismograd").addHandler(logging.NullHandler())
