"""SeqClip's mask: which sequences it keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from seismograd.controls import mis


@pytest.mark.parametrize("of", ["sum", "mean"])
def test_a_sequence_of_both_infinities_is_left_out(of: Any) -> None:
    log_ratio = torch.tensor([[math.inf, -math.inf, 0.0], [math.nan, 0.1, -0.1], [math.inf, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert mis(log_ratio, torch.ones(4, 3), of).squeeze(1).tolist() == [0, 1, 0, 1]


def test_what_is_not_trained_does_not_count() -> None:
    log_ratio = torch.tensor([[math.inf, -math.inf, 0.0]])
    assert mis(log_ratio, torch.tensor([[0, 0, 1]])).tolist() == [[1]]


def test_sum_and_mean_differ() -> None:
    log_ratio, mask = torch.full((1, 3), 0.4), torch.ones(1, 3)
    assert mis(log_ratio, mask, "sum").item() == 0
    assert mis(log_ratio, mask, "mean").item() == 1


@pytest.mark.parametrize("of", ["Sum", "max", None])
def test_another_ratio_is_refused(of: Any) -> None:
    with pytest.raises(ValueError, match=r"mis\(of=.*\): give 'sum' or 'mean'"):
        mis(torch.zeros(1, 3), torch.ones(1, 3), of)
