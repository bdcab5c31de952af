from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.advantages import group_centred, group_normalised
from tests.close import close_fp32, close_fp64
from tests.golden.verl import CASES, column


def random_groups(seed: int) -> tuple[Tensor, Tensor, int]:
    """Rewards of groups of 1 to 6 trajectories in mixed order, and one group that nobody is in."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (5,), generator=generator)
    group_N = torch.repeat_interleave(torch.arange(5), sizes)
    group_N = group_N[torch.randperm(len(group_N), generator=generator)]
    return torch.randn(len(group_N), generator=generator, dtype=torch.float64), group_N, 6


def advantages_loop(reward_N: Tensor, group_N: Tensor, *, divide: bool) -> list[float]:
    found = []
    for reward, group in zip(reward_N.tolist(), group_N.tolist(), strict=True):
        rewards = [r for r, g in zip(reward_N.tolist(), group_N.tolist(), strict=True) if g == group]
        centred = reward - sum(rewards) / len(rewards)
        if divide:
            mean = sum(rewards) / len(rewards)
            variance = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)
            centred = centred / (variance**0.5 + 1e-6) if variance else 0.0
        found.append(centred)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_advantages_equal_the_loop(seed: int) -> None:
    reward_N, group_N, num_groups = random_groups(seed)
    close_fp64(group_centred(reward_N, group_N, num_groups), advantages_loop(reward_N, group_N, divide=False))
    close_fp64(
        group_normalised(reward_N, group_N, num_groups), advantages_loop(reward_N, group_N, divide=True)
    )


def test_one_right_of_four_by_hand() -> None:
    reward_N, group_N = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    close_fp32(group_centred(reward_N, group_N, 1), [0.75, -0.25, -0.25, -0.25])
    # The standard deviation is sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5.
    close_fp32(group_normalised(reward_N, group_N, 1), [1.5, -0.5, -0.5, -0.5], atol=1e-5)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    reward_N, group_N = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    close_fp32(group_normalised(reward_N, group_N, 1, epsilon=0.5), [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed {case['seed']}")
def test_advantages_equal_those_of_verl(case: dict[str, Any]) -> None:
    reward_N, group_N = column(case["reward"]), torch.tensor(case["group"])
    num_groups = max(case["group"]) + 1
    shared_N = torch.bincount(group_N)[group_N] > 1  # a group of one differs on purpose, see below
    centred_N = group_centred(reward_N, group_N, num_groups)
    normalised_N = group_normalised(reward_N, group_N, num_groups)
    close_fp64(centred_N[shared_N], column(case["grpo_centred"])[shared_N], rtol=1e-6, atol=1e-6)
    close_fp64(normalised_N[shared_N], column(case["grpo"])[shared_N], rtol=1e-6, atol=1e-6)


def test_a_group_of_one_has_advantage_0_where_verl_gives_the_reward() -> None:
    alone = 0
    for case in CASES:
        reward_N, group_N = column(case["reward"]), torch.tensor(case["group"])
        single_N = torch.bincount(group_N)[group_N] == 1
        alone += int(single_N.sum())
        for function in (group_centred, group_normalised):
            assert function(reward_N, group_N, 4)[single_N].eq(0).all()
        close_fp64(column(case["grpo"])[single_N], reward_N[single_N], rtol=1e-5)
    assert alone == 2


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -0.7, 1e4, 1e-4])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_0(reward: float, size: int) -> None:
    reward_N, group_N = torch.full((size,), reward), torch.zeros(size, dtype=torch.long)
    assert group_normalised(reward_N, group_N, 1).eq(0).all()


def test_rewards_that_differ_by_little_are_not_taken_for_equal() -> None:
    reward_N, group_N = torch.tensor([1.0, 0.999, 1.0, 0.999]), torch.zeros(4, dtype=torch.long)
    close_fp32(
        group_normalised(reward_N, group_N, 1), [0.8645, -0.8645, 0.8645, -0.8645], rtol=1e-3
    )  # 0.0005 / (0.000577 + 0.000001)


def test_groups_do_not_mix() -> None:
    reward_N, group_N = torch.tensor([1.0, 5.0, 0.0, 7.0]), torch.tensor([0, 1, 0, 1])
    close_fp32(group_centred(reward_N, group_N, 2), [0.5, -1.0, -0.5, 1.0])
