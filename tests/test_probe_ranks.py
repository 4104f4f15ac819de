"""Probes over several processes: what runs is rank 0's choice on all of them, and gradients are compared as wholes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seismograd import RunStore
from tests.test_ranks import faults, launch

TRAINER = """
import json, os, sys
sys.path.insert(0, {top!r})
import torch
import torch.distributed as dist
from seismograd import watch
from tests import tiny
from tests.test_geometry import expected, flat

watched, runs, what = {watched}, {runs!r}, {what!r}
rank = int(os.environ["RANK"])
probes = tiny.EVERY_STEP if what != "auto" else {{}}
trainer = tiny.trainer(
    f"{{os.path.dirname(__file__)}}/{{rank}}", steps=12 if what == "auto" else 4, dropout=0.1, num_iterations=2,
    epsilon=0.05, learning_rate=1e-2, max_grad_norm=1e9,
)
plans, found = [], []
if watched:
    # Rank 1 has another budget: the choice is rank 0's.
    run = watch(trainer, runs=runs, name="run", probes=probes, budget=0.3 + 0.6 * rank if what == "auto" else 0.01)
    monitor = run._monitor
    judge, replays = monitor._judge, monitor._probes._setup.replays

    def by_hand(step, *judged):
        judge(step, *judged)
        plans.append(sorted(monitor._probes.plan))
        if what != "values":
            return
        parameters = list(trainer.model.parameters())
        kept, halves = [p.grad for p in parameters], []
        replay = replays(trainer.model, step.batches)
        with replay.kept():
            for half in (0, 1):
                turn = torch.arange(4)[:, None] % 2 == half
                weight = torch.where(step.batches[0].mask & turn, -step.batches[0].advantage, 0.0)
                (_, gradient), = replay.backward(0, [{{"logp": weight}}])
                count = (step.batches[0].mask & turn).sum()
                halves.append((flat(gradient), count))
                dist.all_reduce(halves[-1][0])
                dist.all_reduce(count)
        (first, n), (second, m) = halves
        found.append(expected(flat(kept), first, second, (int(n), int(m))))

    monitor._judge = by_hand
    if what == "fails" and rank == 1:
        def broken(*_):
            raise MemoryError("on this rank")
        monitor._probes._setup.__dict__["replays"] = broken
trainer.train()
text = f"{{tiny.fingerprint(trainer.model)}} {{tiny.losses(trainer)}}"
if watched:
    run.close()
    with open(f"{{__file__}}.{{rank}}.json", "w") as file:
        json.dump([plans, found], file)
with open(f"{{__file__}}.{{rank}}", "w") as file:
    file.write(text)
dist.destroy_process_group()
"""


def plans(folder: Path) -> list[list[list[str]]]:
    """By rank, what each step ran."""
    return [json.loads((folder / f"loop.py.{rank}.json").read_text())[0] for rank in (0, 1)]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What training comes to without the hook."""
    return launch(tmp_path_factory.mktemp("honest"), TRAINER, 2, watched=False, what="")


@pytest.mark.slow
def test_training_is_bit_identical_and_the_values_are_of_all_ranks(tmp_path: Path, honest: list[str]) -> None:
    assert launch(tmp_path, TRAINER, 2, watched=True, what="values") == honest
    assert faults(tmp_path) == []
    found = json.loads((tmp_path / "loop.py.0.json").read_text())[1]
    assert len(found) == 4
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        for key in found[0]:
            name, _, part = key.partition('{part="')
            series = store.series(name, **({"part": part.rstrip('"}')} if part else {}))
            assert [value for _, value in series] == pytest.approx([f[key] for f in found], rel=1e-3, abs=1e-5)
        assert len(store.series("weights_changed_ratio", layer="all")) == 4
        assert len(store.series("beta_abs_mean")) == 4


@pytest.mark.slow
def test_rank_0_chooses_for_all(tmp_path: Path) -> None:
    """By its own clock and budget, which are not those of rank 1."""
    launch(tmp_path, TRAINER, 2, watched=True, what="auto")
    mine, other = plans(tmp_path)
    assert mine == other
    assert len(mine) == 12
    assert {"shadow", "weights"} <= set(mine[0])
    assert len({tuple(plan) for plan in mine}) > 1
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        for probe, metric in (("shadow", "beta_abs_mean"), ("geometry", "gradient_cosine")):
            ran = [step for step, plan in enumerate(mine, 1) if probe in plan]
            assert [step for step, _ in store.series(metric)] == ran
        told = dict(store.series("probe_spacing_steps", probe="shadow"))
    assert told
    assert min(told.values()) >= 1
    assert faults(tmp_path) == []


@pytest.mark.slow
def test_what_fails_on_one_rank_is_given_up_by_all(tmp_path: Path, honest: list[str]) -> None:
    assert launch(tmp_path, TRAINER, 2, watched=True, what="fails") == honest
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        assert store.series("gradient_cosine") == []
        assert len(store.series("grad_norm", layer="all", group="all")) == 4
        messages = [event.message for event in store.events("fault")]
    assert "MemoryError" in messages[0]
    assert "probe_geometry is switched off" in messages[-1]
    mine, other = plans(tmp_path)
    assert ["geometry" in plan for plan in mine] == [True, True, True, False]
    assert mine == other
