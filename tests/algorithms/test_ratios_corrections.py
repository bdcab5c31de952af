"""From the words of a recipe to the factor of a token's loss: every number that is written reaches it."""

from __future__ import annotations

import math

import pytest
import torch

from millrace.algorithms import ratios
from millrace.config import method_sections as words
from tests.close import close_fp32


def correct(setting: dict, log_ratios: list[list[float]]) -> list[float]:
    x_N = torch.tensor([x for row in log_ratios for x in row])
    segment_N = torch.tensor([n for n, row in enumerate(log_ratios) for _ in row])
    settings = words.ImportanceCorrection.model_validate(setting).model_dump(exclude={"kind"})
    return ratios.correction(x_N, segment_N, len(log_ratios), **settings).tolist()


# Ratios of 2, 1/4, 3 and of 1/2.
X = [[math.log(2), math.log(0.25), math.log(3)], [math.log(0.5)]]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, [2.0, 0.25, 2.0, 0.5]),
        ({"high": 2.5}, [2.0, 0.25, 2.5, 0.5]),
        ({"action": "mask", "low": 0.4, "high": 2.5}, [2.0, 0.0, 0.0, 0.5]),
        ({"action": "mask", "high": 2.5}, [2.0, 0.25, 0.0, 0.5]),
        ({"level": "sequence"}, [1.5, 1.5, 1.5, 0.5]),
        ({"level": "geometric"}, [*[1.5 ** (1 / 3)] * 3, 0.5]),
        ({"high": 4.0, "normalise": True}, [x / 1.4375 for x in (2.0, 0.25, 3.0, 0.5)]),
        ({"level": "sequence", "normalise": True}, [1.5, 1.5, 1.5, 0.5]),
        # The mean is over sequences where each has one weight.
        ({"level": "sequence", "high": 1.25, "normalise": True}, [*[1.25 / 0.875] * 3, 0.5 / 0.875]),
        # k1 within 1 / 2.5 and 2.5: the ratios 1/4 and 3 are out.
        ({"high": 4.0, "reject": {"high": 2.5}}, [2.0, 0.0, 0.0, 0.5]),
        ({"action": "none", "reject": {"high": 2.5}}, [1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_a_correction_weighs_bounds_normalises_and_rejects(setting, expected):
    close_fp32(correct(setting, X), expected)


def test_a_correction_beside_a_rejection_takes_every_setting_of_it():
    reject = {"estimator": "k3", "level": "mean", "high": 0.5}
    found = correct({"high": 9.0, "reject": reject}, X)
    x_N = torch.tensor([x for row in X for x in row])
    keep_N = ratios.rejection(
        x_N, torch.tensor([0, 0, 0, 1]), 2, estimator="k3", level="mean", low=None, high=0.5
    )
    assert keep_N.tolist() == [False, False, False, True]
    close_fp32(found, (x_N.exp() * keep_N).tolist())
    lower = {"estimator": "k1", "level": "token", "low": 0.3, "high": 2.1}
    close_fp32(correct({"high": 9.0, "reject": lower}, X), [2.0, 0.0, 3.0, 0.5])


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("token", 0.3, 2.5, [False, True, True, False]),
        ("token", 0.0, 3.5, [False] * 4),
        ("token", 0.6, 3.5, [False, True, False, True]),
        # 2 x 1/4 x 3 = 1.5, and its cube root.
        ("sequence", 0.6, 1.4, [True, True, True, True]),
        ("geometric", 0.4, 1.4, [False] * 4),
    ],
)
def test_weights_beyond_the_bounds_of_a_correction_are_found(level, low, high, expected):
    x_N, segment_N = torch.tensor([x for row in X for x in row]), torch.tensor([0, 0, 0, 1])
    assert ratios.out_of_bounds(x_N, segment_N, 2, level=level, low=low, high=high).tolist() == expected


@pytest.mark.parametrize(("low", "high"), [(0.5, 1.0), (1.0, 1.5)])
def test_a_weight_at_a_bound_is_within(low, high):
    zero_N, segment_N = torch.zeros(1), torch.zeros(1, dtype=torch.long)
    assert ratios.out_of_bounds(zero_N, segment_N, 1, level="token", low=low, high=high).tolist() == [False]
