"""seismograd on TRL's GRPOTrainer: the one hook.

pip install 'seismograd[demo]'
python examples/trl_grpo.py                          # a random model of 1M parameters, nothing to download
python examples/trl_grpo.py --model Qwen/Qwen3-0.6B  # any causal language model that transformers can load

"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from seismograd import RunStore, watch
from seismograd.demo import tiny
from seismograd.demo.problems import problems, reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or path; a random tiny one if not given")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    if args.model is None:
        tokenizer = tiny.tokenizer()
        model = tiny.model(len(tokenizer))
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(args.model)

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=problems(size=256, seed=0, chat=tokenizer.chat_template is not None),
        args=GRPOConfig(
            output_dir="trainer_output",
            max_steps=args.steps,
            per_device_train_batch_size=8,
            num_generations=4,
            steps_per_generation=2,
            max_completion_length=16,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
        ),
    )
    run = watch(trainer, prometheus=0)  # the one hook; everything else is as without it
    print(f"watching: {run.folder}, {run.prometheus_url}")
    trainer.train()
    run.close()

    assert run.store_path is not None
    with RunStore.read(run.store_path) as store:
        norms = store.series("grad_norm", layer="all", group="all")
        print(f"gradient norm of the last steps: {[round(norm, 3) for _, norm in norms[-3:]]}")
        print(f"share of the step time: {store.series('overhead_ratio')[-1][1]:.1%}")
        for event in store.events("spike"):
            print(event.message)


if __name__ == "__main__":
    main()
