"""What theory says of advantage estimators: where they are unbiased, their bias elsewhere, their variance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms import advantages
from millrace.algorithms.losses import reinforce
from millrace.foundations.enumerate import exact_gradient
from tests.close import close_fp64
from tests.estimators.test_advantages import GROUPS, WORLDS, every_world, of_group
from tests.estimators.world import TREE, Batch, World, paths


def mean_of(world: World, size: int, advantage: Callable[[Batch], Tensor]) -> np.ndarray:
    batch = world.batch(size)
    return world.mean(batch, reinforce(batch.policy_T, advantage(batch)))


def exact(world: World) -> np.ndarray:
    return exact_gradient(TREE, world.policy_PV, world.final_PV)


@every_world
def test_the_return_itself_and_any_constant_baseline_are_unbiased(world: World) -> None:
    for baseline in (0.0, 0.8, -3.0):
        mean_PV = mean_of(world, 1, lambda batch, b=baseline: batch.spread(batch.reward_B - b))
        close_fp64(mean_PV, exact(world))


@every_world
def test_the_reward_of_the_greedy_answer_is_an_unbiased_baseline(world: World) -> None:
    sequence: tuple[int, ...] = ()
    while len(sequence) < 3 and (not sequence or sequence[-1] != 2):
        sequence += (int(world.policy_PV[TREE.prefixes.index(sequence)].argmax()),)
    greedy = float(world.reward_N[TREE.sequences.index(sequence)])

    def remax(batch: Batch) -> Tensor:
        baseline_B = torch.full_like(batch.reward_B, greedy)
        return advantages.baseline_centred(batch.spread(batch.reward_B), baseline_B, batch.segment_T)

    close_fp64(mean_of(world, 1, remax), exact(world))


@every_world
@pytest.mark.parametrize("size", [2, 3])
def test_leaving_one_out_is_unbiased_and_the_group_mean_shrinks_by_one_nth(size: int, world: World) -> None:
    left_PV = mean_of(world, size, of_group(advantages.leave_one_out))
    centred_PV = mean_of(world, size, of_group(advantages.group_centred))
    close_fp64(left_PV, exact(world))
    close_fp64(centred_PV, (size - 1) / size * exact(world))


def test_two_normalised_rewards_climb_the_rate_of_winning() -> None:
    """Of two, A = +-1 / sqrt(2), so the mean is the slope of P(win) - P(lose) against a fixed rival."""
    world = WORLDS[2]
    chance_N = [chance for _, chance in TREE.walk(world.policy_PV)]
    lead_N = [
        sum(chance * np.sign(reward - other) for chance, other in zip(chance_N, world.reward_N, strict=True))
        for reward in world.reward_N
    ]
    mean_PV = mean_of(world, 2, of_group(advantages.group_normalised))
    expected_PV = exact_gradient(TREE, world.policy_PV, TREE.at_the_end(lead_N)) / math.sqrt(2)
    close_fp64(mean_PV, expected_PV, rtol=1e-5, atol=1e-6)  # epsilon is 1e-6
    assert np.abs(mean_PV - exact(world)).max() > 0.02


@pytest.mark.parametrize("size", [2, 3])
def test_undivided_pass_at_k_climbs_the_mean_of_the_best_of_k(size: int) -> None:
    """Its sum over the group is unbiased for the gradient of E[max r]; here the group is averaged."""
    world = WORLDS[1]
    mean_PV = mean_of(world, size, of_group(partial(advantages.pass_at_k, divide_by_std=False)))
    batch = world.batch(size)
    best_B = batch.reward_B.view(-1, size).amax(dim=1).repeat_interleave(size)
    best_PV = world.mean(batch, reinforce(batch.policy_T, batch.spread(best_B)))
    close_fp64(mean_PV, best_PV)
    # P(max <= r) = P(r_i <= r)^k, so the slope of E[max] is a sum over levels of k P(<= r)^(k - 1) dP.
    levels = sorted(set(world.reward_N.tolist()))
    chance_N = np.array([chance for _, chance in TREE.walk(world.policy_PV)])
    worth_N = np.full(15, levels[-1])
    for lower, upper in zip(levels[:-1], levels[1:], strict=True):
        below_N = world.reward_N <= lower
        worth_N -= (upper - lower) * below_N * (chance_N * below_N).sum() ** (size - 1)
    close_fp64(mean_PV, exact_gradient(TREE, world.policy_PV, TREE.at_the_end(worth_N)))


@every_world
def test_a_baseline_for_each_position_that_does_not_see_the_token_is_unbiased(world: World) -> None:
    baseline_T = torch.tensor([0.7, -0.4, 1.1], dtype=torch.float64)
    mean_PV = mean_of(world, 1, lambda batch: batch.spread(batch.reward_B) - baseline_T[batch.position_T])
    close_fp64(mean_PV, exact(world))


def test_a_token_baseline_that_holds_its_own_trajectory_is_biased_towards_0() -> None:
    """The baseline of two is a weighted mean of both returns, so it takes part of the signal with it."""
    world = WORLDS[0]
    batch = world.batch(2)
    ours = GROUPS["optimal_token_baseline"][0]
    mean_PV = world.mean(batch, reinforce(batch.policy_T, ours(batch)))
    exact_PV = exact(world)
    share = (mean_PV * exact_PV).sum() / (exact_PV**2).sum()
    # Half is lost where both are compared and their energies are equal, nothing where one goes on alone.
    assert 0.4 < share < 0.8


@every_world
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_variance_of_a_mean_of_independent_draws_is_one_nth(size: int, world: World) -> None:
    batch, one = world.batch(size), world.batch(1)
    several, single = (
        each.every.variance(world.gradients(each, reinforce(each.policy_T, each.spread(each.reward_B - 0.3))))
        for each in (batch, one)
    )
    close_fp64(several, single / size)


@every_world
@pytest.mark.parametrize("size", [2, 3])
def test_the_variance_of_leaving_one_out_is_that_of_a_u_statistic(size: int, world: World) -> None:
    """Its kernel is h(x, y) = (r_x - r_y)(s_x - s_y) / 2 (Hoeffding 1948), s the score of a sequence."""
    batch = world.batch(size)
    loss_T = reinforce(batch.policy_T, of_group(advantages.leave_one_out)(batch))
    found = batch.every.variance(world.gradients(batch, loss_T))
    one = world.batch(1)
    score_NK = world.gradients(one, reinforce(one.policy_T, torch.ones_like(one.policy_T))).reshape(15, -1)
    chance_N = one.every.probability_D
    kernel_NNK = 0.5 * (world.reward_N[:, None] - world.reward_N)[..., None] * (score_NK[:, None] - score_NK)
    mean_NK = np.einsum("m,nmk->nk", chance_N, kernel_NNK)
    centre_K = chance_N @ mean_NK
    first = (chance_N @ (mean_NK - centre_K) ** 2).sum()
    second = np.einsum("n,m,nmk->", chance_N, chance_N, (kernel_NNK - centre_K) ** 2)
    close_fp64(found, (4 * (size - 2) * first + 2 * second) / (size * (size - 1)))


@every_world
def test_no_constant_baseline_has_less_variance_than_the_score_weighted_reward(world: World) -> None:
    """b* = E[|s|^2 r] / E[|s|^2] (Greensmith et al. 2004), and the variance grows as (b - b*)^2 E|s|^2."""
    batch = world.batch(1)

    def variance(baseline: float) -> float:
        loss_T = reinforce(batch.policy_T, batch.spread(batch.reward_B - baseline))
        return batch.every.variance(world.gradients(batch, loss_T))

    score_DPV = world.gradients(batch, reinforce(batch.policy_T, torch.ones_like(batch.policy_T)))
    energy_D = (score_DPV**2).sum(axis=(1, 2)) * batch.every.probability_D
    best = (energy_D * world.reward_N).sum() / energy_D.sum()
    for off in (-0.5, 0.2, 1.0):
        close_fp64(variance(best + off), variance(best) + off**2 * energy_D.sum())


def test_lengths_are_the_right_weights_of_the_baseline_where_the_policy_is_uniform() -> None:
    """Then every token's score has the same length, and |s|^2 is the number of tokens (OPO's assumption)."""
    drawn = paths(World(4, fresh=True, spread=0.0))
    energy = [sum(path.energy) for path in drawn]
    close_fp64(energy, [2 / 3 * len(path) for path in drawn])
    by_energy, by_length = (
        sum(path.probability * weight * path.reward for path, weight in zip(drawn, weights, strict=True))
        / sum(path.probability * weight for path, weight in zip(drawn, weights, strict=True))
        for weights in (energy, [len(path) for path in drawn])
    )
    close_fp64(by_energy, by_length)


@every_world
def test_the_baseline_of_least_variance_for_a_position_weighs_by_the_energy_of_that_token_alone(
    world: World,
) -> None:
    """Scores of different prefixes are orthogonal here, so the variance is a sum over positions.

    b_t = E[|s_t|^2 r] / E[|s_t|^2]; with energies summed up to t, as `optimal_token_baseline` has them, it
    comes close.
    """
    batch = world.batch(1)
    drawn = paths(world)
    own = [path.energy for path in drawn]
    summed = [np.cumsum(path.energy).tolist() for path in drawn]

    def baseline(weights: list[list[float]]) -> np.ndarray:
        total_K, weighted_K = np.zeros((2, 3))
        for path, row in zip(drawn, weights, strict=True):
            for t, weight in enumerate(row):
                total_K[t] += path.probability * weight
                weighted_K[t] += path.probability * weight * path.reward
        return weighted_K / total_K

    def variance(baseline_K: np.ndarray) -> float:
        advantage_T = batch.spread(batch.reward_B) - torch.from_numpy(baseline_K)[batch.position_T]
        return batch.every.variance(world.gradients(batch, reinforce(batch.policy_T, advantage_T)))

    energy_K = sum(path.probability * np.append(path.energy, [0, 0])[:3] for path in drawn)
    best_K = baseline(own)
    for off_K in (np.array([0.3, -0.2, 0.5]), baseline(summed) - best_K):
        close_fp64(variance(best_K + off_K), variance(best_K) + (energy_K * off_K**2).sum())
    assert variance(best_K) < variance(baseline(summed)) < 1.05 * variance(best_K)
    assert variance(best_K) < 0.8 * variance(np.zeros(3))


@every_world
def test_a_spread_of_the_others_changes_the_length_of_the_mean_but_not_its_direction(world: World) -> None:
    """Baseline and divisor do not see the trajectory they serve, so in the mean the divisor is a constant.

    That of the whole group does see it, and GRPO's mean has another direction.
    """
    chance = [one for _, one in TREE.walk(world.policy_PV)]
    inverse = 0.0
    for p, r in zip(chance, world.reward_N, strict=True):
        for q, other in zip(chance, world.reward_N, strict=True):
            spread = statistics.stdev([r, other])
            inverse += p * q / (spread + 1e-6 if spread > 0 else 1.0)
    found_PV = mean_of(world, 3, of_group(advantages.leave_one_out_normalised))
    close_fp64(found_PV, inverse * exact(world))
    assert abs(inverse - 1) > 0.02
    grpo_PV = mean_of(world, 3, of_group(advantages.group_normalised))
    cosine = (grpo_PV * exact(world)).sum() / math.sqrt((grpo_PV**2).sum() * (exact(world) ** 2).sum())
    assert cosine < 0.9999
