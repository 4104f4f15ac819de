"""The plain PyTorch loop, with and without what it may leave out."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from seismograd import ClipSpec, Run, RunStore, watch
from tests import tiny
from tests.tiny import EVERY_STEP, NO_PROBES


class Loop:
    """A small policy-gradient loop; `run` is None for training without the hook."""

    def __init__(self, run: Run | None = None, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = tiny.PlainModel().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.run = run
        self.norms: list[float] = []
        self.seeded = False

    def batch(self) -> dict[str, Any]:
        ids = torch.randint(0, 20, (4, 9))
        logp = self.model(ids)
        rollout = logp.detach() + 0.02 * torch.randn_like(logp)
        mask = torch.rand_like(logp) > 0.2
        return {
            "logp": logp, "rollout_logp": rollout, "advantage": torch.randn(4), "mask": mask, "input_ids": ids,
            "staleness": 0, "replay": lambda: self.model(ids),
        }  # fmt: skip

    @staticmethod
    def loss(batch: dict[str, Any]) -> torch.Tensor:
        ratio = (batch["logp"] - batch["rollout_logp"]).exp()
        advantage = batch["advantage"].reshape(-1, 1)
        loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return (loss * batch["mask"]).sum() / batch["mask"].sum()

    def step(self, leave_out: tuple[str, ...] = (), corrupt: float = 0.0, micro_batches: int = 1, **more: Any) -> None:
        for _ in range(micro_batches):
            batch = self.batch()
            if corrupt:
                batch["mask"][0, 0] = True
                batch["advantage"][0] = more.get("sign", -1.0)
                batch["rollout_logp"][0, 0] -= corrupt
            if self.run is not None:
                self.run.tokens(**{k: v for k, v in batch.items() if k not in leave_out})
            (self.loss(batch) / micro_batches).backward()
        parameters = list(self.model.parameters())
        if self.run is not None:
            norm = self.run.clip_grad_norm_(1.0)
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.norms.append(float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int, **how: Any) -> str:
        if not self.seeded:
            torch.manual_seed(1)
            self.seeded = True
        for _ in range(steps):
            if self.run is None:
                self.step(**how)
            else:
                with self.run.step():
                    self.step(**how)
        return tiny.fingerprint(self.model)


def watched(tmp_path: Path, **settings: Any) -> Loop:
    loop = Loop()
    loop.run = watch(
        model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run", **{"probes": EVERY_STEP, **settings}
    )
    return loop


def read(tmp_path: Path) -> dict[str, list[float]]:
    """All series by key."""
    found: dict[str, list[float]] = {}
    with RunStore.read(tmp_path / "run" / "run.db") as store:
        for row in store.rows():
            for reading in row.readings:
                found.setdefault(reading.key, []).append(reading.value)
    return found


def events(tmp_path: Path, kind: str) -> list[Any]:
    with RunStore.read(tmp_path / "run" / "run.db") as store:
        return store.events(kind)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_is_bit_identical(tmp_path: Path, micro_batches: int) -> None:
    plain, loop = Loop(), watched(tmp_path)
    assert loop.run is not None
    with loop.run:
        assert loop.train(20, micro_batches=micro_batches) == plain.train(20, micro_batches=micro_batches)
    assert loop.norms == plain.norms
    found = read(tmp_path)
    assert found['grad_norm{layer="all",group="all"}'] == pytest.approx(plain.norms)
    for name in ("alpha_abs_mean", "beta_abs_mean", "snr", "deployed_improvement", "alpha_floor", "gradient_cosine"):
        assert len(found[name]) == 20


def test_tokens_without_a_replay_have_no_beta(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(3, leave_out=("replay",))
    found = read(tmp_path)
    assert len(found['loss_weight{stat="l2"}']) == 3
    assert "beta_abs_mean" not in found
    (event,) = events(tmp_path, "degraded")
    assert "replay=" in event.message


def test_only_log_probs(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(3, leave_out=("replay", "rollout_logp", "advantage", "mask", "input_ids", "staleness"))
    found = read(tmp_path)
    assert found["trained_tokens"] == [32.0] * 3
    assert 'log_ratio{stat="mean"}' not in found
    assert events(tmp_path, "fault") == []


def test_no_tokens_at_all(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(3):
            with loop.run.step():  # type: ignore[union-attr]
                loop.loss(loop.batch()).backward()
                loop.run.clip_grad_norm_(1.0)  # type: ignore[union-attr]
                loop.optimizer.step()
    assert len(read(tmp_path)['grad_norm{layer="all",group="all"}']) == 3


def test_step_that_does_not_clip_is_read_at_the_optimizer(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        for _ in range(3):
            with loop.run.step():  # type: ignore[union-attr]
                batch = loop.batch()
                loop.run.tokens(**batch)  # type: ignore[union-attr]
                loop.loss(batch).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    found = read(tmp_path)
    assert len(found['grad_norm{layer="all",group="all"}']) == len(found["snr"]) == 3
    assert not loop.optimizer._optimizer_step_pre_hooks


def test_packed_tokens(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run, loop.run.step():  # type: ignore[union-attr]
        batch = loop.batch()
        rows = {k: batch[k].reshape(-1) for k in ("logp", "rollout_logp", "mask")}
        advantage = batch["advantage"].repeat_interleave(8)
        ids = batch["input_ids"]
        loop.run.tokens(  # type: ignore[union-attr]
            **rows, advantage=advantage, replay=lambda: loop.model(ids).reshape(-1)
        )
        rows["logp"].sum().backward()
        loop.run.clip_grad_norm_(1.0)  # type: ignore[union-attr]
        loop.optimizer.step()
    found = read(tmp_path)
    assert found["trained_tokens"] == [float(batch["mask"].sum())]
    assert found["beta_abs_mean"][0] > 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rollout_logp": torch.zeros(4, 9)}, "rollout_logp"),
        ({"mask": torch.ones(3, 8)}, "mask"),
        ({"advantage": torch.ones(5)}, "advantage"),
    ],
)
def test_wrong_shape_is_one_clear_line_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: dict[str, torch.Tensor], named: str
) -> None:
    plain, loop = Loop(), watched(tmp_path)
    original = loop.run.tokens  # type: ignore[union-attr]
    loop.run.tokens = lambda **batch: original(**{**batch, **wrong})  # type: ignore[union-attr, method-assign]
    with loop.run:  # type: ignore[union-attr]
        assert loop.train(3) == plain.train(3)
    (fault,) = [e for e in events(tmp_path, "fault") if "switched off" not in e.message]
    assert f"run.tokens({named}=...)" in fault.message
    assert len([r for r in caplog.records if f"run.tokens({named}=...)" in r.getMessage()]) <= 2
    assert len(read(tmp_path)['grad_norm{layer="all",group="all"}']) == 3


def test_corrupt_ratio_with_a_negative_advantage_is_a_gradient_spike(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(20)
        with loop.run.step():  # type: ignore[union-attr]
            loop.step(corrupt=9.0)
            during = {spike.signal for spike in loop.run.spikes}  # type: ignore[union-attr]
        loop.train(3)
    # Known in the step itself.
    assert during == {"grad_norm", "layer_grad_norm", "loss_weight", "sequence", "log_ratio"}
    spikes = events(tmp_path, "spike")
    assert {e.data["signal"] for e in spikes} >= during | {"log_ratio"}
    assert {e.step for e in spikes} == {21}
    assert read(tmp_path)['spikes_total{signal="grad_norm"}'] == [0.0] * 20 + [1.0] * 4


def test_corrupt_ratio_with_a_positive_advantage_silences_the_token(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(20)
        loop.train(1, corrupt=9.0, sign=1.0)
    signals = {e.data["signal"] for e in events(tmp_path, "spike")}
    assert "log_ratio" in signals
    assert not signals & {"grad_norm", "layer_grad_norm", "loss_weight"}


@pytest.mark.parametrize("where", ["rollout_logp", "gradient"])
def test_nonfinite_is_found_at_once_and_named(tmp_path: Path, where: str) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        with loop.run.step():  # type: ignore[union-attr]
            batch = loop.batch()
            batch["mask"][0, 0] = True
            seen = dict(batch)
            if where == "rollout_logp":
                seen["rollout_logp"] = batch["rollout_logp"].clone()
                seen["rollout_logp"][0, 0] = torch.nan
            loop.run.tokens(**seen)  # type: ignore[union-attr]
            loop.loss(batch).backward()
            if where == "gradient":
                loop.model.layers[1][0].weight.grad[0, 0] = torch.inf  # type: ignore[index, union-attr]
            loop.run.clip_grad_norm_(1.0)  # type: ignore[union-attr]
            loop.optimizer.zero_grad()
        loop.train(2)
    (spike,) = [e for e in events(tmp_path, "spike") if e.data["signal"] == "nonfinite"]
    assert spike.data["key"] == f'nonfinite_total{{where="{where}"}}'
    assert read(tmp_path)[spike.data["key"]] == [1.0] * 3


def test_exception_of_the_loop_passes_through(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(1)
        with pytest.raises(ZeroDivisionError), loop.run.step():  # type: ignore[union-attr]
            1 / 0  # noqa: B018
        loop.train(1)
    assert read(tmp_path)["step"] == [1.0, 3.0]


def test_loop_that_goes_on_after_close_is_a_plain_one(tmp_path: Path) -> None:
    plain, loop = Loop(), watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(2)
    assert loop.train(3) == plain.train(5)
    assert loop.norms == plain.norms
    assert read(tmp_path)["step"] == [1.0, 2.0]


def test_run_that_nobody_holds_is_closed_at_the_end_of_the_process(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from seismograd import watch
from tests.tiny import PlainModel

def main():
    watch(model=PlainModel(), runs={str(tmp_path)!r}, name="run")

main()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
    assert len(events(tmp_path, "run_end")) == 1


def test_overflow_of_a_scaled_loss_is_routine(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run, loop.run.step():  # type: ignore[union-attr]
        batch = loop.batch()
        loop.run.tokens(**batch, loss_scale=2.0**15)  # type: ignore[union-attr]
        (loop.loss(batch) * float("inf")).backward()
        loop.run.clip_grad_norm_(1.0)  # type: ignore[union-attr]
    assert events(tmp_path, "spike") == []
    assert read(tmp_path)['nonfinite_total{where="gradient_overflow"}'][0] > 0


def test_one_tensor_is_clipped_as_torch_does(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        weight = loop.model.lm_head.weight
        weight.grad = torch.full_like(weight, 3.0)
        norm = loop.run.clip_grad_norm_(1.0, weight)  # type: ignore[union-attr]
    assert norm > 1
    assert float(weight.grad.norm()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("wrapped", [True, False])
def test_optimizer_that_is_wrapped_or_unknown(tmp_path: Path, wrapped: bool) -> None:
    loop = Loop()
    wrapper: Any = type("Wrapper", (), {"optimizer": loop.optimizer})() if wrapped else object()
    with watch(model=loop.model, optimizer=wrapper, runs=tmp_path, name="run") as run:
        loop.run = run
        loop.train(2)
    assert len(read(tmp_path)["step"]) == 2
    assert [e.message for e in events(tmp_path, "degraded") if "no torch.optim.Optimizer" in e.message] == (
        [] if wrapped else [e.message for e in events(tmp_path, "degraded") if "optimizer=object" in e.message]
    )


def test_log_handler_that_raises_does_not_reach_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("handler")

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    handler = Raising()
    logging.getLogger("seismograd").addHandler(handler)
    try:
        plain, loop = Loop(), watched(tmp_path)
        monkeypatch.setattr("seismograd.collectors.monitor.take_norms", broken)
        with loop.run:  # type: ignore[union-attr]
            assert loop.train(3) == plain.train(3)
    finally:
        logging.getLogger("seismograd").removeHandler(handler)


def test_bounds_of_the_loop_s_own_loss(tmp_path: Path) -> None:
    loop = watched(tmp_path, clip=ClipSpec(eps_low=1e-6, eps_high=1e-6))
    with loop.run:  # type: ignore[union-attr]
        loop.train(2)
    assert read(tmp_path)['clip_region_fraction{cell="open",ratio="ppo"}'] == pytest.approx([0, 0], abs=0.05)


def test_state_goes_with_a_checkpoint_of_the_loop_s_own(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(15)
        loop.run.flush()  # type: ignore[union-attr]
        state = json.loads(json.dumps(loop.run.state_dict()))  # type: ignore[union-attr]
    again = watched(tmp_path / "again")
    again.run.load_state_dict(state)  # type: ignore[union-attr]
    with again.run:  # type: ignore[union-attr]
        again.train(1, corrupt=9.0)
    assert any(e.data["signal"] == "grad_norm" for e in events(tmp_path / "again", "spike"))


def test_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    plain, loop = Loop(), Loop()
    loop.run = watch(model=loop.model, runs=tmp_path / "file" / "runs")
    with loop.run:
        assert loop.run.folder is loop.run.store_path is None
        assert loop.train(2) == plain.train(2)
    (line,) = [r.getMessage() for r in caplog.records if "cannot write" in r.getMessage()]
    assert "SEISMOGRAD_RUNS" in line
    assert "\n" not in line


def test_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    model = tiny.PlainModel()
    names = []
    for _ in range(3):
        with watch(model=model, runs=tmp_path, name="run") as run:
            names.append(run.name)
    assert names == ["run", "run-2", "run-3"]


def test_run_folder_is_as_documented(tmp_path: Path) -> None:
    loop = watched(tmp_path)
    with loop.run:  # type: ignore[union-attr]
        loop.train(1)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.db", "config.json"}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["probes"] == EVERY_STEP


def test_methods_of_a_loop_on_a_trainer_s_run(tmp_path: Path) -> None:
    with (
        watch(tiny.trainer(tmp_path), runs=tmp_path / "runs") as run,
        pytest.raises(TypeError, match=r"run\.step\(\) is for plain loops"),
    ):
        run.step()


def test_part_that_did_not_run_took_no_time(tmp_path: Path) -> None:
    """Or a sink that shows last values would go on showing its last run's."""
    loop = watched(tmp_path, probes={**NO_PROBES, "shadow": 2})
    with loop.run:  # type: ignore[union-attr]
        loop.train(4)
    seconds = read(tmp_path)['hook_seconds{part="probe_shadow"}']
    assert [took > 0 for took in seconds] == [True, False, True, False]
