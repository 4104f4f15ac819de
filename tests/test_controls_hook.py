"""Controls in a watched run: they act in the step that fired, say so, and change nothing before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from torch import nn

from seismograd import Event, RunStore, watch
from seismograd.demo.faults import LayerFault, PlantedFault
from seismograd.demo.trainer import EngineGRPOTrainer
from seismograd.gradloc import Incident
from tests import tiny
from tests.test_plain import Loop

FAULTY = 16


def trainer(tmp_path: Path, steps: int = 18, layer: bool = True, **config: Any) -> Any:
    """GRPO on five layers; before the third, a residual stream cancels out in one step."""
    torch.manual_seed(0)
    made: Any = tiny.trainer(
        tmp_path, steps=steps, cls=EngineGRPOTrainer, learning_rate=1e-4, net=tiny.model(layers=5), **config
    )
    if layer:
        made.layer_fault = LayerFault(step=FAULTY, layer=2, after=8)
    return made


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def events(folder: Path, kind: str) -> list[Event]:
    with RunStore.read(folder / "run.db") as store:
        return store.events(kind)


def series(folder: Path, name: str, **labels: str) -> dict[int, float]:
    with RunStore.read(folder / "run.db") as store:
        return dict(store.series(name, **labels))


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(trainer, run folder) with the default controls, but a shorter warm-up."""
    folder = tmp_path_factory.mktemp("protected")
    made = trainer(folder)
    with watch(made, runs=folder / "runs", name="run", controls={"layerclip.warmup": 8}):
        made.train()
    return made, folder / "runs" / "run"


def test_an_exploding_layer_switches_layerclip_on_in_its_own_step(protected: Any) -> None:
    made, folder = protected
    step = made.planted_layer.step
    (change,) = events(folder, "control")
    assert (change.step, change.data["control"], change.data["after"]) == (step, "layerclip", "on")
    assert "verdict B" in change.data["reason"]
    state = series(folder, "control_state", control="layerclip")
    assert {n: x for n, x in state.items() if n < step} == dict.fromkeys(range(1, step), 2)
    assert {n: x for n, x in state.items() if n >= step} == dict.fromkeys(range(step, 19), 3)
    assert events(folder, "fault") == []


def test_it_clips_the_layers_before_the_fault_and_no_other(protected: Any) -> None:
    made, folder = protected
    step = made.planted_layer.step
    scales = {layer: series(folder, "layerclip_scale", layer=layer) for layer in ("embedding", *"01234", "norm")}
    assert {layer for layer, scale in scales.items() if scale[step] < 1} == {"embedding", "0", "1"}
    assert all(scale[step] < 0.1 for layer, scale in scales.items() if layer in ("embedding", "0", "1"))
    honest = [n for n in range(1, 19) if n != step]
    assert {scale[n] for scale in scales.values() for n in honest} == {1.0}


def test_the_incident_says_what_it_did(protected: Any) -> None:
    made, folder = protected
    (path,) = (folder / "incidents").glob("*.json")
    incident = Incident.from_json(path.read_text())
    assert (incident.verdict, incident.step) == ("B", made.planted_layer.step)
    done = incident.controls["layerclip"]
    assert set(done["scales"]) == {"embedding", "0", "1"}
    assert done["acted"] is True
    assert "verdict B" in done["switched_on"]
    assert done["grad_norm"] < 0.1 * incident.grad_norm
    assert "switched on" in path.with_suffix(".html").read_text()


def test_the_reported_norm_is_the_one_before_clipping(protected: Any) -> None:
    made, folder = protected
    step = made.planted_layer.step
    logged = [log["grad_norm"] for log in made.state.log_history if "grad_norm" in log]
    norms = series(folder, "grad_norm", layer="all", group="all")
    assert logged[step - 1] == pytest.approx(norms[step], rel=1e-3)
    assert norms[step] > 20 * norms[step - 1]


def test_the_healthy_layers_keep_their_update(tmp_path: Path) -> None:
    """With the global clip alone they get next to nothing."""

    def kept(controls: Any) -> float:
        """|g| of the healthy layers after the step's clip over before."""
        made = trainer(tmp_path, max_grad_norm=20.0)  # which honest steps do not reach
        healthy = [p for n, p in made.model.named_parameters() if any(f"layers.{i}." in n for i in (2, 3, 4))]
        found: list[float] = []

        def size() -> float:
            return math.sqrt(sum(float(p.grad.square().sum()) for p in healthy if p.grad is not None))

        with watch(made, runs=tmp_path / "runs", controls=controls):
            ours = made.accelerator.clip_grad_norm_

            def spied(*args: Any) -> Any:
                before = size()
                result = ours(*args)
                if made.planted_layer is not None and not found:
                    found.append(size() / before)
                return result

            made.accelerator.clip_grad_norm_ = spied
            made.train()
            made.accelerator.clip_grad_norm_ = ours
        return found[0]

    assert kept({"layerclip.warmup": 8}) == 1.0
    assert kept("observe") < 0.1


def test_under_observe_the_whole_run_is_bit_identical_and_says_what_would_have_been(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "a")
    plain.train()
    watched = trainer(tmp_path / "b")
    with watch(watched, runs=tmp_path / "runs", name="run", controls="observe"):
        watched.train()
    assert tiny.fingerprint(watched.model) == tiny.fingerprint(plain.model)
    assert tiny.losses(watched) == tiny.losses(plain)
    folder = tmp_path / "runs" / "run"
    assert events(folder, "control") == []
    assert set(series(folder, "control_state", control="layerclip").values()) == {1}


def test_by_default_the_run_is_bit_identical_until_the_control_acts(tmp_path: Path) -> None:
    def at_each_step(watched: bool) -> list[str]:
        made = trainer(tmp_path)
        found: list[str] = []
        before = made.accelerator.clip_grad_norm_

        def spied(*args: Any) -> Any:
            found.append(tiny.fingerprint(made.model))
            return before(*args)

        made.accelerator.clip_grad_norm_ = spied
        if watched:
            with watch(made, runs=tmp_path / "runs", name="run", controls={"layerclip.warmup": 8}):
                made.accelerator.clip_grad_norm_, before = spied, made.accelerator.clip_grad_norm_
                made.train()
                made.accelerator.clip_grad_norm_ = before
        else:
            made.train()
        return [*found, tiny.fingerprint(made.model)]

    plain, ours = at_each_step(False), at_each_step(True)
    assert ours[:FAULTY] == plain[:FAULTY]
    assert ours[FAULTY] != plain[FAULTY]  # weights after the step with the fault


def test_a_corrupt_ratio_is_no_business_of_layerclip(tmp_path: Path) -> None:
    made = trainer(tmp_path, layer=False)
    made.fault = PlantedFault(step=FAULTY, ratio=1e4)
    with watch(made, runs=tmp_path / "runs", name="run", controls={"layerclip.warmup": 8, "tokenclip": "auto"}):
        made.train()
    assert made.planted is not None
    found = events(tmp_path / "runs" / "run", "control")
    assert [(e.step, e.data["control"], e.data["reason"]) for e in found] == [
        (made.planted.step, "tokenclip", "verdict A.1")
    ]


def test_where_another_clips_it_says_so_at_watch_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path)
    monkeypatch.setattr(type(made.accelerator), "distributed_type", DistributedType.DEEPSPEED)
    with watch(made, runs=tmp_path / "runs", name="run"):
        pass
    said = [e.message for e in events(tmp_path / "runs" / "run", "degraded")]
    assert any("LayerClip" in message and "DEEPSPEED reduces and clips gradients itself" in message for message in said)


# -- the plain loop -----------------------------------------------------------------------------------------------


class Shaking(Loop):
    """The second layer's gradient explodes at one step, by a hook that no replay sees."""

    def __init__(self, at: int, size: float = 200.0) -> None:
        super().__init__()
        self.at, self.size, self.count = at, size, 0
        layer: Any = self.model.layers[1][0]
        layer.weight.register_hook(lambda g: g * self.size if self.count == self.at else g)

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1
        super().step(*args, **kwargs)


def shaken(tmp_path: Path, loop: Shaking, **settings: Any) -> Path:
    with watch(model=loop.model, optimizer=loop.optimizer, runs=tmp_path, name="run", **settings) as run:
        loop.run = run
        loop.train(30)
    return tmp_path / "run"


@pytest.mark.parametrize("gradloc", ["auto", "off"])
@pytest.mark.parametrize("reference", ["peers", "history"])
def test_a_spike_of_unknown_kind_with_one_layer_out_of_proportion(tmp_path: Path, gradloc: str, reference: str) -> None:
    loop = Shaking(at=24)
    folder = shaken(tmp_path, loop, gradloc=gradloc, controls={"layerclip.reference": reference})
    (change,) = events(folder, "control")
    assert (change.step, change.data["control"]) == (24, "layerclip")
    assert {layer for layer in ("embedding", "0", "1", "2", "head")
            if series(folder, "layerclip_scale", layer=layer)[24] < 1} == {"1"}  # fmt: skip
    assert loop.norms[23] > 20 * loop.norms[22]


def test_a_plain_loop_under_observe_is_bit_identical(tmp_path: Path) -> None:
    plain = Shaking(at=24)
    plain.train(30)
    loop = Shaking(at=24)
    folder = shaken(tmp_path, loop, controls="observe")
    assert loop.norms == plain.norms
    assert tiny.fingerprint(loop.model) == tiny.fingerprint(plain.model)
    assert series(folder, "layerclip_scale", layer="1")[24] < 0.1
    assert series(folder, "control_state", control="layerclip")[24] == 1


def test_it_hands_back_when_its_hold_is_over(tmp_path: Path) -> None:
    folder = shaken(tmp_path, Shaking(at=20), controls={"layerclip.hold": 5})
    assert [(e.step, e.data["after"]) for e in events(folder, "control")] == [(20, "on"), (25, "armed")]
    assert [series(folder, "control_state", control="layerclip")[n] for n in (19, 20, 24, 25)] == [2, 3, 3, 2]


def test_a_step_that_is_not_finite_is_skipped_while_it_is_on(tmp_path: Path) -> None:
    loop = Shaking(at=24, size=math.nan)
    before: list[list[torch.Tensor]] = []
    loop.optimizer.register_step_pre_hook(lambda *_: before.append(weights(loop.model)))
    after: list[list[torch.Tensor]] = []
    loop.optimizer.register_step_post_hook(lambda *_: after.append(weights(loop.model)))
    folder = shaken(tmp_path, loop, controls={"layerclip": "on"})
    assert all(torch.equal(a, b) for a, b in zip(before[23], after[23], strict=True))
    assert all(p.isfinite().all() for p in loop.model.parameters())
    assert math.isnan(loop.norms[23])
    assert events(folder, "fault") == []


def test_an_armed_layerclip_leaves_a_step_that_is_not_finite_alone(tmp_path: Path) -> None:
    """Kind N is none that it is switched on by: training is what it was without the hook."""
    plain, loop = Shaking(at=24, size=math.inf), Shaking(at=24, size=math.inf)
    plain.train(30)
    shaken(tmp_path, loop)
    assert [str(x) for x in loop.norms] == [str(x) for x in plain.norms]


def test_state_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = Shaking(at=99)
    with watch(model=first.model, optimizer=first.optimizer, runs=tmp_path, name="first") as run:
        first.run = run
        first.train(24)
        state = json.loads(json.dumps(run.state_dict()))
    second = Shaking(at=3)
    with watch(model=second.model, optimizer=second.optimizer, runs=tmp_path, name="second") as run:
        run.load_state_dict(state)
        second.run = run
        second.train(6)
    assert [e.step for e in events(tmp_path / "second", "control")] == [3]


def test_a_resumed_run_with_other_layers_says_which_begin_anew(tmp_path: Path) -> None:
    loop, other = Loop(), Loop()
    with watch(model=loop.model, runs=tmp_path, name="first") as run:
        loop.run = run
        loop.train(3)
        state = run.state_dict()
    other.model.layers.append(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    with watch(model=other.model, runs=tmp_path, name="second") as run:
        run.load_state_dict(state)
    (said,) = events(tmp_path / "second", "degraded")
    assert said.message.endswith("warms up anew there: 3")


def test_a_fault_in_it_costs_nothing_but_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no")

    plain, loop = Shaking(at=24), Shaking(at=24)
    plain.train(30)
    monkeypatch.setattr("seismograd.controls.layerclip.LayerClip.judge", broken)
    folder = shaken(tmp_path, loop)
    assert loop.norms == plain.norms
    assert tiny.fingerprint(loop.model) == tiny.fingerprint(plain.model)
    assert "layerclip is switched off" in events(folder, "fault")[-1].message


def test_a_model_of_too_few_layers_is_told_at_watch_time(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with watch(model=model, runs=tmp_path, name="run") as run:
        assert run.controls["layerclip"] == "armed"
    (said,) = events(tmp_path / "run", "degraded")
    assert "trains 1: it clips none" in said.message
    for i, quiet in enumerate(("observe", {"layerclip.reference": "history"})):
        with watch(model=model, runs=tmp_path, name=f"quiet {i}", controls=quiet):
            pass
        assert events(tmp_path / f"quiet {i}", "degraded") == []


def test_a_loop_that_clips_by_itself_is_only_observed_and_says_so(tmp_path: Path) -> None:
    class Own(Shaking):
        def step(self, *args: Any, **kwargs: Any) -> None:
            run, self.run = self.run, None
            super().step(*args, **kwargs)
            self.run = run

    plain, loop = Own(at=24), Own(at=24)
    plain.train(30)
    folder = shaken(tmp_path, loop)
    assert tiny.fingerprint(loop.model) == tiny.fingerprint(plain.model)
    assert any("run.clip_grad_norm_" in e.message and "LayerClip" in e.message for e in events(folder, "degraded"))
