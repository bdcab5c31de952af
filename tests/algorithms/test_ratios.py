from __future__ import annotations

import math

import pytest
import torch

from millrace.algorithms.ratios import mismatch
from tests.close import close_fp64


def test_mismatch_by_hand() -> None:
    found = mismatch(torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-2.0, -1.5, -1.0]))
    close_fp64(found["k1"], (-1.0 + 0.5 + 0.0) / 3)
    close_fp64(found["k3"], ((math.e - 2) + (math.exp(-0.5) - 0.5)) / 3)
    close_fp64(found["max"], 1.0)


def test_the_largest_difference_has_no_sign() -> None:
    close_fp64(mismatch(torch.tensor([-3.0, 0.0]), torch.tensor([0.0, -1.0]))["max"], 3.0)


def test_equal_logprobs_have_no_mismatch() -> None:
    assert mismatch(torch.full((4,), -1.3), torch.full((4,), -1.3)) == {"k1": 0.0, "k3": 0.0, "max": 0.0}


def test_k1_and_k3_are_the_divergence_in_the_mean() -> None:
    # Token i is drawn as often as the sampler's share of it says: 1/4, 1/4, 1/2.
    sampler_V = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    trainer_V = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    drawn_N = torch.tensor([0, 1, 2, 2])
    found = mismatch(trainer_V.log()[drawn_N], sampler_V.log()[drawn_N])
    divergence = float((sampler_V * (sampler_V / trainer_V).log()).sum())
    close_fp64([found["k1"], found["k3"]], [divergence, divergence])


def test_no_tokens_have_no_mismatch_to_speak_of() -> None:
    with pytest.raises(ValueError, match="^mismatch of no tokens is not defined$"):
        mismatch(torch.zeros(0), torch.zeros(0))
