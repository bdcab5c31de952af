"""From scored groups to advantages; a reward that failed is nobody's zero."""

from __future__ import annotations

import math

import torch

from millrace.training.estimate import group_advantages, usable
from millrace.types import Group, Outcome
from tests.close import close_fp64
from tests.training.pieces import prompt, trajectory


def groups(*rewards: list[float | None]) -> list[Group]:
    """Groups with these rewards; None is a reward that failed."""
    outcomes = [
        [Outcome.failure("it broke") if value is None else Outcome("score", value) for value in values]
        for values in rewards
    ]
    return [
        Group(prompt(), tuple(trajectory((1, 2), (3,)).scored(outcome) for outcome in row))
        for row in outcomes
    ]


def advantages(*rewards: list[float | None], divide_by_std: bool):
    kept, group_N = usable(groups(*rewards))
    return group_advantages(kept, group_N, divide_by_std=divide_by_std)


def test_a_failed_reward_is_left_out_of_the_baseline_and_of_training():
    kept, group_N = usable(groups([1.0, None, 0.0], [None, 4.0, 2.0]))
    assert [t.outcome.value for t in kept] == [1.0, 0.0, 4.0, 2.0]
    assert group_N.tolist() == [0, 0, 1, 1]
    # Were the failure a zero, the first baseline would be 1/3.
    close_fp64(group_advantages(kept, group_N, divide_by_std=False), [0.5, -0.5, 1.0, -1.0])


def test_an_unscored_trajectory_is_left_out_and_an_invalid_answer_counts():
    given = groups([1.0, 3.0])
    bare = trajectory((1, 2), (3,))
    invalid = bare.scored(Outcome("invalid", -1.0, "no number"))
    kept, group_N = usable([Group(prompt(), (*given[0].trajectories, bare, invalid))])
    close_fp64(group_advantages(kept, group_N, divide_by_std=False), [0.0, 2.0, -2.0])


def test_division_by_the_standard_deviation_uses_the_group_alone():
    root = math.sqrt(0.5)
    close_fp64(
        advantages([0.0, 1.0], [0.0, 10.0], divide_by_std=True),
        [-0.5 / (root + 1e-6), 0.5 / (root + 1e-6), -5 / (10 * root + 1e-6), 5 / (10 * root + 1e-6)],
    )


def test_equal_rewards_give_exactly_zero_whatever_their_value():
    # 0.1 has no exact float; its mean over three is rounded.
    for value in (0.1, 0.7, 1e6, -0.3):
        assert advantages([value] * 3, divide_by_std=True).tolist() == [0.0, 0.0, 0.0]


def test_a_group_whose_rewards_all_failed_takes_no_part():
    kept, group_N = usable(groups([None, None], [1.0, 0.0]))
    assert group_N.tolist() == [1, 1]
    close_fp64(group_advantages(kept, group_N, divide_by_std=False), [0.5, -0.5])


def test_no_usable_trajectory_gives_no_advantages():
    kept, group_N = usable(groups([None, None]))
    assert kept == []
    for divide_by_std in (True, False):
        found = group_advantages(kept, group_N, divide_by_std=divide_by_std)
        assert (found.shape, found.dtype) == ((0,), torch.float64)
