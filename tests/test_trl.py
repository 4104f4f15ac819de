"""The hook on the real GRPOTrainer: it changes nothing, it sees everything, and it goes without a trace."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from seismograd import ConfigError, RunStore, UnsupportedTrainer, watch
from seismograd.collectors.trainers.trl_loss import clip_specs
from tests import tiny
from tests.tiny import EVERY_STEP


def trained(trainer: GRPOTrainer) -> tuple[str, list[Any], torch.Tensor]:
    """What training came to: parameters to the bit, the losses and norms, and the state of the random numbers."""
    trainer.train()
    return tiny.fingerprint(trainer.model), tiny.losses(trainer), torch.get_rng_state()


def same(a: tuple[str, list[Any], torch.Tensor], b: tuple[str, list[Any], torch.Tensor]) -> bool:
    return a[:2] == b[:2] and torch.equal(a[2], b[2])


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(target_modules=["q_proj", "down_proj"], r=4, lora_dropout=0.1)


def checkpointing(reentrant: bool) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


VARIANTS: dict[str, dict[str, Any]] = {
    "30 steps, dropout": {"steps": 30, "dropout": 0.1},
    "accumulation, two iterations": {"gradient_accumulation_steps": 2, "num_iterations": 2, "dropout": 0.1},
    "checkpointing": {**checkpointing(False), "dropout": 0.1},
    "reentrant checkpointing": {**checkpointing(True), "dropout": 0.1},
    "bf16 autocast": {"bf16": True, "dropout": 0.1},
    "no engine": {"cls": GRPOTrainer, "dropout": 0.1},
    "kl": {"beta": 0.04},
    "sequence level": {"importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "no clip": {"max_grad_norm": 0.0},
    "tight clip": {"max_grad_norm": 0.01},
}


@pytest.mark.parametrize("variant", [*VARIANTS, "lora", "bf16 weights"])
def test_training_is_bit_identical(tmp_path: Path, variant: str) -> None:
    settings = {"steps": 4, **VARIANTS.get(variant, {})}

    def make() -> GRPOTrainer:
        torch.manual_seed(0)
        more: dict[str, Any] = {}
        if variant == "lora":
            more = {"peft_config": lora()}
        if variant == "bf16 weights":
            more = {"net": tiny.model(0.1).bfloat16()}
        return tiny.trainer(tmp_path, **settings, **more)

    without = trained(make())
    trainer = make()
    with watch(trainer, runs=tmp_path / "runs", probes=EVERY_STEP) as run:
        assert same(trained(trainer), without)
    assert run.store_path is not None
    with RunStore.read(run.store_path) as store:
        said = [e.message for e in store.events() if e.kind in ("fault", "degraded")]
        if variant == "lora":  # which trains two layers
            assert "LayerClip compares layers with each other" in said.pop(0)
        assert len(said) == (variant == "no engine")  # on-policy and without an engine, nothing can be compared
        assert all("log-ratios" in message for message in said)
        steps = [r.step for r in store.rows() if any(x.name == "grad_norm" for x in r.readings)]
        assert steps == list(range(1, settings["steps"] + 1))
        assert len(store.series("beta_abs_mean")) == settings["steps"]
        assert len(store.series("deployed_improvement")) == settings["steps"]
        assert len(store.series("gradient_cosine")) == settings["steps"]
        assert len(store.series("weights_changed_since_sync_ratio", layer="all")) == settings["steps"]
        assert len(store.series("snr")) > 0 or variant in ("no engine", "bf16 autocast", "bf16 weights")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOTrainer, Path]:
    """One run that the tests below look at: stale samples, two micro-batches, a KL term."""
    folder = tmp_path_factory.mktemp("run")
    trainer = tiny.trainer(
        folder, steps=6, gradient_accumulation_steps=2, num_iterations=2, beta=0.04, per_device_train_batch_size=8,
        learning_rate=1e-2,
    )  # fmt: skip
    with watch(trainer, runs=folder / "runs", name="run", probes=EVERY_STEP):
        trainer.train()
    return trainer, folder / "runs" / "run"


def logged(trainer: GRPOTrainer, key: str) -> list[float]:
    return [float(log[key]) for log in trainer.state.log_history if key in log]


def stored(folder: Path, metric: str, /, **labels: str) -> list[float]:
    with RunStore.read(folder / "run.db") as store:
        return [value for _, value in store.series(metric, **labels)]


def test_norm_is_the_trainer_s_own(watched: tuple[GRPOTrainer, Path]) -> None:
    trainer, folder = watched
    assert stored(folder, "grad_norm", layer="all", group="all") == pytest.approx(logged(trainer, "grad_norm"))


def test_clipped_tokens_are_the_trainer_s_own(watched: tuple[GRPOTrainer, Path]) -> None:
    """TRL reports the clipped share as a mean over micro-batches, ours is over tokens: equal where those are alike."""
    trainer, folder = watched
    theirs = logged(trainer, "clip_ratio/region_mean")
    cells = [stored(folder, "clip_fraction", cell=cell, ratio="ppo") for cell in ("legitimate", "phantom")]
    ours = [a + b for a, b in zip(*cells, strict=True)]
    assert max(theirs) > 0.02
    assert ours == pytest.approx(theirs, abs=0.02)
    taken = stored(folder, "gradient_taken_fraction", reason="clip")
    assert taken == pytest.approx(ours)


def test_alpha_and_beta_are_the_log_ratio(watched: tuple[GRPOTrainer, Path]) -> None:
    _, folder = watched
    for a, b, r in zip(
        stored(folder, "alpha_mean"), stored(folder, "beta_mean"), stored(folder, "log_ratio", stat="mean"), strict=True
    ):
        assert a + b == pytest.approx(r, abs=1e-6)


def test_alpha_grows_with_staleness_only(watched: tuple[GRPOTrainer, Path]) -> None:
    _, folder = watched
    with RunStore.read(folder / "run.db") as store:
        floor, alpha = dict(store.series("alpha_floor")), dict(store.series("alpha_abs_mean"))
    assert set(floor) == {1, 3, 5}  # two iterations: each second step is stale
    assert max(floor.values()) < 1e-4
    assert min(alpha[step] for step in (2, 4, 6)) > 1e-3


def test_what_the_trainer_logs_is_passed_on(watched: tuple[GRPOTrainer, Path]) -> None:
    trainer, folder = watched
    for key in ("loss", "kl", "entropy", "completions/mean_length"):
        assert stored(folder, "trainer_metric", name=key) == pytest.approx(logged(trainer, key))


def test_loss_weight_is_all_of_the_gradient(tmp_path: Path) -> None:
    """sum_t loss_weight_t * grad logp_t, replayed, is the trainer's own gradient."""
    trainer = tiny.trainer(tmp_path, steps=1, beta=0.04, gradient_accumulation_steps=2, max_grad_norm=1e9)
    with watch(trainer, runs=tmp_path / "runs") as run:
        taken: list[torch.Tensor] = []
        monitor = run._monitor
        judge = monitor._judge

        def replayed(step: Any, *judged: Any) -> None:
            judge(step, *judged)
            grads = [p.grad.clone() for p in trainer.model.parameters()]
            trainer.model.zero_grad()
            for batch in step.batches:
                batch.replay().backward(batch.loss_weight)
            for p, grad in zip(trainer.model.parameters(), grads, strict=True):
                taken.append((p.grad - grad).abs().max() / (grad.abs().max() + 1e-12))
                p.grad = grad

        monitor._judge = replayed  # type: ignore[method-assign]
        trainer.train()
    assert taken
    assert max(taken) < 1e-4


def test_close_puts_everything_back(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=1)
    before = dict(vars(trainer)), dict(vars(trainer.accelerator)), list(trainer.callback_handler.callbacks)
    with watch(trainer, runs=tmp_path / "runs"):
        assert dict(vars(trainer)) != before[0]
    assert dict(vars(trainer)) == before[0]
    assert dict(vars(trainer.accelerator)) == before[1]
    assert trainer.callback_handler.callbacks == before[2]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())


def test_close_leaves_a_later_replacement_alone(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=1)
    run = watch(trainer, runs=tmp_path / "runs")
    ours = trainer.compute_loss

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    trainer.compute_loss = theirs
    run.close()
    assert trainer.compute_loss is theirs
    trainer.train()  # through ours, which has become a mere passage


class Recorder(TrainerCallback):
    """Notes the steps that it is told of; may close a run at one of them."""

    def __init__(self, close_at: int = 0) -> None:
        self.steps: list[int] = []
        self.close_at, self.run = close_at, None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == self.close_at and self.run is not None:
            self.run.close()


def test_close_from_a_callback_skips_nobody_s_turn(tmp_path: Path) -> None:
    closer, other = Recorder(close_at=2), Recorder()
    trainer = tiny.trainer(tmp_path, steps=4, callbacks=[closer])
    closer.run = watch(trainer, runs=tmp_path / "runs")
    trainer.add_callback(other)
    trainer.train()
    assert other.steps == [1, 2, 3, 4]


def test_close_when_our_callback_has_been_taken_out(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=1)
    run = watch(trainer, runs=tmp_path / "runs", name="run")
    trainer.callback_handler.callbacks.pop()
    run.close()
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        assert len(store.events("run_end")) == 1


def test_twice_is_once_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny.trainer(tmp_path, steps=1)
    with watch(trainer, runs=tmp_path / "runs") as run:
        assert watch(trainer, runs=tmp_path / "other") is run
    assert "called twice" in caplog.text
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert not (tmp_path / "other").exists()
    with watch(trainer, runs=tmp_path / "runs") as again:  # after close it is a new one
        assert again is not run


class Stopper(TrainerCallback):
    """A callback of the user's own."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= 2
        return control


@pytest.mark.parametrize("first", [True, False])
def test_before_or_after_other_callbacks(tmp_path: Path, first: bool) -> None:
    trainer = tiny.trainer(tmp_path, steps=5)
    if not first:
        trainer.add_callback(Stopper())
    with watch(trainer, runs=tmp_path / "runs", name="run"):
        if first:
            trainer.add_callback(Stopper())
        trainer.train()
    assert trainer.state.global_step == 2
    assert stored(tmp_path / "runs" / "run", "step") == [1, 2]


def test_unsupported_trainer_names_what_is(tmp_path: Path) -> None:
    class MyTrainer:
        pass

    with pytest.raises(UnsupportedTrainer) as error:
        watch(MyTrainer(), runs=tmp_path)
    for part in ("MyTrainer", "GRPOTrainer", "watch(model=model, optimizer=optimizer)"):
        assert part in str(error.value)
    with pytest.raises(TypeError, match=r"watch\(trainer\)"):
        watch()
    assert list(tmp_path.iterdir()) == []


def test_impossible_setting_leaves_no_trace(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=1)
    before = dict(vars(trainer))
    with pytest.raises(ConfigError, match="budget"):
        watch(trainer, runs=tmp_path / "runs", budget=7)
    assert dict(vars(trainer)) == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("moved", "lost"), [("clip_grad_norm_", "gradient norms"), ("fused head", "alpha, beta"), ("_step", "alpha_floor")]
)
def test_method_that_has_moved_degrades_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, moved: str, lost: str
) -> None:
    """Which signals are lost, and why; the others and training go on."""
    trainer = tiny.trainer(tmp_path, steps=2)
    if moved == "clip_grad_norm_":
        trainer._clip_grad_norm = lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if moved == "fused head":
        original = trainer._get_per_token_logps_and_entropies

        def other_head(model: Any, *args: Any, **kwargs: Any) -> Any:
            return original(model.forward, *args, **kwargs)  # not through the module's call, so that no hook sees it

        trainer._get_per_token_logps_and_entropies = other_head
    if moved == "_step":
        original_loss = trainer.compute_loss

        def without_counter(*args: Any, **kwargs: Any) -> Any:
            loss = original_loss(*args, **kwargs)
            trainer.hidden = vars(trainer).pop("_step")  # gone when the hook looks, back when the trainer does
            return loss

        backward = trainer.accelerator.backward

        def restored(*args: Any, **kwargs: Any) -> Any:
            trainer._step = trainer.hidden
            return backward(*args, **kwargs)

        trainer.compute_loss, trainer.accelerator.backward = without_counter, restored
    with watch(trainer, runs=tmp_path / "runs", name="run"):
        trainer.train()
    assert trainer.state.global_step == 2
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        (event,) = store.events("degraded")
        names = {reading.name for row in store.rows() for reading in row.readings}
    assert lost in event.message
    assert event.message in caplog.text
    assert ("grad_norm" in names) == (moved != "clip_grad_norm_")
    assert ("loss_weight" in names) == (moved != "fused head")
    assert ("alpha_floor" in names) == (moved == "clip_grad_norm_")


def test_shadow_that_the_trainer_s_autocast_would_override_is_refused_loudly(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=2, bf16=True)
    with watch(trainer, runs=tmp_path / "runs", name="run", shadow="fp16", probes=EVERY_STEP):
        trainer.train()
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        (event,) = store.events("degraded")
        assert "set shadow='bf16'" in event.message
        assert store.series("beta_abs_mean") == []
        assert len(store.series("loss_weight", stat="l2")) == 2


@pytest.mark.parametrize("moved", [False, True])
def test_detection_state_goes_with_the_checkpoint(
    tmp_path: Path, moved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    whole = tiny.trainer(tmp_path / "a", steps=6, **settings)
    with watch(whole, runs=tmp_path / "runs", name="whole") as run_whole:
        whole.train()
    first = tiny.trainer(tmp_path / "b", steps=6, callbacks=[Stopper3()], **settings)
    with watch(first, runs=tmp_path / "runs", name="first"):
        first.train()
    checkpoint = tmp_path / "b" / "checkpoint-3"
    if moved:  # training goes on in another output_dir
        checkpoint = checkpoint.rename(tmp_path / "elsewhere")
    second = tiny.trainer(tmp_path / ("c" if moved else "b"), steps=6, **settings)
    with watch(second, runs=tmp_path / "runs", name="second") as run_second:
        second.train(resume_from_checkpoint=str(checkpoint))
    assert "no detection state" not in caplog.text
    assert stored(tmp_path / "runs" / "second", "step") == [4, 5, 6]
    a, b = run_whole.state_dict(), run_second.state_dict()
    seen = [state["step"]["grad_norm"]["state"]["seen"] for state in (a, b)]
    assert seen[0] == seen[1] == [6.0]
    assert b["step"]["grad_norm"]["state"]["level"] == pytest.approx(a["step"]["grad_norm"]["state"]["level"], rel=1e-3)


def test_checkpoint_without_detection_state_is_said_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unwatched = tiny.trainer(tmp_path, steps=2, save_strategy="steps", save_steps=2)
    unwatched.train()
    second = tiny.trainer(tmp_path, steps=3)
    with watch(second, runs=tmp_path / "runs", name="run"):
        second.train(resume_from_checkpoint=True)
    assert "no detection state at" in caplog.text
    assert stored(tmp_path / "runs" / "run", "step") == [3]


def test_completions_left_over_by_an_earlier_train_are_of_unknown_age(tmp_path: Path) -> None:
    """num_iterations=2: the first train() stops in the middle of a generation's use, the second one goes on with it."""
    trainer = tiny.trainer(tmp_path, steps=3, num_iterations=2)
    trainer.train()
    with watch(trainer, runs=tmp_path / "runs", name="run", probes=EVERY_STEP):
        trainer.train()
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        assert [step for step, _ in store.series("alpha_floor")] == [2]  # 1 leftover, 2 fresh, 3 stale


def test_micro_batches_are_numbered(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=2, gradient_accumulation_steps=3)
    seen = []
    with watch(trainer, runs=tmp_path / "runs", name="run") as run:
        add = run._monitor.add
        run._monitor.add = lambda batch: (seen.append((batch.step, batch.micro_batch)), add(batch))[1]  # type: ignore[method-assign]
        trainer.train()
    assert seen == [(step, micro) for step in (1, 2) for micro in range(3)]


def test_vespo_weighs_the_importance_ratio_itself() -> None:
    trainer = SimpleNamespace(
        args=SimpleNamespace(), loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, importance_sampling_level="token",
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=3.0,
    )  # fmt: skip
    assert [spec.ratio for spec in clip_specs(trainer)] == ["ppo", "importance"]
    trainer.loss_type = "vespo"
    assert clip_specs(trainer) == ()


def test_run_says_where_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with watch(tiny.trainer(tmp_path, steps=1), runs=tmp_path / "runs", name="run", prometheus=0) as run:
        pass
    assert (
        f"run run is written to {tmp_path / 'runs' / 'run'}, metrics at {run.prometheus_url}" in capfd.readouterr().err
    )


class Stopper3(TrainerCallback):
    """Ends the training after its third step, as a crash would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= 3
        return control


def test_zero_gradient_steps_are_counted_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "seismograd")
    trainer = tiny.trainer(tmp_path, steps=3)
    trainer.reward_funcs[0] = lambda completions, **_: [1.0] * len(completions)
    with watch(trainer, runs=tmp_path / "runs", name="run"):
        trainer.train()
    folder = tmp_path / "runs" / "run"
    assert stored(folder, "grad_norm", layer="all", group="all") == [0.0] * 3
    assert stored(folder, "zero_gradient_steps_total") == [1, 2, 3]
    assert stored(folder, "gradient_taken_fraction", reason="zero_advantage") == [1.0] * 3
    assert "spike" not in caplog.text
