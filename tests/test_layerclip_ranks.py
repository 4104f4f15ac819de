"""LayerClip over several processes: all ranks clip the same layers by the same factor, or none does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seismograd import RunStore
from tests.test_ranks import launch

SCRIPT = """
import json, os, sys
sys.path.insert(0, {top!r})
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import seismograd.telemetry.ranks as ranks
from seismograd import watch
from seismograd.controls import LayerClip
from tests.tiny import PlainModel

runs, what = {runs!r}, {what!r}
ranks.meet.__defaults__ = (60.0,)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = PlainModel()
if "fsdp" in what:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    net = model
else:
    net = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
alone = LayerClip(model, warmup=8) if "alone" in what else None
run = None if alone else watch(
    model=net, optimizer=optimizer, runs=runs, name="run", gradloc="off", controls={{"layerclip.warmup": 8}}
)
if run and "fault" in what and rank == size - 1:
    def broken(*_):
        raise RuntimeError("no")
    run._protection.decide = broken
torch.manual_seed(100 + rank)
sick = model.layers[1][0].weight

def local(p):
    return (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).clone()

def train_step(step):
    ids = torch.randint(0, 20, (4, 9))
    logp = net(ids)
    if run:
        run.tokens(logp=logp, mask=torch.ones_like(logp, dtype=torch.bool))
    (-logp.mean()).backward()
    if step == 13:
        sick.grad.mul_(200.0)
    before = {{n: local(p) for n, p in model.named_parameters()}}
    if alone:
        alone.clip_()
    else:
        run.clip_grad_norm_(1e9)
    after = {{n: local(p) for n, p in model.named_parameters()}}
    changed = {{n: float((after[n].norm() / before[n].norm())) for n in before
                if before[n].numel() and not torch.equal(before[n], after[n])}}
    optimizer.step()
    optimizer.zero_grad()
    return changed

found = []
for step in range(16):
    if run:
        with run.step():
            found.append(train_step(step))
    else:
        found.append(train_step(step))
with open(f"{{__file__}}.{{rank}}", "w") as file:
    json.dump(found, file)
if run:
    run.close()
dist.destroy_process_group()
"""


def scales(tmp_path: Path, what: str, size: int = 2) -> list[list[dict[str, Any]]]:
    """By rank and step: the parameters whose gradient the clip changed, and by what factor."""
    return [json.loads(text) for text in launch(tmp_path, SCRIPT, size, what=what)]


@pytest.mark.parametrize("what", ["ddp", "fsdp", "ddp alone", "fsdp alone"])
def test_all_ranks_clip_the_same_layer_by_the_same_factor(tmp_path: Path, what: str) -> None:
    found = scales(tmp_path, what)
    assert [step for step, changed in enumerate(found[0]) if changed] == [13]
    for rank in found:
        assert set(rank[13]) == {"layers.1.0.weight", "layers.1.0.bias"}
        for factor in rank[13].values():
            assert factor == pytest.approx(found[0][13]["layers.1.0.weight"], rel=1e-4)
            assert factor < 0.05
    if "alone" not in what:
        with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
            (change,) = store.events("control")
        assert (change.step, change.data["after"]) == (14, "on")


def test_where_one_rank_cannot_no_rank_does(tmp_path: Path) -> None:
    """Weights that differ between ranks would be worse than a spike."""
    found = scales(tmp_path, "ddp fault")
    assert [changed for rank in found for changed in rank if changed] == []
