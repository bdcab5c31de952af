from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.losses import clipped, log_ratio, ppo_clip
from millrace.algorithms.weights import fixed_length, sequence_mean, sequence_sum, token_mean
from tests.close import close_fp32, close_fp64
from tests.golden.verl import CASES, column


def ppo_loop(policy: list[float], sampler: list[float], advantage: list[float], **bounds: Any) -> list[float]:
    low, high, dual = bounds["low"], bounds["high"], bounds["dual"]
    found = []
    for p, s, a in zip(policy, sampler, advantage, strict=True):
        ratio = math.exp(min(max(p - s, -20.0), 20.0))
        loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
        found.append(min(loss, -a * dual) if dual is not None and a < 0 else loss)
    return found


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("seed", range(20))
def test_the_loss_equals_the_loop(seed: int, dual: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy_T, sampler_T, advantage_T = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    bounds = {"low": 0.2, "high": 0.28, "dual": dual}
    expected = ppo_loop(policy_T.tolist(), sampler_T.tolist(), advantage_T.tolist(), **bounds)
    close_fp64(ppo_clip(policy_T, sampler_T, advantage_T, low=0.2, high=0.28, dual=dual), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case['seed']}")
def test_loss_and_gradient_equal_those_of_verl_in_every_aggregation(case: dict[str, Any]) -> None:
    mask_T, segment_T = torch.tensor(case["mask"]).bool(), torch.tensor(case["segment"])
    weights: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "token-mean": token_mean,
        "seq-mean-token-mean": sequence_mean,
        "seq-mean-token-sum": sequence_sum,
        "seq-mean-token-sum-norm": partial(fixed_length, length=case["width"]),
    }
    assert len(case["ppo"]) == 12  # three pairs of bounds
    for golden in case["ppo"]:
        policy_T = column(case["new"]).requires_grad_()
        bounds = {name: golden[name] for name in ("low", "high", "dual")}
        loss_T = ppo_clip(policy_T, column(case["old"]), column(case["advantage"]), **bounds)
        loss = (loss_T * weights[golden["aggregation"]](mask_T, segment_T).double()).sum()
        loss.backward()
        assert policy_T.grad is not None
        close_fp64(loss, golden["loss"], rtol=1e-6, atol=1e-6)
        close_fp64(policy_T.grad, golden["gradient"], rtol=1e-6, atol=1e-6)


def gradient(log_ratio: float, advantage: float, dual: float | None = None) -> float:
    policy_T = torch.tensor([log_ratio], requires_grad=True)
    advantage_T = torch.tensor([advantage])
    ppo_clip(policy_T, torch.zeros(1), advantage_T, low=0.2, high=0.28, dual=dual).sum().backward()
    assert policy_T.grad is not None
    return policy_T.grad.item()


def test_no_gradient_beyond_the_clip() -> None:
    assert gradient(0.5, 1.0) == 0.0
    assert gradient(-0.5, -1.0) == 0.0


def test_full_gradient_within_the_clip_and_on_the_way_back() -> None:
    close_fp32(gradient(0.1, 1.0), -math.exp(0.1))
    close_fp32(gradient(-0.5, 1.0), -math.exp(-0.5))
    close_fp32(gradient(0.5, -1.0), math.exp(0.5))


def test_no_gradient_beyond_the_dual_clip() -> None:
    close_fp32(gradient(1.0, -1.0, dual=3.0), math.exp(1.0))
    assert gradient(1.2, -1.0, dual=3.0) == 0.0
    close_fp32(
        ppo_clip(torch.tensor([1.2]), torch.zeros(1), -torch.ones(1), low=0.2, high=0.2, dual=3.0), [3.0]
    )


def test_the_log_ratio_is_at_most_20_either_way() -> None:
    policy_T: Tensor = torch.tensor([-1.0, -60.0, -3.0])
    close_fp32(log_ratio(policy_T, torch.tensor([-50.0, -1.0, -1.0])), [20.0, -20.0, -2.0])


def test_clipped_names_the_tokens_without_gradient() -> None:
    policy_T = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.5, -0.5, 0.1, -0.1])
    advantage_T = torch.tensor([1.0, -1.0, -1.0, 1.0, 0.0, 0.0, 1.0, -1.0])
    found = clipped(policy_T, torch.zeros(8), advantage_T, low=0.2, high=0.28)
    assert found.tolist() == [True, False, True, False, False, False, False, False]


def test_a_ratio_exactly_at_the_bound_is_not_clipped() -> None:
    policy_T = torch.tensor([math.log(2), -math.log(2)], dtype=torch.float64)
    assert policy_T.exp().tolist() == [2.0, 0.5]
    found = clipped(policy_T, torch.zeros(2), torch.tensor([1.0, -1.0]), low=0.5, high=1.0)
    assert found.tolist() == [False, False]
