"""The controls' settings and states."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seismograd import Config, ConfigError
from seismograd.controls.policy import CONTROLS, Policy
from seismograd.controls.switch import State, Switch


def test_by_default_layerclip_may_act_and_the_others_look_on() -> None:
    policy = Config().controls
    assert {name: getattr(policy, name).mode for name in CONTROLS} == {
        "layerclip": "auto",
        "tokenclip": "observe",
        "seqclip": "observe",
        "cleanratio": "observe",
    }


def test_one_mode_for_all_and_settings_by_dotted_keys() -> None:
    assert {getattr(Policy.of("observe"), name).mode for name in CONTROLS} == {"observe"}
    policy = Policy.of(
        {"layerclip.reference": "history", "layerclip.factor": 3, "tokenclip": "on", "seqclip.of": "sum"}
    )
    assert (policy.layerclip.mode, policy.layerclip.reference, policy.layerclip.factor) == ("auto", "history", 3)
    assert (policy.tokenclip.mode, policy.tokenclip.method) == ("on", "tis")
    assert policy.seqclip.of == "sum"


def test_settings_as_json_make_the_same_policy_again() -> None:
    policy = Policy.of(
        {"layerclip.groups": True, "tokenclip": "auto", "tokenclip.method": "icepop", "seqclip.low": 0.1}
    )
    assert Policy.of(json.loads(json.dumps(policy.as_json()))) == policy
    assert Policy.of(policy) is policy


def test_by_environment() -> None:
    text = "layerclip=off, tokenclip=on,tokenclip.cap=3,layerclip.groups=true"
    policy = Config.resolve({}, {"SEISMOGRAD_CONTROLS": text}).controls
    assert (policy.layerclip.mode, policy.layerclip.groups) == ("off", True)
    assert (policy.tokenclip.mode, policy.tokenclip.cap) == ("on", 3)
    assert Config.resolve({}, {"SEISMOGRAD_CONTROLS": "observe"}).controls == Policy.of("observe")
    assert Config.resolve({"controls": "off"}, {"SEISMOGRAD_CONTROLS": "on"}).controls == Policy.of("off")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"layer_clip": "auto"}, r"controls\['layer_clip'\].*layerclip, tokenclip"),
        ({"layerclip": "yes"}, r"controls\['layerclip'\]='yes'.*off, observe, auto, on"),
        ({"layerclip": True}, r"controls\['layerclip'\]=True"),
        ({"layerclip.referenz": "peers"}, r"controls\['layerclip\.referenz'\].*reference"),
        ({"layerclip.reference": "mean"}, r"controls\['layerclip\.reference'\]='mean'.*peers, history"),
        ({"layerclip.factor": 1}, r"controls\['layerclip\.factor'\]=1.*above 1"),
        ({"layerclip.factor": float("nan")}, r"controls\['layerclip\.factor'\]=nan"),
        ({"layerclip.factor": float("inf")}, r"controls\['layerclip\.factor'\]=inf.*a finite number above 1"),
        ({"layerclip.": "on"}, r"controls\['layerclip\.'\] is no setting"),
        (
            {"layerclip": "off", "layerclip.mode": "on"},
            r"controls sets layerclip\.mode twice, to 'off' and to 'on': give one",
        ),
        ({"layerclip.mode": "on", "layerclip": "off"}, r"layerclip\.mode twice, to 'on' and to 'off'"),
        ({"layerclip.groups": 1}, r"controls\['layerclip\.groups'\]=1"),
        ({"layerclip.warmup": 0}, r"controls\['layerclip\.warmup'\]=0.*from 2 to 128"),
        ({"layerclip.hold": 0}, r"controls\['layerclip\.hold'\]=0.*at least 1"),
        ({"layerclip.hold": 1.5}, r"controls\['layerclip\.hold'\]=1\.5"),
        ({"tokenclip.method": "ppo"}, r"controls\['tokenclip\.method'\]='ppo'.*tis, icepop"),
        ({"tokenclip.cap": 0}, r"controls\['tokenclip\.cap'\]=0"),
        ({"tokenclip.cap": float("inf")}, r"controls\['tokenclip\.cap'\]=inf.*a finite number above 0"),
        ({"tokenclip.low": 5.0}, r"\['tokenclip\.low'\]=5\.0 and .*\['tokenclip\.high'\]=5\.0.*low < high"),
        ({"seqclip.high": 0.1}, r"\['seqclip\.low'\]=0\.5 and .*\['seqclip\.high'\]=0\.1.*low < high"),
        ({"seqclip.high": float("inf")}, r"controls\['seqclip\.high'\]=inf.*a finite number"),
        ({"seqclip.low": -1}, r"controls\['seqclip\.low'\]=-1.*at least 0"),
        ({"seqclip.high": float("nan")}, r"controls\['seqclip\.high'\]=nan"),
        ({"seqclip.of": "max"}, r"controls\['seqclip\.of'\]='max'"),
        ({"seqclip.high": "2"}, r"controls\['seqclip\.high'\]='2'"),
        ({"cleanratio": "auto"}, r"controls\['cleanratio'\]='auto'.*a forward"),
        ("everything", r"controls\['layerclip'\]='everything'"),
        (["layerclip"], r"controls=\['layerclip'\].*mapping"),
    ],
)
def test_settings_that_cannot_be(given: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Config.resolve({"controls": given}, {})


@pytest.mark.parametrize(
    "text", ["layerclip", "layerclip=", "layerclip=auto,tokenclip", "layerclip=often", "layerclip=off,layerclip=on"]
)
def test_an_environment_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError):
        Config.resolve({}, {"SEISMOGRAD_CONTROLS": text})


def test_an_armed_control_goes_on_holds_and_hands_back() -> None:
    switch = Switch("layerclip", "auto", hold=10)
    assert switch.state is State.ARMED
    assert switch.tick(1) is None
    change = switch.ask(5, "because")
    assert change is not None
    assert (change.before, change.after, change.step) == (State.ARMED, State.ON, 5)
    assert change.message == "step 5: layerclip is on: because"
    assert json.loads(json.dumps(change.data))["after"] == "on"
    assert switch.ask(8, "again") is None
    assert switch.tick(17) is None
    switch.renew(17)
    assert switch.tick(26) is None
    back = switch.tick(27)
    assert back is not None
    assert (back.before, back.after) == (State.ON, State.ARMED)
    assert switch.tick(28) is None


@pytest.mark.parametrize(("mode", "state"), [("off", State.OFF), ("observe", State.OBSERVING), ("on", State.ON)])
def test_only_an_armed_control_changes(mode: Any, state: State) -> None:
    switch = Switch("tokenclip", mode, hold=1)
    assert switch.ask(1, "because") is None
    assert switch.tick(100) is None
    assert switch.state is state


def test_a_saved_state_goes_on_and_another_mode_begins_anew() -> None:
    switch, same, other = (Switch("layerclip", mode, hold=10) for mode in ("auto", "auto", "observe"))
    switch.ask(5, "because")
    same.load_state_dict(json.loads(json.dumps(switch.state_dict())))
    other.load_state_dict(switch.state_dict())
    assert same.on
    assert same.tick(15) is not None
    assert other.state is State.OBSERVING


def test_step_numbers_that_begin_anew_hand_back() -> None:
    switch = Switch("layerclip", "auto", hold=10)
    switch.ask(500, "because")
    assert switch.tick(1) is not None
