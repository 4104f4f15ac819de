"""Settings: by argument, by environment, checked at construction."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import seismograd.config
from seismograd import ClipSpec, Config, ConfigError
from seismograd.controls.policy import Policy
from seismograd.gradloc import Thresholds

ENVIRONMENT = {
    "SEISMOGRAD_RUNS": "/scratch/runs",
    "SEISMOGRAD_NAME": "qwen-3",
    "SEISMOGRAD_SINKS": "wandb",
    "SEISMOGRAD_PROMETHEUS": "0.0.0.0:9464",
    "SEISMOGRAD_BUDGET": "0.02",
    "SEISMOGRAD_PROBES": "shadow=1,deployed=auto",
    "SEISMOGRAD_SHADOW": "fp16",
    "SEISMOGRAD_CLIP": "0.2,0.28",
    "SEISMOGRAD_GRADLOC": "off",
    "SEISMOGRAD_TEXT": "full",
    "SEISMOGRAD_SAVE_BATCHES": "64",
    "SEISMOGRAD_THRESHOLDS": "share=0.2, pull=80",
    "SEISMOGRAD_CONTROLS": "layerclip=on,tokenclip=auto,tokenclip.method=icepop,layerclip.factor=5",
}


def test_every_setting_by_environment() -> None:
    assert set(ENVIRONMENT) == {f"SEISMOGRAD_{f.name.upper()}" for f in fields(Config)}
    config = Config.resolve({}, ENVIRONMENT)
    assert config == Config(
        runs="/scratch/runs",
        name="qwen-3",
        sinks=("wandb",),
        prometheus="0.0.0.0:9464",
        budget=0.02,
        probes={"shadow": 1, "deployed": "auto"},
        shadow="fp16",
        clip=(ClipSpec(eps_low=0.2, eps_high=0.28),),
        gradloc="off",
        text="full",
        save_batches=64.0,
        thresholds=Thresholds(share=0.2, pull=80.0),
        controls=Policy.of(
            {"layerclip": "on", "tokenclip": "auto", "tokenclip.method": "icepop", "layerclip.factor": 5}
        ),
    )
    assert config.address == ("0.0.0.0", 9464)
    assert json.loads(json.dumps(config.as_json()))["prometheus"] == "0.0.0.0:9464"
    assert Thresholds.of(json.loads(json.dumps(config.as_json()))["thresholds"]) == config.thresholds


def test_each_variable_is_documented_in_one_place() -> None:
    for variable in ENVIRONMENT:
        assert variable in (seismograd.config.__doc__ or "")


def test_argument_wins_over_environment_wins_over_default() -> None:
    assert Config.resolve({"budget": 0.05}, {"SEISMOGRAD_BUDGET": "0.02"}).budget == 0.05
    assert Config.resolve({"budget": None}, {"SEISMOGRAD_BUDGET": "0.02"}).budget == 0.02
    assert Config.resolve({}, {}) == Config()


def test_friendly_forms() -> None:
    config = Config.resolve({"runs": Path("x"), "sinks": "wandb", "clip": 0.3, "prometheus": 0}, {})
    assert (config.runs, config.sinks, config.clip) == ("x", ("wandb",), (ClipSpec(eps_low=0.3, eps_high=0.3),))
    assert config.address == ("127.0.0.1", 0)
    assert Config.resolve({"clip": (0.2, 0.28)}, {}).clip == (ClipSpec(eps_low=0.2, eps_high=0.28),)
    assert Config.resolve({"runs": "~/runs"}, {}).runs == str(Path.home() / "runs")
    assert Config.resolve({}, {"SEISMOGRAD_RUNS": "~/runs"}).runs == str(Path.home() / "runs")
    assert Config.resolve({"prometheus": "[::1]:9464"}, {}).address == ("::1", 9464)
    assert Config.resolve({"probes": {"shadow": 2, "deployed": 4}}, {}).probes["deployed"] == 4
    assert Config.resolve({"thresholds": {"weight": 20}}, {}).thresholds == Thresholds(weight=20)
    assert Config.resolve({"thresholds": Thresholds(weight=20)}, {}).thresholds == Thresholds(weight=20)
    assert Config.resolve({}, {"SEISMOGRAD_SINKS": "none", "SEISMOGRAD_PROMETHEUS": ""}).sinks == ()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"runs": ""}, "runs="),
        ({"runs": "a\0b"}, "runs="),
        ({"name": "a/b"}, "name="),
        ({"name": 3}, "name="),
        ({"name": "n" * 300}, "name="),
        ({"sinks": 5}, "sinks="),
        ({"prometheus": "\u00b2"}, "prometheus="),
        ({"prometheus": 9464.0}, "prometheus="),
        ({"budget": True}, "budget="),
        ({"probes": "shadow"}, "probes="),
        ({"probes": {"shadow": 0, "deployed": 1}}, "probes.deployed=1"),
        ({"probes": {"shadow": 2, "deployed": 3}}, "probes.deployed=3"),
        ({"shadow": ["bf16"]}, "shadow="),
        ({"clip": ()}, "clip="),
        ({"gradloc": "on"}, "gradloc="),
        ({"gradloc": True}, "gradloc="),
        ({"text": "some"}, "text="),
        ({"save_batches": -1}, "save_batches="),
        ({"save_batches": "64 MB"}, "save_batches="),
        ({"save_batches": 64, "text": "none"}, "save_batches="),
        ({"thresholds": 0.2}, "thresholds=0.2"),
        ({"thresholds": {"shares": 0.2}}, "thresholds.shares: known thresholds are share, "),
        ({"thresholds": {"share": 0}}, "thresholds.share=0: give a number above 0"),
        ({"thresholds": {"pull": "much"}}, "thresholds.pull='much': give a number above 0"),
        ({"thresholds": {"pull": True}}, "thresholds.pull=True"),
        ({"thresholds": {"pull": float("inf")}}, "thresholds.pull=inf"),
        ({"clip": (0.2, "x")}, "clip="),
        ({"name": ".."}, "name="),
        ({"sinks": ["graphite"]}, "sinks="),
        ({"sinks": [object()]}, "sinks="),
        ({"prometheus": 70000}, "prometheus="),
        ({"prometheus": "localhost:x"}, "prometheus="),
        ({"prometheus": True}, "prometheus="),
        ({"budget": 1.5}, "budget="),
        ({"budget": "much"}, "budget="),
        ({"probes": {"shadows": 1}}, "probes.shadows="),
        ({"probes": {"shadow": -1}}, "probes.shadow="),
        ({"probes": {"shadow": "often"}}, "probes.shadow="),
        ({"shadow": "int8"}, "shadow="),
        ({"clip": "0.2"}, "clip='0.2'"),
        ({"clip": -0.2}, "clip="),
    ],
)
def test_impossible_settings_are_named_with_their_fix(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.resolve(given, {})
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("variable", ["BUDGET", "PROBES", "CLIP", "PROMETHEUS", "SHADOW", "SINKS"])
def test_impossible_environment(variable: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.resolve({}, {f"SEISMOGRAD_{variable}": "so=what?"})
    assert variable.lower() in str(error.value).lower()


@pytest.mark.parametrize("text", ["share", "share=much", "share=-1", "shares=1"])
def test_impossible_thresholds_by_environment(text: str) -> None:
    with pytest.raises(ConfigError, match=f"SEISMOGRAD_THRESHOLDS='{text}' cannot be: "):
        Config.resolve({}, {"SEISMOGRAD_THRESHOLDS": text})
