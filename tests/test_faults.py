"""No fault of ours reaches training: an exception in each part is tried, and is counted and shown."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

import seismograd.telemetry.hub as hub_module
from seismograd import Event, Row, RunInfo, RunStore, watch
from tests import tiny
from tests.test_trl import same, trained

# The part under which a fault is counted, and the function that is made to raise.
PLACES = [
    ("norms", "seismograd.collectors.monitor.take_norms"),
    ("probe_shadow", "seismograd.collectors.probes.shadow_logp"),
    ("probe_deployed", "seismograd.collectors.probes.improvement"),
    ("probe_geometry", "seismograd.collectors.probes.geometry"),
    ("probe_geometry", "seismograd.collectors.geometry.Sketches.add"),
    ("probe_geometry", "seismograd.collectors.geometry._Receiver.accepts"),
    ("probe_weights", "seismograd.collectors.weights.Sample.of"),
    ("probe_weights", "seismograd.collectors.weights.Sample.changed"),
    ("read_geometry", "seismograd.collectors.probes.geometry_readings"),
    ("read_weights", "seismograd.collectors.probes.weight_readings"),
    ("transfer", "seismograd.collectors.transfer.Transfer.fetch"),
    ("transfer", "seismograd.collectors.table.TokenTable.of"),
    ("transfer", "seismograd.telemetry.layers.Grouping.of"),
    ("detect", "seismograd.collectors.step.largest_sequence_pull"),
    ("detect", "seismograd.telemetry.detector._Watch.judge"),
    ("detect", "seismograd.telemetry.baselines.EnvelopeState.judge"),
    ("detect_worker", "seismograd.telemetry.baselines.RobustState.judge"),
    ("handover", "seismograd.telemetry.hub.Hub.put"),
    ("handover", "seismograd.collectors.budget.ProbeBudget.trained"),
    ("step", "seismograd.collectors.budget.ProbeBudget.due"),
    ("handover", "seismograd.collectors.budget.ProbeBudget.spacings"),
    ("transfer", "seismograd.collectors.budget.ProbeBudget.spent"),
    ("step", "seismograd.collectors.budget.ProbeBudget.ran"),
    ("step", "seismograd.collectors.probes.Stopwatch"),
    ("step", "seismograd.collectors.monitor.StepMonitor._judge"),
    ("adapter", "seismograd.collectors.trainers.trl.GRPOAdapter._batch"),
    ("adapter", "seismograd.collectors.trainers.trl.GRPOAdapter._staleness"),
    ("clip_settings", "seismograd.collectors.trainers.trl.clip_specs"),
    ("adapter", "seismograd.collectors.monitor.StepMonitor.caught"),
    ("adapter", "seismograd.collectors.trainers.trl.ForwardState.take"),
    ("gradloc", "seismograd.localiser.localize"),
    ("gradloc", "seismograd.gradloc.localisation.find"),
    ("gradloc", "seismograd.gradloc.tokens.Tokens.of"),
    ("gradloc", "seismograd.localiser.GradLoc._told"),
    ("incident", "seismograd.gradloc.folder.IncidentFolder.__call__"),
    ("ratio", "seismograd.collectors.ratio.alpha"),
    ("log_ratio", "seismograd.collectors.ratio.stats"),
    ("effective_sample", "seismograd.collectors.effective.effective_sample_size"),
    ("sequences", "seismograd.collectors.sequences._taken"),
    ("surrogate", "seismograd.collectors.surrogate._terms"),
    ("clipping", "seismograd.collectors.clipping.actual_log_ratio"),
    ("loss_weight", "seismograd.collectors.ratio.largest_sequence_pull"),
    ("gradients", "seismograd.collectors.signals.layer_proportions"),
    ("nonfinite", "seismograd.collectors.signals.nonfinite_counts"),
    ("worker", "seismograd.collectors.signals.SignalWorker._own_cost"),
    ("sink:store", "seismograd.telemetry.sinks.store.StoreSink.write"),
    ("sink:prometheus", "seismograd.telemetry.sinks.prometheus.PrometheusSink.write"),
]


class Broken(RuntimeError):
    """The fault that is planted."""


def _break(*_: Any, **__: Any) -> Any:
    raise Broken("planted")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tiny.trainer(tmp_path_factory.mktemp("honest"), steps=5, dropout=0.1))


@pytest.mark.parametrize(("part", "place"), PLACES, ids=[place.removeprefix("seismograd.") for _, place in PLACES])
def test_fault_is_fenced_counted_and_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    honest: Any,
    part: str,
    place: str,
) -> None:
    caplog.set_level(logging.WARNING, "seismograd")
    monkeypatch.setattr(hub_module, "_RETRIES", (0.0, 0.0))
    trainer = tiny.trainer(tmp_path, steps=5, dropout=0.1)
    probes = tiny.EVERY_STEP
    with watch(trainer, runs=tmp_path / "runs", name="run", probes=probes, prometheus=0, gradloc="every") as run:
        monkeypatch.setattr(place, _break)
        assert same(trained(trainer), honest)
        counts = run._worker._faults.counts()
        assert run.flush()
        counts = run._worker._faults.counts()
    assert counts[part] >= 1
    assert "planted" in caplog.text
    if part != "sink:store":
        with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
            shown = [event for event in store.events("fault") if event.data["part"] == part]
        assert "training is not affected" in shown[0].message
        assert "Broken: planted" in shown[0].data["traceback"]


# Where an exception becomes a note or an attempt of an incident, not a fault.
IN_INCIDENTS = [
    "seismograd.gradloc.localisation.ModelReplay",
    "seismograd.gradloc.attribution._difference",
    "seismograd.gradloc.localisation.verify",
    "seismograd.gradloc.verification._Own.take",
    "seismograd.gradloc.localisation.sequence_shares",
    "seismograd.gradloc.replay.ModelReplay.forward",
    "seismograd.gradloc.replay.ModelReplay.backward",
]


class Recording:
    """A user's own sink that keeps what it is given."""

    name = "recording"

    def __init__(self) -> None:
        self.given: list[str] = []

    def open(self, run: RunInfo) -> None:
        self.given.append(repr(run))

    def write(self, row: Row) -> None:
        self.given.append(repr(row))

    def event(self, event: Event) -> None:
        self.given.append(repr(event))

    def close(self) -> None:
        pass


def _tell(*_: Any, **__: Any) -> Any:
    """As a tokenizer or a kernel may: with text and ids in the exception, in its note and in its cause."""
    text = " ".join(["SECRET", "PROMPT"])
    ids = ", ".join(map(str, range(90210, 90214)))
    try:
        raise KeyError(f"{text} [{ids}]")
    except KeyError as e:
        error = Broken(f"cannot decode\n{text} Error: [{ids}]")
        error.add_note(text)
        raise error from e


@pytest.mark.parametrize(
    "place", [*dict.fromkeys(place for _, place in PLACES), *IN_INCIDENTS], ids=lambda p: p.removeprefix("seismograd.")
)
def test_text_none_keeps_what_exceptions_say_out_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any, place: str
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(hub_module, "_RETRIES", (0.0, 0.0))
    trainer = tiny.trainer(tmp_path, steps=5, dropout=0.1)
    sink = Recording()
    settings: dict[str, Any] = {"probes": tiny.EVERY_STEP, "gradloc": "every", "text": "none"}
    with watch(trainer, runs=tmp_path / "runs", name="run", sinks=[sink], prometheus=0, **settings) as run:
        monkeypatch.setattr(place, _tell)
        trainer.train()
        monkeypatch.undo()
        assert run.flush()
    files = [file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    said = "\n".join([*sink.given, caplog.text, *capfd.readouterr(), *(f.decode(errors="replace") for f in files)])
    assert "SECRET" not in said
    assert "90210, 90211" not in said
    # What fails on one rank is raised on all, as an error of ours.
    raised = {
        "seismograd.gradloc.localisation.find": "RuntimeError",
        "seismograd.gradloc.tokens.Tokens.of": "ValueError",
    }
    assert re.search(rf"{raised.get(place, 'Broken')} at \S+\.py:\d+ in \w+", said)


class BrokenSink:
    """A user's own sink that fails in every method."""

    name = "broken"

    def open(self, run: RunInfo) -> None:
        raise Broken("planted")

    def write(self, row: Row) -> None:
        raise Broken("planted")

    def event(self, event: Event) -> None:
        raise Broken("planted")

    def close(self) -> None:
        raise Broken("planted")


def test_sink_of_the_user_s_own(tmp_path: Path, honest: Any) -> None:
    trainer = tiny.trainer(tmp_path, steps=5, dropout=0.1)
    with watch(trainer, runs=tmp_path / "runs", name="run", sinks=[BrokenSink()]):
        assert same(trained(trainer), honest)
    with RunStore.read(tmp_path / "runs" / "run" / "run.db") as store:
        assert store.series("step") == [(i, i) for i in range(1, 6)]
        assert [event.data["part"] for event in store.events("fault")] == ["sink:broken"]


def test_interrupt_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    trainer = tiny.trainer(tmp_path, steps=5)
    with watch(trainer, runs=tmp_path / "runs"):
        monkeypatch.setattr("seismograd.collectors.monitor.take_norms", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
