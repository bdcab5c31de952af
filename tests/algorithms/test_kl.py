from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.kl import k1, k2, k3
from tests.close import close_fp32, close_fp64
from tests.golden.verl import CASES, column

ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case['seed']}")
def test_value_and_gradient_equal_those_of_verl(case: dict[str, Any], name: str) -> None:
    policy_T, mask_T = column(case["new"]).requires_grad_(), column(case["mask"])
    value_T = ESTIMATORS[name](policy_T, column(case["reference"]))
    (value_T * mask_T).sum().backward()
    close_fp64(value_T * mask_T, case["kl"][name]["value"], rtol=1e-6, atol=1e-6)
    assert policy_T.grad is not None
    close_fp64(policy_T.grad, case["kl"][name]["gradient"], rtol=1e-6, atol=1e-6)


def test_the_estimators_by_hand() -> None:
    policy_T, reference_T = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])
    close_fp32(k1(policy_T, reference_T), [1.0, -2.0])
    close_fp32(k2(policy_T, reference_T), [0.5, 2.0])
    close_fp32(k3(policy_T, reference_T), [math.exp(-1), math.exp(2) - 3])


def test_k3_is_at_most_10_and_gives_no_gradient_there() -> None:
    policy_T = torch.tensor([-30.0, -8.0, -1.0], requires_grad=True)
    value_T = k3(policy_T, torch.tensor([-1.0, -1.0, -30.0]))
    value_T.sum().backward()
    close_fp32(value_T, [10.0, 10.0, 10.0])  # the last by e^-20 - 1 + 20 = 19
    assert policy_T.grad is not None and policy_T.grad.eq(0).all()


def test_in_the_mean_k1_and_k3_are_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    policy_V, reference_V = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    share_V = policy_V.exp()
    divergence = (share_V * (policy_V - reference_V)).sum()
    close_fp64((share_V * k1(policy_V, reference_V)).sum(), divergence)
    close_fp64((share_V * k3(policy_V, reference_V)).sum(), divergence)
