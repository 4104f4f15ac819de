"""`seismograd replay`: an incident localised again from its saved micro-batches and a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seismograd import watch
from seismograd.cli import main
from seismograd.demo.faults import PlantedFault
from seismograd.demo.trainer import EngineGRPOTrainer
from seismograd.gradloc import Incident
from tests import tiny


class Checkpointing(EngineGRPOTrainer):
    """Saves the weights of the step that the fault is planted in."""

    folder: Path

    def _plant(self, *args: Any) -> Any:
        batch = super()._plant(*args)
        if self.planted is not None:
            self._policy.save_pretrained(self.folder)
        return batch


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("replay")
    torch.manual_seed(0)
    trainer = tiny.trainer(folder, steps=18, cls=Checkpointing, learning_rate=1e-4)
    trainer.folder = folder / "checkpoint"
    trainer.fault = PlantedFault(step=15, ratio=1e4)
    with watch(trainer, runs=folder, name="run", save_batches=8):
        trainer.train()
    return trainer.planted, folder


def saved(planted: tuple[Any, Path]) -> Path:
    truth, folder = planted
    return folder / "run" / "incidents" / f"step-{truth.step:06d}.pt"


def test_same_token_again(planted: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth, folder = planted
    live = Incident.from_json(saved(planted).with_suffix(".json").read_text())
    file = tmp_path / "again.json"
    command = ["replay", str(saved(planted)), "--model", str(folder / "checkpoint"), "--json", str(file)]
    assert main(command) == 0
    again = Incident.from_json(file.read_text())
    assert (again.verdict, again.method, again.step) == ("A.1", "attribution", truth.step)
    assert (again.culprits[0].row, again.culprits[0].position) == (truth.row, truth.position)
    assert again.grad_norm == pytest.approx(live.grad_norm, rel=1e-3)
    assert again.culprits[0].share == pytest.approx(live.culprits[0].share, abs=0.01)
    shown = capsys.readouterr().out
    assert "A.1" in shown
    assert ": other weights than the step's" not in shown


def test_other_weights_are_said(planted: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(5)
    tiny.model().save_pretrained(tmp_path / "other")
    assert main(["replay", str(saved(planted)), "--model", str(tmp_path / "other")]) == 0
    assert "other weights than the step's" in " ".join(capsys.readouterr().out.split())


def test_bad_paths(planted: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "damaged.pt").write_bytes(b"no zip")
    checkpoint = str(planted[1] / "checkpoint")
    for path, model, said in (
        (tmp_path / "none.pt", checkpoint, "no such file"),
        (tmp_path / "damaged.pt", checkpoint, "damaged"),
        (saved(planted), str(tmp_path / "nowhere"), "no such folder"),
        (saved(planted), str(tmp_path), "seismograd replay:"),
    ):
        assert main(["replay", str(path), "--model", model]) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert shown.count("\n") == 1


def test_judged_by_the_run_s_own_thresholds(planted: tuple[Any, Path], tmp_path: Path) -> None:
    content = torch.load(saved(planted), weights_only=True)
    content["thresholds"]["token_log_ratio"] = 12.0
    torch.save(content, tmp_path / "strict.pt")
    command = ["replay", str(tmp_path / "strict.pt"), "--model", str(planted[1] / "checkpoint")]
    assert main([*command, "--json", str(tmp_path / "strict.json")]) == 0
    assert Incident.from_json((tmp_path / "strict.json").read_text()).verdict != "A.1"


def test_newer_version_and_size_cap(
    planted: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(saved(planted), weights_only=True)
    torch.save({**content, "schema_version": 99}, tmp_path / "new.pt")
    assert main(["replay", str(tmp_path / "new.pt"), "--model", str(planted[1] / "checkpoint")]) == 2
    assert "schema version 99" in capsys.readouterr().err
    trainer = tiny.trainer(tmp_path, steps=1)
    with watch(trainer, runs=tmp_path, name="small", gradloc="every", save_batches=1e-6):
        trainer.train()
    (file,) = (tmp_path / "small" / "incidents").glob("*.json")
    assert not file.with_suffix(".pt").exists()
    assert any("not saved" in note for note in Incident.from_json(file.read_text()).notes)


def test_nothing_is_kept_unless_asked(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, steps=1)
    with watch(trainer, runs=tmp_path, name="run", gradloc="every"):
        trainer.train()
    assert list((tmp_path / "run" / "incidents").glob("*.pt")) == []
