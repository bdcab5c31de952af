from __future__ import annotations

from collections.abc import Callable
from itertools import product
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.advantages import (
    baseline_centred,
    gpg,
    group_centred,
    group_decoupled,
    group_normalised,
    leave_one_out,
    leave_one_out_normalised,
    length_weighted_centred,
    optimal_token_baseline,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from tests.close import close_fp32, close_fp64

SEEDS = pytest.mark.parametrize("seed", range(20))
GROUP_ESTIMATORS = [group_centred, group_normalised, leave_one_out, leave_one_out_normalised, gpg, pass_at_k]
EPSILON = 1e-6


def double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_groups(seed: int) -> tuple[Tensor, Tensor, int]:
    """Rewards of groups of 1 to 6 trajectories in mixed order, and one group that nobody is in.

    In every third seed rewards are 0 or 1, so that many are equal.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (5,), generator=generator)
    group_N = torch.repeat_interleave(torch.arange(5), sizes)
    group_N = group_N[torch.randperm(len(group_N), generator=generator)]
    reward_N = torch.randn(len(group_N), generator=generator, dtype=torch.float64)
    return reward_N if seed % 3 else (reward_N > 0).double(), group_N, 6


def others(index: int, reward_N: Tensor, group_N: Tensor) -> list[float]:
    """The other rewards in the group of one trajectory."""
    pairs = enumerate(zip(reward_N.tolist(), group_N.tolist(), strict=True))
    return [reward for place, (reward, group) in pairs if group == group_N[index] and place != index]


def loop(reward_N: Tensor, group_N: Tensor, estimate: Callable[..., float]) -> list[float]:
    """`estimate(reward, rewards of the others)` for every trajectory, 0 for one that is alone."""
    found = []
    for index, reward in enumerate(reward_N.tolist()):
        rest = others(index, reward_N, group_N)
        found.append(estimate(reward, rest) if rest else 0.0)
    return found


def centred(reward: float, rest: list[float]) -> float:
    return reward - mean([reward, *rest])


def normalised(reward: float, rest: list[float]) -> float:
    return centred(reward, rest) / (stdev([reward, *rest]) + EPSILON)


def without_itself(reward: float, rest: list[float]) -> float:
    return reward - mean(rest)


def by_the_others(reward: float, rest: list[float]) -> float:
    spread = stdev(rest) if len(set(rest)) > 1 else 0.0
    return (reward - mean(rest)) / (spread + EPSILON if spread else 1)


def best_of(reward: float, rest: list[float]) -> float:
    return max(0.0, reward - max(rest))


def best_of_normalised(reward: float, rest: list[float]) -> float:
    return best_of(reward, rest) / (stdev([reward, *rest]) + EPSILON)


@pytest.mark.slow_beyond(3)
@SEEDS
def test_group_advantages_equal_the_loop(seed: int) -> None:
    reward_N, group_N, num_groups = groups = random_groups(seed)
    close_fp64(group_centred(*groups), loop(reward_N, group_N, centred))
    close_fp64(group_normalised(*groups), loop(reward_N, group_N, normalised))
    close_fp64(leave_one_out(*groups), loop(reward_N, group_N, without_itself))
    close_fp64(leave_one_out_normalised(*groups), loop(reward_N, group_N, by_the_others))
    close_fp64(pass_at_k(*groups), loop(reward_N, group_N, best_of_normalised))
    close_fp64(pass_at_k(*groups, divide_by_std=False), loop(reward_N, group_N, best_of))
    scale = len(reward_N) / sum(reward != 0 for reward in reward_N.tolist())
    close_fp64(gpg(*groups), [scale * x for x in loop(reward_N, group_N, centred)])


def test_one_right_of_four_by_hand() -> None:
    reward_N, group_N = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long)
    close_fp32(group_centred(reward_N, group_N, 1), [0.75, -0.25, -0.25, -0.25])
    # The standard deviation is sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5.
    close_fp32(group_normalised(reward_N, group_N, 1), [1.5, -0.5, -0.5, -0.5], atol=1e-5)
    close_fp32(leave_one_out(reward_N, group_N, 1), [1, -1 / 3, -1 / 3, -1 / 3])
    close_fp32(gpg(reward_N, group_N, 1), [3, -1, -1, -1])
    close_fp32(pass_at_k(reward_N, group_N, 1), [2, 0, 0, 0], atol=1e-5)
    # The others of a wrong one have the standard deviation 3^-0.5, those of the right one none.
    wrong = -(3**-0.5)
    close_fp32(leave_one_out_normalised(reward_N, group_N, 1), [1, wrong, wrong, wrong], atol=1e-5)


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    groups = double(1, 0, 0, 0), torch.zeros(4, dtype=torch.long), 1
    close_fp64(group_normalised(*groups, epsilon=0.5), [0.75, -0.25, -0.25, -0.25])
    close_fp64(pass_at_k(*groups, epsilon=0.5), [1, 0, 0, 0])
    wrong = -1 / 3 / (3**-0.5 + 0.5)
    close_fp64(leave_one_out_normalised(*groups, epsilon=0.5), [1, wrong, wrong, wrong])
    decoupled_N = group_decoupled(groups[0][None], groups[1], 1, weight_K=double(2), epsilon=0.5)
    close_fp64(decoupled_N, [1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("function", [group_normalised, leave_one_out_normalised, pass_at_k])
def test_epsilon_is_above_0(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="epsilon is 0; it must be above 0"):
        function(double(1, 2), torch.tensor([0, 0]), 1, epsilon=0)


@pytest.mark.slow_beyond(11)
@pytest.mark.parametrize("function", GROUP_ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -0.7, 1e4, 1e-4])
def test_equal_rewards_give_exactly_0(function: Callable[..., Tensor], reward: float) -> None:
    for size, dtype in product((1, 2, 3, 7, 8), (torch.float32, torch.float64)):
        reward_N = torch.cat([torch.full((size,), reward, dtype=dtype), torch.tensor([3.0, 5.0])])
        group_N = torch.tensor([2] * size + [0, 0])
        assert function(reward_N, group_N, 3)[:size].eq(0).all()
        assert function(reward_N, group_N, 3)[-1] > 0


@pytest.mark.parametrize("function", GROUP_ESTIMATORS)
def test_no_trajectories_have_no_advantages(function: Callable[..., Any]) -> None:
    for num_groups in (0, 2):
        assert function(double(), torch.zeros(0, dtype=torch.long), num_groups).tolist() == []


def test_a_lone_reward_is_kept_only_where_asked_for() -> None:
    groups = double(2, 5, 3), torch.tensor([0, 1, 0]), 2
    half = 0.5**0.5 / (1 + EPSILON / 0.5**0.5)
    close_fp64(group_normalised(*groups), [-half, 0, half])
    close_fp64(group_normalised(*groups, lone_reward=True), [-half, 5 / (1 + EPSILON), half])
    close_fp64(group_normalised(*groups, lone_reward=True, epsilon=0.25)[1], 4)


def test_rewards_that_differ_by_little_are_not_taken_for_equal() -> None:
    reward_N, group_N = torch.tensor([1.0, 0.999, 1.0, 0.999]), torch.zeros(4, dtype=torch.long)
    close_fp32(
        group_normalised(reward_N, group_N, 1), [0.8645, -0.8645, 0.8645, -0.8645], rtol=1e-3
    )  # 0.0005 / (0.000577 + 0.000001)


@pytest.mark.parametrize("odd", [0.3, 1.0, -7.7])
@pytest.mark.parametrize("size", [2, 3, 6, 9])
def test_equal_others_do_not_divide(odd: float, size: int) -> None:
    for dtype, close in ((torch.float32, close_fp32), (torch.float64, close_fp64)):
        reward_N = torch.tensor([odd] + [0.1] * (size - 1), dtype=dtype)
        found_N = leave_one_out_normalised(reward_N, torch.zeros(size, dtype=torch.long), 1)
        assert found_N.dtype == dtype
        close(found_N[0], odd - 0.1)


def test_others_that_differ_by_little_divide() -> None:
    # The others of the first are 0 and 2e-4, far below its own distance: mean 1e-4, deviation 2e-4 / 2^0.5.
    found_N = leave_one_out_normalised(double(1, 0, 2e-4), torch.zeros(3, dtype=torch.long), 1)
    close_fp64(found_N[0], (1 - 1e-4) / (2e-4 / 2**0.5 + EPSILON), rtol=1e-8)


def test_groups_do_not_mix() -> None:
    reward_N, group_N = torch.tensor([1.0, 5.0, 0.0, 7.0]), torch.tensor([0, 1, 0, 1])
    close_fp32(group_centred(reward_N, group_N, 2), [0.5, -1.0, -0.5, 1.0])
    close_fp32(pass_at_k(reward_N, group_N, 2, divide_by_std=False), [1, 0, 0, 2])


def test_a_shared_best_reward_adds_nothing() -> None:
    reward_N = double(4, 7, 7, 1, -2, -1)
    found_N = pass_at_k(reward_N, torch.tensor([0, 0, 0, 0, 2, 2]), 3, divide_by_std=False)
    assert found_N.tolist() == [0, 0, 0, 0, 0, 1]


def test_without_any_reward_gpg_does_not_divide_by_0() -> None:
    assert gpg(double(0, 0, 0), torch.tensor([0, 0, 1]), 2).tolist() == [0, 0, 0]


@pytest.mark.slow_beyond(3)
@SEEDS
def test_the_length_weighted_baseline_equals_the_loop(seed: int) -> None:
    reward_N, group_N, num_groups = random_groups(seed)
    length_N = torch.randint(0, 9, group_N.shape, generator=torch.Generator().manual_seed(seed))
    length_N[group_N == 3] = 0
    expected = []
    for reward, group in zip(reward_N, group_N, strict=True):
        members = group_N == group
        tokens = (length_N * members).sum()
        total = (reward_N * length_N * members).sum()
        expected.append(reward - (total / tokens if tokens else reward_N[members].max()))
    found_N = length_weighted_centred(reward_N, length_N, group_N, num_groups)
    close_fp64(found_N, expected)


def test_the_length_weighted_baseline_by_hand() -> None:
    # (1 * 3 + 0 * 1) / 4 = 0.75; a group of one has itself for a baseline, whatever its length.
    found_N = length_weighted_centred(double(1, 0, 5), torch.tensor([3, 1, 7]), torch.tensor([0, 0, 1]), 2)
    close_fp64(found_N, [0.25, -0.75, 0])
    equal_N = length_weighted_centred(
        torch.full((3,), 0.1), torch.tensor([3, 1, 7]), torch.tensor([0] * 3), 1
    )
    assert equal_N.eq(0).all()
    zero_N = length_weighted_centred(double(1, 0), torch.tensor([1, 0]), torch.tensor([0, 0]), 1)
    close_fp64(zero_N, [0, -1])


def test_several_rewards_are_normalised_each_for_itself() -> None:
    _, group_N, num_groups = random_groups(1)
    reward_KN = torch.randn(3, len(group_N), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scaled_KN = reward_KN * double(1, 100, 0.01)[:, None]
    found_N = group_decoupled(scaled_KN, group_N, num_groups, weight_K=torch.tensor([1.0, 0.5, -2.0]))
    each = [group_normalised(reward_N, group_N, num_groups) for reward_N in scaled_KN]
    close_fp64(found_N, each[0] + 0.5 * each[1] - 2 * each[2])
    close_fp64(each[1], group_normalised(reward_KN[1], group_N, num_groups), rtol=1e-4)


def test_the_greedy_baseline_is_subtracted_from_every_token() -> None:
    found_T = baseline_centred(double(3, 2, 4), double(0.5, 9, -1), torch.tensor([0, 0, 2]))
    assert found_T.tolist() == [2.5, 1.5, 5]


def test_reinforce_plus_plus_by_hand() -> None:
    # Returns 1 + 0.5 * 2 = 2, 2, 6; mean 10 / 3, variance 16 / 3.
    found_T = reinforce_plus_plus(double(1, 2, 6), torch.tensor([2, 1]), gamma=0.5)
    close_fp64(found_T, [(x - 10 / 3) / (16 / 3) ** 0.5 for x in (2, 2, 6)], rtol=1e-8)


def test_reinforce_plus_plus_with_a_baseline_by_hand() -> None:
    # Centred 1 and -1 over three tokens and one, 0 for the lone one's single token: mean 0.4, variance 0.8.
    length_N = torch.tensor([3, 1, 1, 0])
    found_T = reinforce_plus_plus_baseline(double(5, 3, 7, 8), torch.tensor([0, 0, 1, 2]), 3, length_N)
    close_fp64(found_T, [(x - 0.4) / 0.8**0.5 for x in (1, 1, 1, -1, 0)], rtol=1e-7)


def token_rows(seed: int) -> dict[str, Any]:
    """Chosen tokens of eight segments in two groups; positions have gaps, some segments are empty."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(0, 7, (8,), generator=generator)
    segment_T = torch.arange(8).repeat_interleave(length_B)
    count = len(segment_T)
    position_T = torch.cat([torch.randperm(9, generator=generator)[:n].sort().values + 30 for n in length_B])
    numbers_4T = torch.rand(4, count, generator=generator, dtype=torch.float64)
    return {
        "return_T": numbers_4T[0] * 4 - 2,
        "logprob_T": numbers_4T[1].log(),
        "square_T": numbers_4T[1] ** 2 + numbers_4T[2] * (1 - numbers_4T[1]) ** 2,
        "position_T": position_T,
        "segment_T": segment_T,
        "group_B": torch.randint(0, 3, (8,), generator=generator) * 5 - 3,
        "weight_T": 0.5 + numbers_4T[3],
    }


def token_baseline_loop(rows: dict[str, Any], epsilon: float) -> list[float]:
    steps = []
    for t, segment in enumerate(rows["segment_T"].tolist()):
        before = [j for j in range(t + 1) if rows["segment_T"][j] == segment]
        energy = sum(
            rows["weight_T"][j] ** 2 * (1 - 2 * rows["logprob_T"][j].exp() + rows["square_T"][j])
            for j in before
        )
        place = int(rows["group_B"][segment]), int(rows["position_T"][t])
        steps.append((place, float(energy), float(rows["return_T"][t])))
    found = []
    for place, _, reward in steps:
        there = [(energy, other) for at, energy, other in steps if at == place]
        total = sum(energy for energy, _ in there) + epsilon
        baseline = sum(energy * other for energy, other in there) / total if len(there) > 1 else 0.0
        found.append(reward - baseline)
    return found


@pytest.mark.slow_beyond(3)
@SEEDS
def test_the_optimal_token_baseline_equals_the_loop(seed: int) -> None:
    rows = token_rows(seed)
    close_fp64(optimal_token_baseline(**rows, epsilon=0.3), token_baseline_loop(rows, 0.3))
    rows["weight_T"] = torch.ones_like(rows["weight_T"])
    expected = token_baseline_loop(rows, 1e-8)
    del rows["weight_T"]
    close_fp64(optimal_token_baseline(**rows), expected)


def test_a_position_that_one_trajectory_reaches_has_no_baseline() -> None:
    # Two segments of one group; w = 1 - 2 * 0.5 + 0.5 = 0.5 for every token.
    found_T = optimal_token_baseline(
        double(1, 4, 3),
        double(0.5, 0.5, 0.5).log(),
        double(0.5, 0.5, 0.5),
        torch.tensor([0, 1, 0]),
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 0]),
    )
    close_fp64(found_T, [1 - 2, 4, 3 - 2], atol=1e-7)


def test_no_tokens_have_no_baseline() -> None:
    none, nothing = double(), torch.zeros(0, dtype=torch.long)
    assert optimal_token_baseline(none, none, none, nothing, nothing, nothing).tolist() == []
    assert optimal_token_baseline(none, none, none, nothing, nothing, torch.tensor([0, 1])).tolist() == []
