"""What a localisation takes above a training step's own peak, on a model whose weights weigh something.

Each measurement is a process of its own, so that none finds memory that another one has left to the allocator:

    python -m benchmarks.memory step 2             # megabytes of a training step of two micro-batches, as JSON
    python -m benchmarks.memory localisation 2     # the same step with a localisation in it
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.report import Finding, Report, table
from seismograd import Run, watch

ROWS, LENGTH, VOCABULARY = 4, 96, 32_000
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # of glibc: nothing is kept for reuse
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """One process's measurement, megabytes.

    Args:
        peak: largest resident memory of the step, from its forward to its optimizer's step.
        before: resident memory before it.
        parameters: of the model.
        verdict, method, verified: of the incident, where there was one.
    """

    peak: float
    before: float
    parameters: float
    verdict: str = ""
    method: str = ""
    verified: int = 0


def measure(report: Report, repeats: int) -> None:
    """Steps with and without a localisation, interleaved, for one and for two micro-batches a step."""
    if not CLEAR.exists():
        report.notes.append("memory: not measured, this system has no /proc/self/clear_refs")
        return
    rows = []
    for micro_batches in (1, 2):
        found: dict[str, list[Peak]] = {"step": [], "localisation": []}
        for _ in range(repeats):
            for what, peaks in found.items():
                peaks.append(_in_a_process(what, micro_batches))
        size = found["step"][0].parameters
        without, with_ = (statistics.median(p.peak for p in found[what]) for what in ("step", "localisation"))
        above = with_ - without
        spread = max(max(p.peak for p in peaks) - min(p.peak for p in peaks) for peaks in found.values())
        incident = found["localisation"][0]
        assert incident.verified >= 3, "the fault was not found, so nothing was measured"
        plural = "es" * (micro_batches > 1)
        report.findings.append(
            Finding(
                f"peak memory of a step with a localisation over one without, {micro_batches} micro-batch{plural}",
                "at most one copy of the parameters",
                f"{above:+.0f} MB: {above / size:.2f} of the parameters' {size:.0f} MB, {above / without:.1%} of the "
                f"step's peak of {without:.0f} MB",
                above <= size,
                {
                    "above": above, "parameters": size, "step": without, "localisation": with_, "spread": spread,
                    "repeats": repeats,
                },
            )
        )  # fmt: skip
        rest = statistics.median(p.before for p in found["step"])
        rows.append((str(micro_batches), *(f"{x:.0f}" for x in (rest, without, with_, above, spread))))
    head = ("micro-batches", "at rest, MB", "step's peak", "with a localisation", "above", "spread of repeats")
    report.tables.append(
        f"Peak resident memory of a step, medians of {repeats} processes each: FP32, AdamW, a Llama of "
        f"{size / 4 * 2**20 / 1e6:.0f} million parameters, micro-batches of {ROWS} x {LENGTH} tokens over a vocabulary "
        f"of {VOCABULARY:,}; attribution, and {incident.verified} tokens verified on the whole micro-batch. "
        "Freed tensors go back to the system at once, so what the allocator keeps does not count:\n\n"
        + table(head, rows)
    )


def _in_a_process(what: str, micro_batches: int) -> Peak:
    command = [sys.executable, "-m", "benchmarks.memory", what, str(micro_batches)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **EXACT},
    )
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def child(what: str, micro_batches: int) -> Peak:
    """The second of two steps, so that the optimizer's states are there."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    _step(model, optimizer, micro_batches, None)
    before = _resident("VmRSS")
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    if what == "step":
        CLEAR.write_text("5")
        _step(model, optimizer, micro_batches, None)
        return Peak(_resident("VmHWM"), before, size)
    with (
        tempfile.TemporaryDirectory() as folder,
        watch(model=model, optimizer=optimizer, runs=folder, name="run", gradloc="every", sinks=[]) as run,
    ):
        CLEAR.write_text("5")
        with run.step():
            _step(model, optimizer, micro_batches, run)
        peak = _resident("VmHWM")
        run.flush()
        (file,) = Path(folder, "run", "incidents").glob("*.json")
        incident = json.loads(file.read_text())
    verified = sum(c["grad_norm"] is not None for c in incident["culprits"])
    return Peak(peak, before, size, incident["verdict"], incident["method"], verified)


def _model() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=10,
            num_attention_heads=12, num_key_value_heads=4, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )
    )  # fmt: skip


def _logp(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(B, T-1)."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, micro_batches: int, run: Run | None) -> None:
    """A policy-gradient step with three corrupted rollout log-probs in its last micro-batch."""
    for i in range(micro_batches):
        ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH))
        logp = _logp(model, ids)
        rollout = logp.detach() + 0.02 * torch.randn_like(logp)
        if i == micro_batches - 1:
            rollout[range(3), range(3, 6)] -= 7.0
        advantage = torch.tensor([[-1.0], [-1.0], [-1.0], [1.0]])
        if run is not None:
            run.tokens(
                logp=logp, rollout_logp=rollout, advantage=advantage, input_ids=ids, replay=partial(_logp, model, ids)
            )
        ratio = (logp - rollout).exp()
        loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (loss.mean() / micro_batches).backward()
    if run is not None:
        run.clip_grad_norm_(1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _resident(field: str) -> float:
    """Megabytes, now ("VmRSS") or at most since the last reset ("VmHWM")."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    print(json.dumps(vars(child(sys.argv[1], int(sys.argv[2])))))
