"""Several processes: rank 0 watches, nobody else writes, training is the same on all."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from seismograd import RunStore

LOOP = """
import os, sys
sys.path.insert(0, {top!r})
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from seismograd import watch
from tests.tiny import PlainModel, fingerprint

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = PlainModel()
model.register_buffer("scale", torch.ones(1))  # a buffer: a forward of one rank alone would wait for the other
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
run = watch(model=ddp, optimizer=optimizer, runs={runs!r}, name="run", prometheus=0) if {watched} else None
torch.manual_seed(rank)
for _ in range(5):
    ids = torch.randint(0, 20, (4, 9))
    def step():
        logp = ddp(ids)
        if run:
            rollout_logp, advantage = logp.detach() - 0.1, torch.ones(4)
            run.tokens(logp=logp, rollout_logp=rollout_logp, advantage=advantage, replay=lambda: ddp(ids))
        (-logp.mean()).backward()
        run.clip_grad_norm_(1.0) if run else torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if run:
        with run.step(): step()
    else:
        step()
with open(f"{{__file__}}.{{rank}}", "w") as file:
    file.write(f"{{fingerprint(model)}} {{run.prometheus_url if run else None}}")
if run: run.close()
dist.destroy_process_group()
"""


def launch(tmp_path: Path, watched: bool) -> dict[int, list[str]]:
    script = tmp_path / f"loop_{watched}.py"
    top = str(Path(__file__).parent.parent)
    script.write_text(textwrap.dedent(LOOP).format(top=top, runs=str(tmp_path / "runs"), watched=watched))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return {rank: Path(f"{script}.{rank}").read_text().split() for rank in (0, 1)}


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    with_hook, without = launch(tmp_path, True), launch(tmp_path, False)
    assert {rank: found[0] for rank, found in with_hook.items()} == {rank: found[0] for rank, found in without.items()}
    assert with_hook[0][1].startswith("http://127.0.0.1:")
    assert with_hook[1][1] == "None"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        assert len(store.series("grad_norm", layer="all", group="all")) == 5
        assert store.series("trained_tokens")[0] == (1, 32.0)
        assert "several processes" in store.events("degraded")[0].message
        assert store.events("fault") == []
