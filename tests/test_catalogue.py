"""A metric that is not in the catalogue cannot be emitted."""

from __future__ import annotations

import re

import pytest

from seismograd.telemetry.catalogue import CATALOGUE
from seismograd.telemetry.records import Reading


def test_every_metric_is_fully_described() -> None:
    for name, spec in CATALOGUE.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert spec.help.endswith(".")
        assert spec.source
        assert (spec.kind == "counter") == name.endswith("_total")
        assert len(set(spec.labels)) == len(spec.labels)
        assert not set(spec.labels) & {"job", "run", "instance", "step", "token", "sample"}


def test_reading_must_be_in_the_catalogue() -> None:
    with pytest.raises(ValueError, match="not in the catalogue"):
        Reading("no_such_metric", 1.0)


@pytest.mark.parametrize("labels", [{}, {"layer": "0"}, {"group": "all", "layer": "0"}, {"layer": "0", "x": "y"}])
def test_reading_must_have_the_catalogue_s_labels(labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="has the labels"):
        Reading("grad_norm", 1.0, labels)


def test_names_in_each_sink() -> None:
    reading = Reading("grad_norm", 1.0, {"layer": "0", "group": "mlp"})
    spec = CATALOGUE["grad_norm"]
    assert reading.key == 'grad_norm{layer="0",group="mlp"}'
    assert spec.prometheus_name == "seismograd_grad_norm"
    assert spec.wandb_key(reading.labels) == "seismograd/grad_norm/0/mlp"
