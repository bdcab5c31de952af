"""Credit over turns on the game of two turns: mean gradients over all groups against the exact gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms import credit
from millrace.algorithms.advantages import group_centred, leave_one_out
from millrace.algorithms.credit import Comparison, Turns
from millrace.foundations.enumerate import draws, exact_gradient, prefix_values
from millrace.foundations.mdp import Floats
from millrace.foundations.turn_game import STOP, TREE, TurnGame, example_game, random_game
from tests.close import close_fp64

GAMES = [example_game(), *map(random_game, range(5))]
each_game = pytest.mark.parametrize("game", GAMES, ids=["example", *map(str, range(5))])


class Groups:
    """Every group of a game, packed one after another; a turn is a token."""

    def __init__(self, game: TurnGame, size: int = 2) -> None:
        self.game, self.size = game, size
        self.every = draws(TREE, game.policy_PV, size)
        reward_U = torch.from_numpy(game.reward_PV[self.every.prefix_T, self.every.token_T])
        self.turns = Turns(
            reward_U,
            torch.from_numpy(self.every.prefix_T),
            torch.ones(len(self.every.token_T), dtype=torch.long),
            torch.from_numpy(self.every.length_B),
            gain_U=reward_U,
        )
        outcome_N = torch.from_numpy(game.outcome_N[self.every.sequence_B])
        self.return_N = outcome_N.index_add(0, self.turns.episode_U, self.turns.reward_U)
        self.group_N, self.num_groups = torch.from_numpy(self.every.draw_B), len(self.every.probability_D)

    def expected(self, advantage_U: Tensor) -> Floats:
        """E of the mean over the group's episodes of sum_k A_k grad log pi_k."""
        return self.every.mean(self.every.gradients(advantage_U.numpy() / self.size, self.game.policy_PV))

    def by_episode(self, compare: Comparison) -> Floats:
        advantage_N = compare(self.return_N, self.group_N, self.num_groups)
        return self.expected(advantage_N[self.turns.episode_U])

    def return_to_go(self, *, centre: Comparison = leave_one_out, discount: float = 1.0) -> Floats:
        given = (self.turns, self.return_N, self.group_N, self.num_groups)
        return self.expected(credit.return_to_go(*given, centre=centre, epsilon=None, discount=discount))

    def turn_index(self) -> Floats:
        given = (self.turns, self.return_N, self.group_N, self.num_groups)
        return self.expected(credit.turn_index(*given, compare=leave_one_out, discount=1.0))

    def anchor(self, *, compare: Comparison = leave_one_out, weight: float = 1.0) -> Floats:
        given = (self.turns, self.return_N, self.group_N, self.num_groups)
        return self.expected(credit.anchor(*given, compare=compare, discount=1.0, weight=weight))


@each_game
def test_the_groups_are_all_there(game: TurnGame) -> None:
    groups = Groups(game)
    assert len(TREE.sequences) == 13
    assert groups.num_groups == 13 * 14 // 2
    close_fp64(groups.every.probability_D.sum(), 1)
    # Not only the sum over all: going on and the first reward both matter.
    assert abs(game.gradient_PV[0, STOP]) > 1e-3
    assert abs(game.mean_intermediate_reward) > 1e-2


@each_game
def test_one_advantage_for_the_episode_is_unbiased(game: TurnGame) -> None:
    groups = Groups(game)
    close_fp64(groups.by_episode(leave_one_out), game.gradient_PV)
    close_fp64(groups.by_episode(group_centred), game.gradient_PV / 2)


@pytest.mark.slow_beyond(9)
@each_game
@pytest.mark.parametrize("size", [2, 3])
def test_the_return_to_go_is_unbiased(game: TurnGame, size: int) -> None:
    groups = Groups(game, size)
    close_fp64(groups.return_to_go(), game.gradient_PV)
    close_fp64(groups.return_to_go(centre=group_centred), game.gradient_PV * (size - 1) / size)


@each_game
def test_a_discount_changes_the_return_to_go_as_it_should(game: TurnGame) -> None:
    """The first turn sees the second reward at a fraction, the second turn sees its own as it is."""
    first_PV, second_PV = game.reward_PV.copy(), game.total_PV
    first_PV[1:] *= 0.25
    first_PV += TREE.at_the_end(game.outcome_N)
    expected_PV = exact_gradient(TREE, game.policy_PV, second_PV)
    expected_PV[0] = exact_gradient(TREE, game.policy_PV, first_PV)[0]
    close_fp64(Groups(game).return_to_go(discount=0.25), expected_PV)


@pytest.mark.slow_beyond(4)
@each_game
def test_a_baseline_for_each_turn_index_moves_stopping_by_the_mean_intermediate_reward(
    game: TurnGame,
) -> None:
    """In the logit of stopping exactly pi(stop) E[reward before the last turn], in groups of every size."""
    for size in (2, 3):
        bias_PV = Groups(game, size).turn_index() - game.gradient_PV
        stop_bias = game.policy_PV[0, STOP] * game.mean_intermediate_reward
        close_fp64(bias_PV[0, STOP], stop_bias)
        close_fp64(game.turn_index_bias_PV[0, STOP], stop_bias)
        close_fp64(bias_PV[1:], np.zeros((3, 4)))


@pytest.mark.slow_beyond(5)
@each_game
def test_in_large_groups_the_bias_by_turn_index_is_that_of_a_reward_for_stopping(game: TurnGame) -> None:
    """In small ones, an episode may be the only one to go on: then its reward is compared with nothing.

    With the chance q of going on, that leaves out (1 - q)^(n - 1) of the comparison among those that go on.
    """
    go_PV = np.zeros_like(game.reward_PV)
    go_PV[0, :STOP] = game.reward_PV[0, :STOP]
    compared_PV = exact_gradient(TREE, game.policy_PV, go_PV) + game.turn_index_bias_PV
    alone = game.policy_PV[0, STOP]
    for size in (2, 3):
        bias_PV = Groups(game, size).turn_index() - game.gradient_PV
        close_fp64(bias_PV, game.turn_index_bias_PV - alone ** (size - 1) * compared_PV)


def test_the_bias_can_turn_the_policy_round() -> None:
    game = example_game()
    assert game.gradient_PV[0, STOP] < -0.01
    assert Groups(game).turn_index()[0, STOP] > 0.01


@pytest.mark.slow_beyond(3)
@each_game
def test_the_bias_meter_measures_it(game: TurnGame) -> None:
    groups = Groups(game)
    metric = 0.0
    for draw, probability in enumerate(groups.every.probability_D.tolist()):
        inside_U = groups.group_N[groups.turns.episode_U] == draw
        turns = Turns(
            *(column_U[inside_U] for column_U in (groups.turns.reward_U, groups.turns.state_U)),
            groups.turns.length_U[inside_U],
            groups.turns.count_N[groups.group_N == draw],
            groups.turns.gain_U[inside_U],
        )
        metric += probability * credit.turn_index_bias(turns)
    close_fp64(metric, -game.mean_intermediate_reward)


@each_game
def test_anchors_multiply_the_gradient_of_each_state(game: TurnGame) -> None:
    """By 1 + weight x the chance that the other episode of two reaches it; the first turn is as it is."""
    factor_P = 1 + 0.7 * np.array([0, *game.policy_PV[0, :STOP]])
    close_fp64(Groups(game).anchor(weight=0.7), game.gradient_PV * factor_P[:, None])
    halved_PV = Groups(game).anchor(compare=group_centred, weight=0.7)
    close_fp64(halved_PV, game.gradient_PV * factor_P[:, None] / 2)


@each_game
def test_progress_adds_the_gradient_of_what_it_moves(game: TurnGame) -> None:
    """Each gain on its own turn, without the mean of the episode: an episode of one turn moves nothing."""
    moved_PV = np.zeros((4, 4))
    for first in range(STOP):
        for second in range(4):
            gains = game.reward_PV[0, first], game.reward_PV[1 + first, second]
            chance = game.policy_PV[0, first] * game.policy_PV[1 + first, second]
            for prefix, token, gain in ((0, first, gains[0]), (1 + first, second, gains[1])):
                moved_PV[prefix] -= chance * (gain - np.mean(gains)) * game.policy_PV[prefix]
                moved_PV[prefix, token] += chance * (gain - np.mean(gains))
    given = (lambda g: (g.turns, g.return_N, g.group_N, g.num_groups))(groups := Groups(game))
    found_U = credit.progress(*given, compare=leave_one_out, discount=0.0, weight=0.7)
    close_fp64(groups.expected(found_U), game.gradient_PV + 0.7 * moved_PV)
    assert np.abs(moved_PV).max() > 1e-3


def of_turns(game: TurnGame, value_P: Floats, lam: float, gamma: float = 1.0) -> Floats:
    """The expected gradient of GAE over turns, every episode by itself."""
    groups = Groups(game, 1)
    reward_T = torch.from_numpy(game.total_PV[groups.every.prefix_T, groups.every.token_T])
    value_T = torch.from_numpy(value_P[groups.every.prefix_T])
    advantage_T, _ = credit.gae_turn(reward_T, value_T, groups.turns, gamma=gamma, lam=lam)
    return groups.expected(advantage_T)


@each_game
def test_a_critic_over_turns_is_unbiased_where_it_is_right_or_lambda_is_1(game: TurnGame) -> None:
    value_P = prefix_values(TREE, game.policy_PV, game.total_PV)
    wrong_P = np.random.default_rng(3).normal(size=4)
    for lam in (0.0, 0.5, 1.0):
        close_fp64(of_turns(game, value_P, lam), game.gradient_PV)
    close_fp64(of_turns(game, wrong_P, 1.0), game.gradient_PV)
    # The first turn trusts the critic to 1 - lambda: a wrong value of the second state moves its gradient.
    shift_PV = np.zeros((4, 4))
    shift_PV[0, :STOP] = 0.5 * (wrong_P - value_P)[1:]
    expected_PV = game.gradient_PV + exact_gradient(TREE, game.policy_PV, shift_PV)
    close_fp64(of_turns(game, wrong_P, 0.5), expected_PV)
