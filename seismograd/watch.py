"""The one hook. Joins the rooms for one run: settings, folder, sinks, hub, worker, monitor, adapter."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from seismograd.collectors.budget import PROBES, ProbeBudget, Spacing
from seismograd.collectors.controlling import OF_THE_LOSS
from seismograd.collectors.monitor import StepMonitor
from seismograd.collectors.probes import Setup
from seismograd.collectors.signals import SignalWorker
from seismograd.collectors.trainers import PLAIN_LOOP, Adapter, is_grpo_trainer, unsupported
from seismograd.collectors.trainers.plain import PlainLoop
from seismograd.config import Config
from seismograd.controls.policy import Policy
from seismograd.gradloc.folder import IncidentFolder
from seismograd.gradloc.replay import ModelReplay
from seismograd.gradloc.verdict import Thresholds
from seismograd.localiser import GradLoc, decoder
from seismograd.protection import Protection
from seismograd.run import Run
from seismograd.telemetry.detector import Detector
from seismograd.telemetry.faults import Faults, warn
from seismograd.telemetry.hub import Hub
from seismograd.telemetry.ranks import Alone, Ranks, meet
from seismograd.telemetry.records import ClipSpec, Event, RunInfo
from seismograd.telemetry.rules import RULES
from seismograd.telemetry.sinks import Sink
from seismograd.telemetry.sinks.prometheus import PrometheusSink
from seismograd.telemetry.sinks.store import StoreSink
from seismograd.telemetry.sinks.wandb import WandbSink

log = logging.getLogger("seismograd")


def watch(
    trainer: Any = None,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    runs: str | os.PathLike[str] | None = None,
    name: str | None = None,
    sinks: str | Sink | Sequence[str | Sink] | None = None,
    prometheus: int | str | None = None,
    budget: float | None = None,
    probes: Mapping[str, Spacing] | None = None,
    shadow: str | None = None,
    clip: ClipSpec | Sequence[ClipSpec] | tuple[float, float] | float | None = None,
    gradloc: str | None = None,
    text: str | None = None,
    save_batches: float | None = None,
    thresholds: Thresholds | Mapping[str, float] | None = None,
    controls: str | Mapping[str, Any] | Policy | None = None,
) -> Run:
    """Watch a run from now on.

    Call it with a trainer before ``trainer.train()``, or with a model (and its optimizer) in a loop of one's own; see
    `seismograd.Run` for what such a loop calls. Training is as without it, to the bit, until a control that is on acts:
    by default LayerClip, which switches itself on at a spike of kind B or of unknown kind, and says so. With
    controls="observe" none ever does.

    Args:
        trainer: a ``trl.GRPOTrainer``.
        model: the trained model of a plain loop.
        optimizer: of a plain loop; with it, steps that do not clip are watched as well.
        runs, name, sinks, prometheus, budget, probes, shadow, clip, gradloc, text, save_batches, thresholds,
            controls: see `seismograd.Config`, which also names the environment variable that stands for each.

    Returns:
        The run. A trainer that is watched already gives its run again, and says so.

    Raises:
        ConfigError: a setting that cannot be.
        UnsupportedTrainer: no adapter knows the trainer; the message says what is supported and what always works.
        TypeError: neither a trainer nor a model, or both.
    """
    if (trainer is None) == (model is None):
        raise TypeError(f"watch() takes a trainer, or a model: watch(trainer), or {PLAIN_LOOP}")
    given = {
        "runs": runs, "name": name, "sinks": sinks, "prometheus": prometheus,
        "budget": budget, "probes": probes, "shadow": shadow, "clip": clip, "gradloc": gradloc, "text": text,
        "save_batches": save_batches, "thresholds": thresholds, "controls": controls,
    }  # fmt: skip
    config = Config.resolve(given)
    alone = _world_size() == 1
    if model is not None:
        # One rank cannot know that a forward of the user's holds no collectives, so it runs none alone.
        by_itself = [c for c in OF_THE_LOSS if getattr(config.controls, c).mode in ("auto", "on")]
        config = replace(config, controls=_observing(config.controls, by_itself))
        run = _run(model, config, None, PROBES if alone else ("weights",), plain=True)
        _attach(run, PlainLoop(model, optimizer, config.clip, run))
        if by_itself:
            run.degraded(
                f"{', '.join(by_itself)}: a plain loop's loss is its own, so that these are observed only. Call "
                "seismograd.controls.tis, icepop, mis or clean_old_logp in it"
            )
        if not alone and _rank() == 0:
            run.degraded(
                "not measured in a plain loop of several processes: alpha, beta, SNR, clip cells, deployed "
                "improvement and the gradient's cosine; tokens are those of rank 0"
            )
        return run
    if not is_grpo_trainer(trainer):
        raise unsupported(trainer)
    # Imported here: it needs transformers, which is there if a trainer is.
    from seismograd.collectors.trainers.trl import GRPOAdapter
    from seismograd.collectors.trainers.trl_callback import watching_run

    already = watching_run(trainer)
    if isinstance(already, Run):
        log.warning("seismograd: watch() was called twice; this trainer is watched already, by run %s", already.name)
        return already
    # The forward of TRL's model alone holds no collectives, so that each rank can run it when it likes.
    run = _run(trainer.model, config, decoder(trainer), PROBES, plain=False)
    _attach(run, GRPOAdapter(trainer, run, run))
    return run


def _observing(policy: Policy, controls: Sequence[str]) -> Policy:
    """With these controls looking on."""
    return replace(policy, **{name: replace(getattr(policy, name), mode="observe") for name in controls})


def _meet(say: Callable[[str], None]) -> Ranks:
    """The processes that share a step. All of them come here when their first step begins."""
    if _world_size() == 1:
        return Alone()
    group = meet() if dist.is_initialized() and dist.is_gloo_available() else None
    if group is not None:
        return group
    say(
        "watch() was not called on all ranks (or there is no gloo backend): what happens on the other ranks is not "
        "seen, an incident knows rank 0's tokens only, and sharded gradients are not read"
    )
    return Alone()


class _Silence:
    """The outlet of ranks other than 0."""

    def put(self, item: Any) -> bool:
        return True

    def event(self, event: Event) -> None:
        pass


def _attach(run: Run, adapter: Adapter) -> None:
    """Where that fails nothing of the run stays behind."""
    try:
        run.attach(adapter)
    except BaseException:
        run.close()
        raise


def _rank() -> int:
    """This process' rank; where torch.distributed has not been started yet, the launcher's word for it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK") or 0) if _world_size() > 1 else 0


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


def _run(
    model: nn.Module,
    config: Config,
    decode: Callable[[Sequence[int]], str] | None,
    probes: Collection[str],
    plain: bool,
) -> Run:
    """A run with its hub and its threads, not yet listening to anything. Ranks other than 0 write nothing anywhere."""
    early: list[Event] = []  # what is said before there is a hub to say it to
    mute = _rank() != 0
    folder = None if mute else _folder(config, early)
    name = config.name or time.strftime("%Y%m%d-%H%M%S") if folder is None else folder.name
    info = RunInfo(name, None if folder is None else str(folder), config.as_json())
    chosen, url = ([], None) if mute else _sinks(config, folder, plain, early)

    hub: Hub

    def report(event: Event) -> None:
        hub.event(event)

    faults = Faults(report, told=config.text == "full")
    worker = SignalWorker(
        Detector([rule for rule in RULES if rule.judged == "worker"]),
        [rule.signal for rule in RULES],
        faults,
        cpu_seconds=lambda: hub.cpu_seconds(),
        dropped=lambda: hub.dropped(),
        incidents=None if folder is None else IncidentFolder(folder / "incidents"),
    )
    hub = Hub(worker.process, chosen, info, faults)
    detector = Detector([rule for rule in RULES if rule.judged == "step"])
    outlet = _Silence() if mute else hub

    def say(message: str) -> None:
        if not mute:
            warn(message)
            hub.event(Event("degraded", message))

    localiser = None
    if config.gradloc != "off":
        localiser = GradLoc(model, config.gradloc, config.text, decode, name, config.save_batches, config.thresholds)  # type: ignore[arg-type]
    protection = Protection(model, config.controls)
    monitor = StepMonitor(
        model,
        _probes(config, probes),
        detector,
        outlet,
        faults,
        localiser,
        protection,
        partial(_meet, say),
    )
    for event in early:
        hub.event(event)
    if lacking := protection.lacks():
        say(lacking)
    return Run(info, hub, worker, detector, monitor, faults, protection, url, mute)


def _probes(config: Config, possible: Collection[str]) -> Setup:
    """What this process takes part in. The others have no tokens to add to rank 0's; the gradient is that of all."""
    spacing = {probe: config.probes.get(probe, "auto") if probe in possible else 0 for probe in PROBES}
    return Setup(
        ProbeBudget(config.budget, spacing),
        config.shadow,  # type: ignore[arg-type]
        ModelReplay,
        parts=possible if _rank() == 0 else {"geometry"}.intersection(possible),
        processes=_world_size(),
    )


def _folder(config: Config, early: list[Event]) -> Path | None:
    """RUNS/NAME, made now; a name that is taken gets a number. None, and one clear line, where it cannot be made."""
    stem = config.name or time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        folder = Path(config.runs).absolute() / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config.as_json(), indent=2) + "\n")
        except FileExistsError:
            if not folder.is_dir():  # a file stands where a folder of the path should be
                _nowhere(folder, "a file is in the way", early)
                return None
            number += 1
            continue
        except OSError as e:
            _nowhere(folder, e.strerror or str(e), early)
            return None
        if number > 1 and config.name:
            _say(early, f"run {stem!r} exists in {config.runs}; this one is {folder.name!r}")
        return folder


def _nowhere(folder: Path, reason: str, early: list[Event]) -> None:
    _say(
        early,
        f"cannot write {folder}: {reason}. This run is not stored; set runs= or SEISMOGRAD_RUNS to a folder that can "
        "be written. Training is not affected.",
    )


def _sinks(config: Config, folder: Path | None, plain: bool, early: list[Event]) -> tuple[list[Sink], str | None]:
    """The sinks that could be made, the store first, and the address of /metrics."""
    chosen: list[Sink] = []
    url = None
    if folder is not None:
        chosen.append(StoreSink(folder / "run.db"))
    if config.address is not None:
        host, port = config.address
        try:
            server = PrometheusSink(port, host)
        except OSError as e:
            _say(early, f"{e.strerror}. Training is not affected.")
        else:
            url = server.url
            chosen.append(server)
    for sink in config.sinks:
        if isinstance(sink, str):
            chosen.append(WandbSink(start=sink == "wandb", join=plain))
        else:
            chosen.append(sink)
    return chosen, url


def _say(early: list[Event], message: str) -> None:
    log.warning("seismograd: %s", message)
    early.append(Event("degraded", message))
