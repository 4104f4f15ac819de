"""Controls where a run is not as they would like it: nothing breaks, nothing is clipped in error, and it is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from seismograd import RunStore, watch
from seismograd.controls import LayerClip
from seismograd.demo.faults import PlantedFault
from seismograd.demo.trainer import EngineGRPOTrainer
from seismograd.gradloc import Incident
from tests import tiny
from tests.test_controls_hook import Shaking, events, series, shaken
from tests.test_plain import Loop

ON = {"layerclip": "on"}


def acted(folder: Path) -> list[str]:
    return [e.message for e in events(folder, "action")]


# -- steps that are skipped ---------------------------------------------------------------------------------------


def test_code_after_the_clip_still_finds_the_gradients_of_a_skipped_step(tmp_path: Path) -> None:
    loop = Shaking(at=20, size=math.nan)
    found: list[float] = []
    ours = loop.optimizer.step
    loop.optimizer.step = lambda *a, **k: (  # type: ignore[method-assign,assignment]
        found.append(float(next(loop.model.parameters()).grad.norm())),
        ours(*a, **k),
    )
    folder = shaken(tmp_path, loop, controls=ON)
    assert len(found) == 30
    assert acted(folder) == ["step 20: layerclip skips the step: its gradient is not finite"]
    assert {series(folder, "layerclip_scale", layer=layer)[20] for layer in ("embedding", "1", "head")} == {0.0}
    assert all(p.isfinite().all() for p in loop.model.parameters())


@pytest.mark.parametrize("optimizer", [None, object()])
def test_without_the_optimizer_no_step_is_said_to_be_skipped(tmp_path: Path, optimizer: Any) -> None:
    plain, loop = Shaking(at=20, size=math.nan), Shaking(at=20, size=math.nan)
    plain.train(24)
    with watch(model=loop.model, optimizer=optimizer, runs=tmp_path, name="run", controls=ON) as run:
        loop.run = run
        loop.train(24)
    folder = tmp_path / "run"
    assert tiny.fingerprint(loop.model) == tiny.fingerprint(plain.model)  # nothing was skipped
    assert acted(folder) == []
    said = [e.message for e in events(folder, "degraded") if "cannot skip" in e.message]
    assert len(said) == 1
    assert "watch(optimizer=...)" in said[0]
    incidents = [Incident.from_json(path.read_text()) for path in (folder / "incidents").glob("*.json")]
    assert incidents
    assert not any(incident.controls["layerclip"]["acted"] for incident in incidents)


def test_without_the_optimizer_layers_are_clipped_all_the_same(tmp_path: Path) -> None:
    loop = Shaking(at=20)
    with watch(model=loop.model, runs=tmp_path, name="run", controls=ON) as run:
        loop.run = run
        loop.train(21)
    assert [message.split(" (")[0] for message in acted(tmp_path / "run")] == ["step 20: layerclip clips 1"]


def test_a_scaler_that_never_unscales_survives_an_overflow(tmp_path: Path) -> None:
    """Its own way out of it is the same with and without the hook."""

    def train(watched: bool) -> tuple[str, float]:
        loop = Loop()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        run = watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, controls=ON) if watched else None
        torch.manual_seed(1)
        for step in range(12):
            context = run.step() if run is not None else torch.enable_grad()
            with context:
                batch = loop.batch()
                loss = loop.loss(batch) * (math.inf if step == 8 else 1.0)
                scaler.scale(loss).backward()
                if run is not None:
                    run.clip_grad_norm_(math.inf)
                scaler.step(loop.optimizer)
                scaler.update()
                loop.optimizer.zero_grad()
        if run is not None:
            run.close()
        return tiny.fingerprint(loop.model), float(scaler.get_scale())

    assert train(True) == train(False)


# -- what is said -------------------------------------------------------------------------------------------------


def test_each_step_in_which_it_acts_is_an_event(tmp_path: Path) -> None:
    loop = Shaking(at=0)
    layer: Any = loop.model.layers[1][0]
    layer.weight.register_hook(lambda g: g * 200 if loop.count in (20, 23, 27) else g)
    folder = shaken(tmp_path, loop)
    assert [message.split(":")[0] for message in acted(folder)] == ["step 20", "step 23", "step 27"]
    assert all("clips 1 (x" in message for message in acted(folder))


def test_a_run_that_is_taken_up_while_it_is_on_says_so(tmp_path: Path) -> None:
    first = Shaking(at=20)
    with watch(model=first.model, optimizer=first.optimizer, runs=tmp_path, name="first") as run:
        first.run = run
        first.train(22)
        state = run.state_dict()
    with watch(model=first.model, runs=tmp_path, name="second") as run:
        run.load_state_dict(state)
        assert run.controls["layerclip"] == "on"
    assert [e.message for e in events(tmp_path / "second", "control")] == [
        "layerclip is on: taken up from the saved state"
    ]


def test_a_state_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    loop = Loop()
    with watch(model=loop.model, runs=tmp_path, name="run") as run:
        run.load_state_dict({**run.state_dict(), "controls": {"switches": {}}})
        assert run.controls["layerclip"] == "armed"
    assert "begin anew" in events(tmp_path / "run", "degraded")[0].message


def without(state: dict[str, Any], *path: str) -> dict[str, Any]:
    """A saved state that lacks what is at the end of the path."""
    name, *rest = path
    if rest:
        return {**state, name: without(state[name], *rest)}
    return {key: value for key, value in state.items() if key != name}


def trained_state(tmp_path: Path, loop: Loop, steps: int, **settings: Any) -> dict[str, Any]:
    with watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="first", **settings) as run:
        loop.run = run
        loop.train(steps)
        state: dict[str, Any] = json.loads(json.dumps(run.state_dict()))
    return state


@pytest.mark.parametrize("lacking", ["recent", "own", "next", "switches"])
def test_controls_that_begin_anew_learn_anew(tmp_path: Path, lacking: str) -> None:
    state = trained_state(tmp_path, Loop(), 20)
    if lacking == "switches":
        state["controls"]["switches"]["layerclip"]["state"] = "NONSENSE"
    else:
        state = without(state, "controls", "layerclip", "usual", lacking)
    loop = Shaking(at=19)
    with watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run") as run:
        loop.run = run
        loop.train(2)  # its own, which is gone too
        run.load_state_dict(state)
        loop.train(16)
        loop.train(3)
        assert run.controls["layerclip"] == "on"
    folder = tmp_path / "run"
    (said,) = [e.message for e in events(folder, "degraded") if "begin anew" in e.message]
    assert said == (
        "the saved state of the controls (KeyError) cannot be read: they begin anew; the rest is taken over"
    )
    assert events(folder, "fault") == []
    assert [e.step for e in events(folder, "control")] == [19]


def test_norms_of_a_state_whose_switches_cannot_be_read_are_not_taken_over(tmp_path: Path) -> None:
    state = trained_state(tmp_path, Loop(), 20, controls=ON)
    state["controls"]["switches"]["layerclip"]["state"] = "NONSENSE"
    loop = Shaking(at=3)  # where what the state knows would have it clipped
    with watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run", controls=ON) as run:
        run.load_state_dict(state)
        loop.run = run
        loop.train(4)
    assert acted(tmp_path / "run") == []
    assert events(tmp_path / "run", "control") == []  # it is on by its mode, not by the state


PARTS = ("the detection in the step", "the signals and counters", "the controls")


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({}, [f"{part} (missing)" for part in PARTS]),
        (None, [f"{part} (missing)" for part in PARTS]),
        ([1], [f"{part} (missing)" for part in PARTS]),
        ({"step": {}}, [f"{PARTS[0]} (missing)"]),
        ({"step": {"grad_norm": {}}}, [f"{PARTS[0]} (KeyError)"]),
        ({"step": [1]}, [f"{PARTS[0]} (TypeError)"]),
        ({"worker": {}}, [f"{PARTS[1]} (missing)"]),
        ({"worker": {"spikes": {}}}, [f"{PARTS[1]} (KeyError)"]),
        ({"worker": None, "controls": {}}, [f"{PARTS[1]} (missing)", f"{PARTS[2]} (missing)"]),
    ],
)
def test_parts_of_a_state_that_cannot_be_read_begin_anew(tmp_path: Path, state: Any, named: list[str]) -> None:
    first = Loop()
    saved = trained_state(tmp_path, first, 15)
    whole = not isinstance(state, dict) or not state
    with watch(model=first.model, optimizer=first.optimizer, runs=tmp_path, name="run") as run:
        fresh = run.state_dict()
        run.load_state_dict(saved)  # so that what cannot be read has something to lose
        run.load_state_dict(state if whole else {**saved, **state})
        after = run.state_dict()
        first.run = run
        first.train(3)
    lost = [part for part, words in zip(("step", "worker", "controls"), PARTS, strict=True) if words in str(named)]
    for part in ("step", "worker", "controls"):
        assert after[part] == (fresh if part in lost else saved)[part]
    (said,) = [e.message for e in events(tmp_path / "run", "degraded") if "begin anew" in e.message]
    rest = "" if len(named) == 3 else "; the rest is taken over"
    assert said == f"the saved state of {', '.join(named)} cannot be read: they begin anew{rest}"
    assert events(tmp_path / "run", "fault") == []


def test_a_state_of_a_version_without_controls_is_taken_over(tmp_path: Path) -> None:
    loop = Loop()
    saved = trained_state(tmp_path, loop, 5)
    with watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run") as run:
        run.load_state_dict(without(saved, "controls"))
        assert run.state_dict()["step"] == saved["step"]
    assert events(tmp_path / "run", "degraded") == []


def test_one_that_has_failed_counts_as_looking_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def broken(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("no")

    monkeypatch.setattr("seismograd.collectors.controlling.apply", broken)
    loop = Shaking(at=0)
    layer: Any = loop.model.layers[1][0]
    layer.weight.register_hook(lambda g: g * (200.0 if loop.count >= 20 and loop.count % 2 else 1.0))
    folder = shaken(tmp_path, loop, controls=ON, gradloc="off")
    assert len(calls) == 3
    state = series(folder, "control_state", control="layerclip")
    assert (state[19], state[30]) == (3, 1)


def test_a_plain_loop_s_controls_of_the_loss_look_on(tmp_path: Path) -> None:
    loop = Loop()
    with watch(model=loop.model, runs=tmp_path, name="run", controls={"tokenclip": "on", "seqclip": "auto"}) as run:
        assert (run.controls["tokenclip"], run.controls["seqclip"]) == ("observing", "observing")


def test_off_computes_nothing(tmp_path: Path) -> None:
    loop = Loop()
    with watch(model=loop.model, runs=tmp_path, name="run", controls="off") as run:
        loop.run = run
        loop.train(3)
    with RunStore.read(tmp_path / "run" / "run.db") as store:
        names = {reading.name for row in store.rows() for reading in row.readings}
    assert not names & {"control_effect_fraction", "layerclip_scale"}
    assert "control_state" in names


# -- no wrong clip ------------------------------------------------------------------------------------------------


def test_reading_the_norms_clips_nothing(tmp_path: Path) -> None:
    class Reading(Shaking):
        bound = math.inf

        def step(self, *args: Any, **kwargs: Any) -> None:
            run = self.run
            assert run is not None
            ours = run.clip_grad_norm_
            run.clip_grad_norm_ = lambda _: ours(math.inf)  # type: ignore[method-assign,assignment]
            super().step(*args, **kwargs)
            del run.clip_grad_norm_

    loop = Reading(at=20)
    folder = shaken(tmp_path, loop, controls=ON)
    assert acted(folder) == []
    assert any("with a finite max_norm" in e.message for e in events(folder, "degraded"))


def test_layers_that_vanish_do_not_get_the_others_clipped() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(5)))
    clip = LayerClip(model)
    random = np.random.default_rng(0)

    def step(sizes: list[float]) -> Any:
        for p, size in zip(model.parameters(), sizes, strict=True):
            p.grad = torch.full_like(p, size / 4 * float(np.exp(random.normal(0, 0.1))))
        return clip.clip_()

    for _ in range(40):
        assert not step([1.0] * 5).acts
    assert not step([1e-4, 1e-4, 1e-4, 1.0, 1.0]).acts
    assert step([1.0, 1.0, 1.0, 1.0, 50.0]).clipped == ("4",)


def test_a_parameter_that_is_given_twice_is_scaled_once() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(5)))
    clip = LayerClip(model, warmup=4)
    twice: list[Tensor] = [*model.parameters(), model[2].weight]
    for _ in range(8):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        clip.clip_(twice)
    model[2].weight.grad = torch.full((4, 4), 1000.0)
    clip.clip_(twice)
    assert float(model[2].weight.grad.max()) == pytest.approx(1.0, rel=0.01)


def test_a_second_part_of_the_parameters_is_none_of_its_business_and_that_is_said(tmp_path: Path) -> None:
    loop = Loop()
    parts = [list(loop.model.embed.parameters()), list(loop.model.layers.parameters())]
    with watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run") as run:
        for _ in range(2):
            with run.step():
                batch = loop.batch()
                loop.loss(batch).backward()
                for part in parts:
                    run.clip_grad_norm_(1.0, part)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert any("LayerClip knows and clips no other" in e.message for e in events(tmp_path / "run", "degraded"))


class OwnLoss(EngineGRPOTrainer):
    """Reads its inputs as it likes."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        assert inputs["advantages"].dim() == 1
        return super()._compute_loss(model, inputs)


def test_a_trainer_with_a_loss_of_its_own_is_left_alone(tmp_path: Path) -> None:
    def trained(watched: bool) -> Any:
        torch.manual_seed(0)
        trainer: Any = tiny.trainer(tmp_path, steps=4, cls=OwnLoss)
        trainer.fault = PlantedFault(step=2, ratio=1e4, after=1)
        if watched:
            controls = {"tokenclip": "on", "seqclip": "on", "cleanratio": "on", "layerclip": "observe"}
            with watch(trainer, runs=tmp_path / "runs", name="run", controls=controls):
                trainer.train()
        else:
            trainer.train()
        return tiny.fingerprint(trainer.model), tiny.losses(trainer)

    assert trained(True) == trained(False)
    folder = tmp_path / "runs" / "run"
    said = [e.message for e in events(folder, "degraded")]
    for control in ("tokenclip", "seqclip", "cleanratio"):
        assert any(f"{control} is on and does nothing: the trainer has a _compute_loss of its own" in m for m in said)
        assert set(series(folder, "control_state", control=control).values()) == {1}
