"""GradLoc from the hook: it finds the token in the spike's own step, and leaves no trace in training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from seismograd import Config, Event, RunStore, watch
from seismograd.demo.faults import PlantedFault
from seismograd.demo.trainer import EngineGRPOTrainer
from seismograd.gradloc import Incident
from tests import tiny
from tests.test_plain import Loop
from tests.test_trl import VARIANTS, lora, same, trained


def incidents(folder: Path) -> list[Incident]:
    return [Incident.from_json(path.read_text()) for path in sorted((folder / "incidents").glob("*.json"))]


def events(folder: Path, kind: str) -> list[Event]:
    with RunStore.read(folder / "run.db") as store:
        return store.events(kind)


@pytest.mark.parametrize("variant", [*VARIANTS, "lora", "bf16 weights"])
def test_training_is_bit_identical_with_a_localisation_on_every_step(tmp_path: Path, variant: str) -> None:
    settings: dict[str, Any] = {"steps": 4, **VARIANTS.get(variant, {})}

    def make() -> Any:
        torch.manual_seed(7)
        more: dict[str, Any] = {}
        if variant == "lora":
            more = {"peft_config": lora()}
        if variant == "bf16 weights":
            more = {"net": tiny.model(0.1).bfloat16()}
        return tiny.trainer(tmp_path, **settings, **more)

    without = trained(make())
    trainer = make()
    with watch(trainer, runs=tmp_path / "runs", name="run", gradloc="every"):
        assert same(trained(trainer), without)
    folder = tmp_path / "runs" / "run"
    assert events(folder, "fault") == []
    found = incidents(folder)
    assert len(found) == settings["steps"]
    for incident in found:
        assert incident.method == "attribution", incident.attempts
        assert incident.completeness == pytest.approx(1, abs=0.05)
        assert incident.replay_error == 0


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_plain_loop_is_bit_identical_with_a_localisation_on_every_step(tmp_path: Path, micro_batches: int) -> None:
    plain, loop = Loop(), Loop()
    loop.run = watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run", gradloc="every")
    with loop.run:
        assert loop.train(6, micro_batches=micro_batches) == plain.train(6, micro_batches=micro_batches)
    assert loop.norms == plain.norms
    assert [incident.method for incident in incidents(tmp_path / "run")] == ["attribution"] * 6


def test_state_of_the_trainer_is_as_before(tmp_path: Path) -> None:
    """Its own metric lists and counters, which a replay through its loss would add to."""
    plain = tiny.trainer(tmp_path, steps=3, beta=0.04)
    plain.train()
    watched = tiny.trainer(tmp_path, steps=3, beta=0.04)
    with watch(watched, runs=tmp_path / "runs", gradloc="every"):
        watched.train()
    assert watched._step == plain._step
    assert {k: len(v) for k, v in watched._metrics["train"].items()} == {
        k: len(v) for k, v in plain._metrics["train"].items()
    }
    timing = ("step_time", "runtime", "per_second")
    for a, b in zip(plain.state.log_history, watched.state.log_history, strict=True):
        assert {k: x for k, x in a.items() if not any(t in k for t in timing)} == {
            k: x for k, x in b.items() if not any(t in k for t in timing)
        }
    assert hooks(watched.model) == hooks(plain.model)


def hooks(model: torch.nn.Module) -> list[int]:
    """How many each module has."""
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]


def planted(tmp_path: Path, **settings: Any) -> tuple[Any, Path]:
    torch.manual_seed(0)
    trainer = tiny.trainer(tmp_path, steps=18, cls=_Faulty, learning_rate=1e-4)
    trainer.fault = PlantedFault(step=15, ratio=1e4)
    with watch(trainer, runs=tmp_path / "runs", name="run", **settings):
        trainer.train()
    return trainer.planted, tmp_path / "runs" / "run"


class _Faulty(EngineGRPOTrainer):
    """The demo's trainer, made by the tests' own function."""


def test_planted_token_is_named_in_its_own_step(tmp_path: Path) -> None:
    truth, folder = planted(tmp_path)
    (incident,) = [i for i in incidents(folder) if i.step == truth.step]
    worst = incident.culprits[0]
    assert (incident.verdict, incident.method) == ("A.1", "attribution")
    assert (worst.row, worst.position, worst.text) == (truth.row, truth.position, truth.token)
    assert worst.log_ratio == pytest.approx(truth.logp - truth.rollout_logp[1])
    assert worst.share == pytest.approx(1, abs=0.05)
    assert incident.without_culprits is not None
    assert incident.without_culprits < 0.1 * incident.grad_norm
    assert incident.spike is not None
    assert incident.run == "run"
    (event,) = [e for e in events(folder, "incident") if e.step == truth.step]
    assert event.data["culprits"][0]["position"] == truth.position
    assert Path(event.data["path"]).with_suffix(".html").is_file()
    with RunStore.read(folder / "run.db") as store:
        assert store.series("incidents_total", verdict="A.1")[-1][1] == 1
        assert [step for step, _ in store.series("gradloc_completeness_ratio")] == [truth.step]


def test_text_none_leaves_no_text_and_no_ids_anywhere(tmp_path: Path) -> None:
    truth, folder = planted(tmp_path, text="none")
    (file,) = [f for f in (folder / "incidents").glob("*.json") if json.loads(f.read_text())["step"] == truth.step]
    incident = Incident.from_json(file.read_text())
    for culprit in incident.culprits:
        assert (culprit.token_id, culprit.text, culprit.before, culprit.after) == (None,) * 4
    assert all(s.texts is None for s in incident.sequences)
    for event in events(folder, "incident"):
        for culprit in event.data["culprits"]:
            assert (culprit["token_id"], culprit["text"], culprit["before"], culprit["after"]) == (None,) * 4
        assert repr(truth.token) not in event.message


def test_off_is_off(tmp_path: Path) -> None:
    _, folder = planted(tmp_path, gradloc="off")
    assert not (folder / "incidents").exists()
    assert events(folder, "incident") == []
    assert events(folder, "spike") != []


def test_loop_without_a_replay_says_that_this_is_all_it_did(tmp_path: Path) -> None:
    loop = Loop()
    loop.run = watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run")
    with loop.run:
        loop.train(20, leave_out=("replay",))
        with loop.run.step():
            loop.step(corrupt=9.0, leave_out=("replay",))
    (incident,) = incidents(tmp_path / "run")
    assert incident.method == "ratios"
    assert "without" in incident.notes[0]
    assert (incident.culprits[0].row, incident.culprits[0].position) == (0, 1)


def test_incident_that_cannot_be_written_is_counted_and_shown(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=2)
    with watch(trainer, runs=tmp_path / "runs", name="run", gradloc="every"):
        (tmp_path / "runs" / "run" / "incidents").write_text("a file is in the way")
        trainer.train()
    (first, *_) = events(tmp_path / "runs" / "run", "fault")
    assert "cannot write into" in first.message
    assert "SEISMOGRAD_RUNS" in first.message


def test_thresholds_of_the_run_change_its_verdicts(tmp_path: Path) -> None:
    """A log-ratio of 9.2 is no token mismatch where only one of 12 nats is."""
    truth, folder = planted(tmp_path, thresholds={"token_log_ratio": 12.0})
    (incident,) = [i for i in incidents(folder) if i.step == truth.step]
    assert incident.verdict != "A.1"
    assert json.loads((folder / "config.json").read_text())["thresholds"]["token_log_ratio"] == 12.0


def test_defaults() -> None:
    assert (Config().gradloc, Config().text) == ("auto", "full")


class Meddling(Loop):
    """Its replays write to .grad."""

    does = "zero"

    def batch(self) -> dict[str, Any]:
        batch = super().batch()

        def replay(ids: torch.Tensor = batch["input_ids"]) -> torch.Tensor:
            if self.does == "backward":
                with torch.enable_grad():
                    self.model(ids).sum().backward()
            else:
                self.optimizer.zero_grad(set_to_none=self.does == "zero")
            return self.model(ids)

        return {**batch, "replay": replay}


@pytest.mark.parametrize("does", ["zero", "zero in place", "backward"])
def test_training_is_bit_identical_though_replays_write_gradients(tmp_path: Path, does: str) -> None:
    plain, loop = Loop(), Meddling()
    loop.does = does
    loop.run = watch(
        model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run", gradloc="every",
        probes=tiny.EVERY_STEP, controls="observe",
    )  # fmt: skip
    with loop.run:
        assert loop.train(4, micro_batches=2) == plain.train(4, micro_batches=2)
    assert [incident.method for incident in incidents(tmp_path / "run")] == ["attribution"] * 4
    assert events(tmp_path / "run", "fault") == []


@pytest.mark.parametrize(("nothing", "gave"), [(False, r"gave \(4, 7\), logp has \(4, 8\)"), (True, "gave NoneType")])
def test_a_replay_of_another_shape_costs_only_what_is_replayed(tmp_path: Path, nothing: bool, gave: str) -> None:
    class Short(Loop):
        def batch(self) -> dict[str, Any]:
            batch = super().batch()
            short = lambda ids=batch["input_ids"]: None if nothing else self.model(ids)[:, 1:]  # noqa: E731
            return {**batch, "replay": short}

    loop = Short()
    loop.run = watch(
        model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run", gradloc="every", probes=tiny.EVERY_STEP
    )
    with loop.run:
        loop.train(2)
        loop.train(1, corrupt=6.0)
    folder = tmp_path / "run"
    faults = [e.message for e in events(folder, "fault")]
    assert any(re.search(rf"fault in probe_shadow, .*run\.tokens\(replay=\.\.\.\) {gave}", m) for m in faults), faults
    assert all("probe_" in m for m in faults), faults
    found = incidents(folder)
    assert [incident.method for incident in found] == ["ratios"] * 3
    assert found[-1].verdict == "A.1"
    assert all(re.search(rf"replay=\.\.\.\) {gave}", " ".join(incident.notes)) for incident in found)
    with RunStore.read(folder / "run.db") as store:
        keys = [reading.key for row in store.rows() for reading in row.readings]
    assert keys.count('loss_weight{stat="l2"}') == 3
