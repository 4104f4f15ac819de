"""GradLoc over several processes: the tokens of all ranks compete, nobody waits in vain, training is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seismograd import RunStore
from seismograd.gradloc import Incident

LOOP = """
import os, sys
sys.path.insert(0, {top!r})
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import seismograd.telemetry.ranks as ranks
from seismograd import watch
from tests.tiny import PlainModel, fingerprint

watched, runs, what = {watched}, {runs!r}, {what!r}
ranks.meet.__defaults__ = (60.0,) if what != "rank 0 only" else (2.0,)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = PlainModel()
model.register_buffer("scale", torch.ones(1))  # DDP broadcasts it in a forward, which a replay must not do
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
run = None
if watched and (rank == 0 or what != "rank 0 only"):
    run = watch(model=ddp, optimizer=optimizer, runs=runs, name="run", gradloc="every" if what == "every" else "auto")
torch.manual_seed(100 + rank)
guilty = size - 1  # never rank 0

def micro_batch(step, last):
    ids = torch.randint(0, 20, (4, 9))
    logp = ddp(ids)
    rollout = logp.detach() + 0.02 * torch.randn_like(logp)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    mask = torch.ones_like(logp, dtype=torch.bool)
    if what == "empty" and rank == 0:
        mask[:] = False
    if what == "absent" and rank == 0:  # a forward that only keeps step with the others
        return logp.sum() * 0.0
    if what != "every" and step == 14 and (rank == guilty or what == "several" and rank == 1) and last:
        rollout[1, 3] -= 9.0
    if run:
        run.tokens(logp=logp, rollout_logp=rollout, advantage=advantage, mask=mask, input_ids=ids,
                   replay=lambda ids=ids: ddp(ids))
    ratio = (logp - rollout).exp()
    loss = -torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
    return (loss * mask).sum() / 32

def train_step(step):
    # Ranks have unequal numbers of micro-batches; only the last one of each reduces.
    count = 1 + (rank % 2 if what == "unequal" else 0)
    for i in range(count):
        last = i == count - 1
        if last:
            micro_batch(step, last).backward()
        else:
            with ddp.no_sync():
                micro_batch(step, last).backward()
    run.clip_grad_norm_(1.0) if run else torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

for step in range(16 if what != "every" else 4):
    if run:
        with run.step():
            train_step(step)
    else:
        train_step(step)
with open(f"{{__file__}}.{{rank}}", "w") as file:
    file.write(fingerprint(model))
if run:
    run.close()
dist.destroy_process_group()
"""


SHARDED = """
import os, sys
sys.path.insert(0, {top!r})
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
import seismograd.telemetry.ranks as ranks
from seismograd import watch
from tests.tiny import PlainModel

watched, runs, what = {watched}, {runs!r}, {what!r}
ranks.meet.__defaults__ = (60.0,) if what != "rank 0 only" else (2.0,)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = PlainModel()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
run = None
if watched and (rank == 0 or what != "rank 0 only"):
    run = watch(model=model, optimizer=optimizer, runs=runs, name="run", gradloc="every" if what == "every" else "auto")
torch.manual_seed(100 + rank)
guilty = size - 1

class Collectives(TorchDispatchMode):
    names = []  # of those that this process issues, in order

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(str(func))
        return func(*args, **(kwargs or {{}}))

# Every rank runs as many forwards, or FSDP would wait; some only to keep step with the others, without tokens.
idle = 0 if what not in ("unequal", "absent") else max(0, (1 if what == "unequal" else 2) - rank)

def micro_batch(step, last):
    ids = torch.randint(0, 20, (4, 9))
    logp = model(input_ids=ids)
    if int(last) < idle:
        return logp.sum() * 0.0
    rollout = logp.detach() + 0.02 * torch.randn_like(logp)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    if what != "every" and step == 14 and rank == guilty and last:
        rollout[1, 3] -= 9.0
    if run:
        run.tokens(logp=logp, rollout_logp=rollout, advantage=advantage, input_ids=ids,
                   replay=lambda ids=ids: model(ids))
    ratio = (logp - rollout).exp()
    return -torch.min(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None]).mean()

def train_step(step):
    for last in (False, True):
        micro_batch(step, last).backward()
    norm = run.clip_grad_norm_(1.0) if run else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norms.append(float(norm.full_tensor()))
    optimizer.step()
    optimizer.zero_grad()

norms = []
with Collectives():
    for step in range(16 if what != "every" else 4):
        if run:
            with run.step():
                train_step(step)
        else:
            train_step(step)
with open(f"{{__file__}}.{{rank}}.collectives", "w") as file:
    file.write("\\n".join(Collectives.names))
local = torch.cat([p.to_local().detach().flatten() for p in model.parameters()])
with open(f"{{__file__}}.{{rank}}", "w") as file:
    file.write(f"{{norms}} {{local.numpy().tobytes().hex()}}")
if run:
    run.close()
dist.destroy_process_group()
"""


def launch(folder: Path, script: str, size: int, **values: object) -> list[str]:
    """What each rank has written."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "loop.py"
    file.write_text(script.format(top=str(Path(__file__).parent.parent), runs=str(folder / "runs"), **values))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [Path(f"{file}.{rank}").read_text() for rank in range(size)]


def found(folder: Path) -> list[Incident]:
    return [Incident.from_json(p.read_text()) for p in sorted((folder / "runs/run/incidents").glob("*.json"))]


def faults(folder: Path) -> list[str]:
    with RunStore.read(folder / "runs" / "run" / "run.db") as store:
        return [event.message for event in store.events("fault")]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "size"), [("planted", 2), ("unequal", 2), ("empty", 2), ("absent", 2)])
def test_guilty_token_of_another_rank(tmp_path: Path, what: str, size: int) -> None:
    with_hook = launch(tmp_path / "with", LOOP, size, watched=True, what=what)
    assert with_hook == launch(tmp_path / "without", LOOP, size, watched=False, what=what)
    assert faults(tmp_path / "with") == []
    incident = found(tmp_path / "with")[-1]
    worst = incident.culprits[0]
    assert (incident.step, incident.verdict, incident.method) == (15, "A.1", "attribution")
    assert (worst.rank, worst.row, worst.position) == (size - 1, 1, 4)
    assert worst.micro_batch == (1 if what == "unequal" else 0)
    assert worst.token_id is not None
    assert incident.completeness == pytest.approx(1, abs=0.05)
    assert incident.without_culprits is not None
    assert incident.without_culprits < 0.2 * incident.grad_norm
    assert incident.sequences[0].rank == size - 1


@pytest.mark.slow
def test_localisation_on_every_step_of_all_ranks_changes_nothing(tmp_path: Path) -> None:
    with_hook = launch(tmp_path / "with", LOOP, 2, watched=True, what="every")
    assert with_hook == launch(tmp_path / "without", LOOP, 2, watched=False, what="every")
    assert [incident.method for incident in found(tmp_path / "with")] == ["attribution"] * 4
    assert faults(tmp_path / "with") == []


@pytest.mark.slow
def test_watch_on_rank_0_only_waits_for_nobody_for_ever(tmp_path: Path) -> None:
    launch(tmp_path, LOOP, 2, watched=True, what="rank 0 only")
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        assert len(store.series("grad_norm", layer="all", group="all")) == 16
        assert any("not called on all ranks" in event.message for event in store.events("degraded"))


@pytest.mark.slow
def test_culprits_on_several_ranks_are_all_named(tmp_path: Path) -> None:
    launch(tmp_path, LOOP, 4, watched=True, what="several")
    incident = found(tmp_path)[-1]
    assert {(c.rank, c.row, c.position) for c in incident.culprits} == {(1, 1, 4), (3, 1, 4)}
    assert incident.without_culprits is not None
    assert incident.without_culprits < 0.2 * incident.grad_norm  # whose gradients are summed over the ranks
    assert {s.rank for s in incident.sequences} == {1, 3}


TRAINER = """
import os, sys
sys.path.insert(0, {top!r})
import torch
import torch.distributed as dist
from seismograd import watch
from seismograd.demo.faults import PlantedFault
from seismograd.demo.trainer import EngineGRPOTrainer
from tests import tiny

rank = int(os.environ["RANK"])
trainer = tiny.trainer(f"{{os.path.dirname(__file__)}}/{{rank}}", steps=16, cls=EngineGRPOTrainer, learning_rate=1e-4)
if rank == 1:
    trainer.fault = PlantedFault(step=14, ratio=1e4, after=8)
run = watch(trainer, runs={runs!r}, name="run") if {watched} else None
trainer.train()
planted = trainer.planted
where = None if planted is None else (planted.step, planted.row, planted.position, planted.token)
with open(f"{{__file__}}.{{rank}}", "w") as file:
    file.write(f"{{tiny.fingerprint(trainer.model)}} {{tiny.losses(trainer)}} {{where}}")
if run:
    run.close()
dist.destroy_process_group()
# {what}
"""


@pytest.mark.slow
def test_trainer_on_two_processes(tmp_path: Path) -> None:
    """TRL's trainer under DDP: the fault lies on rank 1, and rank 0 tells its text."""
    with_hook = launch(tmp_path / "with", TRAINER, 2, watched=True, what="")
    assert with_hook == launch(tmp_path / "without", TRAINER, 2, watched=False, what="")
    assert faults(tmp_path / "with") == []
    incident = found(tmp_path / "with")[-1]
    worst = incident.culprits[0]
    assert incident.verdict == "A.1"
    assert worst.rank == 1
    assert with_hook[1].endswith(str((incident.step, worst.row, worst.position, worst.text)))
    assert incident.completeness == pytest.approx(1, abs=0.05)


SEARCH = """
import os, sys
sys.path.insert(0, {top!r})
import torch
import torch.distributed as dist
from benchmarks import bank
from seismograd.gradloc import Bisection, Group, localize

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
case = bank.make(bank.Spec("ratio" if rank == 1 else "honest", "qwen3", 3, 1e4, micro_batches=2, rows=8, length=24))
for p in case.model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= size
how = Bisection.published() if {what!r} == "published" else Bisection()
incident = localize(
    case.batches, case.model, method="bisect", grad_scale=1 / size, ranks=Group(), bisection=how, verified=1
)
named = [(c.rank, c.micro_batch, c.row, c.position) for c in incident.culprits]
truth = [(1, *token) for token in case.truth.tokens]
with open(f"{{__file__}}.{{rank}}", "w") as file:
    file.write(f"{{incident.verdict}} {{named}} {{truth}}")
dist.destroy_process_group()
# {runs} {watched}
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["default", "published"])
def test_bisection_over_ranks(tmp_path: Path, how: str) -> None:
    """All ranks come to the same incident; as published, they are bisected too."""
    first, second = launch(tmp_path, SEARCH, 2, watched=True, what=how)
    assert first.startswith("A.1 [(1, ")
    truth = second.rpartition(" [")[2]
    assert second == first.replace(" []", f" [{truth}")
    assert first.removeprefix("A.1 ").startswith(f"[{truth}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "size"), [("planted", 4), ("every", 2), ("unequal", 2), ("unequal", 4), ("absent", 2), ("absent", 4)]
)
def test_sharded_parameters(tmp_path: Path, what: str, size: int) -> None:
    """FSDP2: each rank has its shards only, and the norms, the shares and the verified gradient are of the whole."""
    with_hook = launch(tmp_path / "with", SHARDED, size, watched=True, what=what)
    assert with_hook == launch(tmp_path / "without", SHARDED, size, watched=False, what=what)
    assert faults(tmp_path / "with") == []
    incidents = found(tmp_path / "with")
    assert {incident.method for incident in incidents} == {"attribution"}
    assert all(incident.completeness == pytest.approx(1, abs=0.05) for incident in incidents)
    with RunStore.read(tmp_path / "with" / "runs" / "run" / "run.db") as store:
        norms = store.series("grad_norm", layer="all", group="all")
    assert [norm for _, norm in norms] == pytest.approx(json.loads(with_hook[0].partition("]")[0] + "]"), rel=1e-5)
    collectives = [(tmp_path / "with" / f"loop.py.{rank}.collectives").read_text() for rank in range(size)]
    plain = (tmp_path / "without" / "loop.py.0.collectives").read_text()
    assert collectives[0].count("allgather_base") > plain.count("allgather_base") > 0  # those of FSDP
    assert len(set(collectives)) == 1
    if what != "every":
        incident = incidents[-1]
        worst = incident.culprits[0]
        place = 0 if (what, size) == ("absent", 2) else 1  # of its rank's micro-batches that have tokens
        assert (incident.step, incident.verdict) == (15, "A.1")
        assert (worst.rank, worst.micro_batch, worst.row, worst.position) == (size - 1, place, 1, 4)
        assert incident.without_culprits is not None
        assert incident.without_culprits < 0.2 * incident.grad_norm
        assert worst.grad_norm == pytest.approx(incident.grad_norm, rel=0.1)


@pytest.mark.slow
def test_sharded_parameters_watched_by_rank_0_only(tmp_path: Path) -> None:
    """A forward of rank 0 alone would wait for the other's shards for ever: there is none."""
    with_hook = launch(tmp_path / "with", SHARDED, 2, watched=True, what="rank 0 only")
    assert with_hook == launch(tmp_path / "without", SHARDED, 2, watched=False, what="rank 0 only")
    for incident in found(tmp_path / "with"):
        assert incident.method == "ratios"
        assert any("call watch() on all ranks" in note for note in incident.notes)
