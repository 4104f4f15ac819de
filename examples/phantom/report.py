"""The report of experiment 1: Markdown, JSON and pictures in docs/experiments."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from phantom.findings import OURS, Runs, findings
from phantom.found import VERDICT, Found
from phantom.picture import draw
from phantom.policy import Policy
from seismograd.telemetry.rules import RULES

NAME = "phantom_clipping"
FLAGS = {"small": "", "smollm2": " --smollm2", "quick": " --quick"}
WORDS = {True: "**yes**", False: "**no**", None: "cannot tell"}
ORDER = ("B", "A", "G", "F", "wide", "detach", "FP16")
INTRODUCTION = """
Does the gap of precision between an FP32 trainer and a BF16 rollout engine keep PPO's clip from learning, and does the
rule table say so from the live metrics alone? The recipe is that of *Defeating the trainer-generator precision mismatch
in TRL* (Hugging Face 2026, [page](https://aminedirohf-trainer-generator-bf16-mismatch.hf.space)): the reward is minus
the number of completion tokens, so that the best policy stops at once; there Qwen3-0.6B trained in FP32 on rollouts of
a BF16 vLLM did not converge.

The log-ratio splits into alpha, what the policy changed, and beta, the gap of precision. *Phantom*: tokens whose
gradient the clip takes although alpha alone would not have been clipped; *legitimate*: those that alpha alone would
have lost too. Every figure except the reward is read from the run store as the hook wrote it, with the shadow and
deployed probes on each step. Means are over all steps of a run, then over seeds, with the extremes in brackets. The KL
is that to the rollout policy (k3), not to a reference model. *Deployed improvement* is the mean, over the step's
tokens, of the change of the log-prob in the rollout's precision times the sign of the advantage.

How the loop is made: the engine is a copy of the weights that samples with a KV cache under BF16 autocast (FP16 in run
FP16) and gives the log-probs that it sampled with. It takes over the weights every fourth step, so that rollouts are 0,
1, 2, 3 steps old. Advantages are centred and scaled within their group (GRPO), the loss is the mean over the batch's
tokens, tokens after EOS are masked. Attention is plain matrix products (`eager`): then the engine's cached forward
rounds exactly as the shadow does, and alpha at staleness 0 is 0 up to 0.003. An engine that is BF16 throughout,
weights and residual stream too, as vLLM's is, rounds otherwise than autocast; that difference would stand in alpha as
its floor, where no shadow under autocast can take it out. No such engine is run here.

SmolLM2 is read from a 4-bit file, and 8% of its weights lie exactly on a tie between two BF16 values. There the first
step, of 3e-7, decided which way they round, all the way of the gradient: mean |beta| went from 0.035 to 0.76 nats.
That is an artefact of the file, so the weights are dithered by 2^-12 of themselves before training.
""".strip()


def write(out: Path, part: str, policy: Policy, setting: Any, start: Found, found: Sequence[Found]) -> Path:
    """Adds the part to OUT/phantom_clipping.json, draws its picture, and writes OUT/phantom_clipping.md anew."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NAME}.json"
    parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.is_file() else {}
    parts[part] = {
        "command": f"python examples/{NAME}.py{FLAGS[part]}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": _machine(),
        "policy": policy.name,
        "trained": policy.trained,
        "setting": asdict(setting),
        "before": start.as_json(),
        "runs": [run.as_json() for run in found],
    }
    path.write_text(_compact(parts))
    for name, content in parts.items():
        draw([Found.from_json(run) for run in content["runs"]], _main_eps(content), out / f"{NAME}_{name}.svg")
    page = out / f"{NAME}.md"
    page.write_text(_page(parts))
    return page


def _page(parts: dict[str, Any]) -> str:
    commands = "\n".join(f"    {content['command']}" for content in parts.values())
    rule = next(rule for rule in RULES if rule.signal == "phantom_fraction")
    return (
        "\n\n".join(
            [
                "# Experiment 1: phantom clipping",
                commands,
                INTRODUCTION,
                f'The rule: "{rule.summary}" Its advice: "{rule.advice}"',
                "## In short",
                "\n\n".join(_in_short(content) for content in parts.values()),
                *(_part(name, content) for name, content in parts.items()),
            ]
        )
        + "\n"
    )


def _part(name: str, content: dict[str, Any]) -> str:
    found = [Found.from_json(run) for run in content["runs"]]
    main = _main_eps(content)
    s = content["setting"]
    sections = [
        f"## {content['policy']}",
        f"{content['date']}, {content['machine']}. The policy: {content['trained']}. {s['steps']} steps of "
        f"{s['prompts']} prompts with {s['group']} completions each, at most {s['limit']} tokens; AdamW, learning rate "
        f"{s['rate']:g}, gradient norm clipped at 1. {_width(Found.from_json(content['before']), found, main)}",
        _table(found),
        f"![by step]({NAME}_{name}.svg)",
    ]
    rows = [(f.published, f.here, f"{WORDS[f.holds]} ({f.criterion})") for f in findings(Runs(found, main))]
    sections += [f"Published findings, at eps {main:g}:", _markdown(("published", "here", "reproduces?"), rows)]
    return "\n\n".join(sections)


def _in_short(content: dict[str, Any]) -> str:
    judged = findings(Runs([Found.from_json(run) for run in content["runs"]], _main_eps(content)))
    lines = [f"{content['policy']}:", ""]
    for verdict, holds in (("reproduces", True), ("**does not reproduce**", False), ("cannot tell", None)):
        lines += [
            f"- {verdict}: {f.published}" for f in judged if f.holds is holds and not f.published.startswith(OURS)
        ]
    lines += [f"- {'' if f.holds else 'not so: '}{f.published}" for f in judged if f.published.startswith(OURS)]
    return "\n".join(lines)


def _width(start: Found, found: Sequence[Found], main: float) -> str:
    published = start.eps
    both = any(run.eps == published for run in found)
    beta, spread, out, taken = (start.first(name) for name in ("beta", "beta_std", "phantom_region", "phantom"))
    return (
        f"Before the first step mean |beta| is {beta:.3f} and beta's standard deviation {spread:.3f} nats; published "
        f"are 0.076 and 0.149, at a clip of 0.2. A clip of {published:g} would find {out:.1%} of the tokens out of its "
        f"bounds by beta alone (published: 18%), {taken:.1%} on the side that takes the gradient. The width {main:g} "
        "keeps the published quotient of width and spread, 0.2 / 0.149"
        + ("; the published width is run beside it." if both else ".")
    )


def _table(found: Sequence[Found]) -> str:
    def order(run: Found) -> tuple[int, float]:
        return ORDER.index(run.key), run.eps or 0.0

    rows = []
    for _, members in groupby(sorted(found, key=order), key=order):
        runs = list(members)
        one = runs[0]
        called = sum(run.called is not None for run in runs)
        snr = [run.mean("alpha") / run.mean("beta") if run.mean("beta") > 0 else math.nan for run in runs]
        rows.append(
            (
                one.key,
                one.what,
                "-" if one.eps is None else f"{one.eps:g}",
                f"{np.mean([run.reward[0] for run in runs]):.1f}",
                _span([run.reward[0] + run.gained for run in runs], "{:.1f}"),
                _span([run.mean("alpha") for run in runs], "{:.3f}"),
                _span([run.mean("beta") for run in runs], "{:.3f}"),
                _span(snr, "{:.2f}"),
                _span([run.mean("phantom") for run in runs], "{:.1%}"),
                _span([run.mean("legitimate") for run in runs], "{:.1%}"),
                _span([run.mean("hidden") for run in runs], "{:.1%}"),
                _span([run.mean("deployed") for run in runs], "{:.4f}"),
                _span([run.mean("kl") for run in runs], "{:.4f}"),
                f"{called} of {len(runs)}",
            )
        )
    head = (
        "run", "what", "eps", "reward, step 1", "last 5", "mean |alpha|", "mean |beta|", "SNR", "phantom",
        "legitimate", "hidden", "deployed improvement", "KL", f'called "{VERDICT}"',
    )  # fmt: skip
    return _markdown(head, rows)


def _span(values: Sequence[float], form: str) -> str:
    if any(math.isnan(value) for value in values):
        return "none"
    text = form.format(float(np.mean(values)))
    return f"{text} [{form.format(min(values))}, {form.format(max(values))}]" if len(values) > 1 else text


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _main_eps(content: dict[str, Any]) -> float:
    """The width that keeps the published quotient: that of the first run of B."""
    return float(next(run["eps"] for run in content["runs"] if run["key"] == "B"))


def _compact(parts: dict[str, Any]) -> str:
    """One run a line, so that a new result is a readable change."""
    text = []
    for name, content in parts.items():
        head = json.dumps({key: value for key, value in content.items() if key != "runs"})[:-1]
        runs = ",\n".join(json.dumps(run) for run in content["runs"])
        text.append(f'"{name}": {head}, "runs": [\n{runs}\n]}}')
    return '{"parts": {\n' + ",\n".join(text) + "\n}}\n"


def _machine() -> str:
    kind = "x86" if platform.machine() in ("x86_64", "AMD64") else platform.machine()
    torch = ".".join(importlib.metadata.version("torch").split("+")[0].split(".")[:2])
    return f"{os.cpu_count()}-core {kind} CPU, one thread, torch {torch}"
