"""TokenClip, SeqClip and the clean ratio in TRL's own loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from seismograd import RunStore, watch
from seismograd.controls.policy import Policy
from seismograd.controls.trl_inputs import ControlledInputs, LossKind
from seismograd.demo.faults import PlantedFault
from seismograd.demo.trainer import EngineGRPOTrainer
from tests import tiny
from tests.test_controls_hook import events, series

STEP = 3


def planted(tmp_path: Path, ratio: float = 1e4, **settings: Any) -> tuple[Any, Path]:
    torch.manual_seed(0)
    trainer: Any = tiny.trainer(tmp_path, steps=4, cls=Remembering, learning_rate=1e-4, **settings.pop("config", {}))
    trainer.fault = PlantedFault(step=STEP, ratio=ratio, after=1)
    with watch(trainer, runs=tmp_path / "runs", name="run", probes={"shadow": 1}, **settings):
        trainer.train()
    assert trainer.planted is not None
    folder = tmp_path / "runs" / "run"
    assert events(folder, "fault") == []
    return trainer, folder


def largest_weight(folder: Path, step: int) -> float:
    return series(folder, "loss_weight", stat="abs_max")[step]


def tokens(trainer: Any) -> float:
    """Share of the step's tokens that the sequence with the fault has."""
    masks = trainer.masks[trainer.planted.step]
    return float(masks[trainer.planted.row].sum() / masks.sum())


class Remembering(EngineGRPOTrainer):
    """Keeps each step's completion mask."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.masks = {**getattr(self, "masks", {}), self.state.global_step + 1: inputs["completion_mask"]}
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(
    ("controls", "left"),
    [
        ("observe", 1e4),
        ({"tokenclip": "on"}, 2.0),
        ({"tokenclip": "on", "tokenclip.cap": 3.0}, 3.0),
        ({"tokenclip": "on", "tokenclip.method": "icepop"}, 0.0),
    ],
)
def test_a_corrupt_ratio_weighs_what_the_control_leaves_of_it(tmp_path: Path, controls: Any, left: float) -> None:
    """dL/dlogp of the token is left * |A| over the loss's normaliser, the rest of the step as it was."""
    trainer, folder = planted(tmp_path, controls=controls)
    step = trainer.planted.step
    whole, theirs = planted(tmp_path / "without", controls="off")
    assert whole.planted == trainer.planted
    one = largest_weight(theirs, step) / 1e4  # what a ratio of 1 would give the token
    largest = largest_weight(folder, step)
    if left > 1.5:  # it is still the step's largest
        assert largest == pytest.approx(left * one, rel=1e-3)
    else:
        assert largest < 1.5 * one
    taken = series(folder, "gradient_taken_fraction", reason="tokenclip")
    assert (taken.get(step, 0.0) > 0) == (left == 0)


def test_what_would_have_been_is_a_metric_whatever_is_on(tmp_path: Path) -> None:
    trainer, folder = planted(tmp_path, controls="observe")
    for name in ("tis", "icepop"):
        effect = series(folder, "control_effect_fraction", control=name)
        assert effect[trainer.planted.step] > 0
        assert effect[trainer.planted.step - 1] == 0


def test_a_sequence_is_left_out_whole(tmp_path: Path) -> None:
    trainer, folder = planted(tmp_path, ratio=1e9, controls={"seqclip": "on"})
    step = trainer.planted.step
    assert series(folder, "gradient_taken_fraction", reason="seqclip")[step] == pytest.approx(tokens(trainer))
    assert largest_weight(folder, step) < 2 * largest_weight(folder, step - 1)


def test_the_clean_ratio_leaves_no_phantom_clipping(tmp_path: Path) -> None:
    """A clip that is narrower than the gap of precision takes tokens away, and none with the clean ratio."""

    def phantom(controls: Any) -> tuple[list[float], list[float]]:
        trainer = tiny.trainer(tmp_path, steps=4, epsilon=0.002)
        with watch(trainer, runs=tmp_path / "runs", probes={"shadow": 1}, controls=controls) as run:
            trainer.train()
        assert run.folder is not None
        assert events(run.folder, "fault") == []
        beta = series(run.folder, "beta_abs_mean")
        return list(series(run.folder, "clip_fraction", cell="phantom", ratio="ppo").values()), list(beta.values())

    without, gap = phantom("observe")
    ours, same_gap = phantom({"cleanratio": "on"})
    assert min(without) > 0.02
    assert max(ours) == 0.0
    assert gap[0] == same_gap[0] > 0.002


def test_a_trainer_without_an_engine_is_told(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=2, cls=GRPOTrainer)
    plain = tiny.trainer(tmp_path, steps=2, cls=GRPOTrainer)
    plain.train()
    torch.manual_seed(0)
    trainer = tiny.trainer(tmp_path, steps=2, cls=GRPOTrainer)
    with watch(trainer, runs=tmp_path / "runs", name="run", controls={"tokenclip": "on", "cleanratio": "on"}):
        trainer.train()
    said = [e.message for e in events(tmp_path / "runs" / "run", "degraded")]
    assert any("tokenclip is on and does nothing" in m for m in said)
    assert any("cleanratio is on and does nothing" in m for m in said)
    assert tiny.fingerprint(trainer.model) == tiny.fingerprint(plain.model)


def test_a_plain_loop_is_told_at_watch_time(tmp_path: Path) -> None:
    with watch(model=tiny.PlainModel(), runs=tmp_path, name="run", controls={"tokenclip": "auto"}):
        pass
    (said,) = events(tmp_path / "run", "degraded")
    assert said.message.startswith("tokenclip: a plain loop's loss is its own")


# -- the three places of the engine's log-probs, on the inputs alone ----------------------------------------------


def inputs(**more: Any) -> dict[str, Any]:
    made = {
        "completion_mask": torch.ones(2, 3),
        "advantages": torch.tensor([1.0, -1.0]),
        "sampling_per_token_logps": torch.full((2, 3), -2.0),
    }
    return {**made, **more}


def ran(given: dict[str, Any], on: list[str], loss: LossKind | None = None, **policy: Any) -> ControlledInputs:
    controlled = ControlledInputs(given, Policy.of(policy), on, loss or LossKind())
    now = torch.tensor([[9.0, -2.0, -2.0, math.log(8) - 2], [9.0, -2.0, -2.0, -2.0]])
    controlled.forward_ran(slice(0, 2), now, lambda: now - 0.5, lambda _: nullcontext())
    return controlled


def ratios(controlled: ControlledInputs) -> list[list[float]]:
    """The PPO ratios that the loss will see."""
    now = torch.tensor([[-2.0, -2.0, math.log(8) - 2], [-2.0, -2.0, -2.0]])
    found: list[list[float]] = (now - controlled.inputs["old_per_token_logps"]).exp().tolist()
    return found


@pytest.mark.parametrize(
    ("policy", "left"), [({}, 2.0), ({"tokenclip.cap": 3.0}, 3.0), ({"tokenclip.method": "icepop"}, 0.0)]
)
def test_where_the_ratio_compares_with_the_engine_it_becomes_the_weight(policy: Any, left: float) -> None:
    given = inputs(old_per_token_logps=torch.full((2, 3), -2.0))
    controlled = ran(given, ["tokenclip"], **policy)
    assert ratios(controlled)[0] == pytest.approx([1.0, 1.0, left])
    assert ratios(controlled)[1] == [1.0, 1.0, 1.0]
    assert controlled.inputs["advantages"].tolist() == [[1.0] * 3, [-1.0] * 3]
    assert given["old_per_token_logps"].tolist() == [[-2.0] * 3] * 2


def test_where_no_ratio_does_the_advantage_takes_the_weight() -> None:
    given = inputs(old_per_token_logps=torch.tensor([[-2.0, -2.0, math.log(8) - 2], [-2.0, -2.0, math.log(0.25) - 2]]))
    controlled = ran(given, ["tokenclip"])
    assert controlled.inputs["advantages"].flatten().tolist() == pytest.approx([1.0, 1.0, 2.0, -1.0, -1.0, -0.25])
    assert ran(inputs(), ["tokenclip"]).inputs["advantages"][0].tolist() == pytest.approx([1.0, 1.0, 2.0])
    assert given["advantages"].tolist() == [1.0, -1.0]


def test_where_the_loss_corrects_its_own_bounds_stay() -> None:
    old = torch.tensor([[-2.0, -2.0, math.log(8) - 2], [-2.0, -2.0, -2.0]])
    by_token = torch.tensor([[1.0, 0.0, 3.0], [1.0, 0.5, 1.0]])
    given = inputs(old_per_token_logps=old, importance_sampling_ratio=by_token)
    controlled = ran(given, ["tokenclip"], LossKind(corrected=True))
    assert controlled.inputs["importance_sampling_ratio"].tolist() == [[1.0, 0.0, 2.0], [1.0, 0.5, 1.0]]
    for mine, left in ((torch.tensor([[2.0], [0.0]]), 0.5), (torch.tensor([[0.0], [1.0]]), 0.0)):
        given = inputs(old_per_token_logps=old, importance_sampling_ratio=mine)
        found = ran(given, ["tokenclip"], LossKind(corrected=True)).inputs["importance_sampling_ratio"]
        assert found[0].tolist() == pytest.approx([float(mine[0]), float(mine[0]), left])
        assert found[1].tolist() == [float(mine[1])] * 3
    icepop = ran(given, ["tokenclip"], LossKind(corrected=True), **{"tokenclip.method": "icepop"})
    assert icepop.left_out["tokenclip"].tolist() == [[False, False, True], [False, False, False]]


def test_the_gap_is_taken_out_of_the_ratio_s_reference() -> None:
    controlled = ran(inputs(old_per_token_logps=torch.full((2, 3), -2.0)), ["cleanratio", "tokenclip"])
    # log r = alpha: 0 - 0.5 everywhere, but ln 8 - 0.5 at the last token of the first row, which is capped
    assert ratios(controlled) == [pytest.approx([math.exp(-0.5)] * 2 + [2.0]), pytest.approx([math.exp(-0.5)] * 3)]


@pytest.mark.parametrize(
    ("loss", "name", "reason"),
    [
        (LossKind(own=False), "tokenclip", "_compute_loss of its own"),
        (LossKind(own=False), "seqclip", "_compute_loss of its own"),
        (LossKind(by_token=False), "tokenclip", "use seqclip"),
        (LossKind(corrected=True, whole=True), "tokenclip", "vespo"),
        (LossKind(shadowed=False), "cleanratio", "no shadow forward"),
    ],
)
def test_where_it_could_only_do_wrong_it_does_nothing_and_says_why(loss: LossKind, name: str, reason: str) -> None:
    given = inputs(old_per_token_logps=torch.full((2, 3), -2.0), importance_sampling_ratio=torch.ones(2, 3))
    controlled = ran(given, [name], loss)
    assert reason in controlled.idle[name]
    assert all(controlled.inputs[key] is given[key] for key in given)


def test_a_fault_of_one_control_is_not_the_others() -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("no")

    failed: list[str] = []

    @contextmanager
    def fence(name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            failed.append(name)

    given = inputs(old_per_token_logps=torch.full((2, 3), -2.0))
    controlled = ControlledInputs(given, Policy.of({}), ["cleanratio", "tokenclip"], LossKind())
    now = torch.tensor([[9.0, -2.0, -2.0, math.log(8) - 2], [9.0, -2.0, -2.0, -2.0]])
    controlled.forward_ran(slice(0, 2), now, broken, fence)
    assert failed == ["cleanratio"]
    assert ratios(controlled)[0] == pytest.approx([1.0, 1.0, 2.0])


def test_the_engine_s_nan_does_not_hide_that_the_ratio_compares_with_it() -> None:
    engine = torch.full((2, 3), -2.0)
    engine[1, 1] = math.nan
    given = inputs(sampling_per_token_logps=engine, old_per_token_logps=engine.clone())
    assert ratios(ran(given, ["tokenclip"]))[0] == pytest.approx([1.0, 1.0, 2.0])


def test_tool_tokens_and_padding_are_left_alone() -> None:
    given = inputs(
        completion_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]), tool_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        old_per_token_logps=torch.full((2, 3), -2.0),
    )  # fmt: skip
    controlled = ran(given, ["tokenclip", "cleanratio"])
    assert controlled.inputs["advantages"].tolist() == [[1.0] * 3, [-1.0] * 3]
    assert controlled.inputs["old_per_token_logps"].tolist() == [[-1.5, -1.5, -2.0], [-1.5, -1.5, -2.0]]


def test_a_log_prob_that_is_not_finite_stays_out_of_the_others(tmp_path: Path) -> None:
    engine = torch.full((2, 3), -2.0)
    engine[0, 2] = -math.inf
    given = inputs(sampling_per_token_logps=engine, old_per_token_logps=engine.clone())
    controlled = ran(given, ["tokenclip"], **{"tokenclip.method": "icepop"})
    assert ratios(controlled)[0][:2] == [1.0, 1.0]
    assert ratios(controlled)[0][2] == pytest.approx(0.0)
    assert controlled.left_out["tokenclip"].tolist() == [[False, False, True], [False, False, False]]


def test_the_stored_run_can_be_read(tmp_path: Path) -> None:
    _, folder = planted(tmp_path, controls={"tokenclip": "on"})
    with RunStore.read(folder / "run.db") as store:
        assert dict(store.series("control_state", control="tokenclip")) == dict.fromkeys(range(1, 5), 3)
