from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.example_mdps import chain, gridworld, random_mdp
from millrace.foundations.mdp import uniform
from millrace.foundations.solve import evaluate, policy_iteration
from millrace.foundations.walks import sample_episodes
from tests.close import close_fp64


@pytest.mark.parametrize("num_states", [1, 5, 9])
def test_the_walk_of_a_chain_ends_at_the_right_in_proportion_to_its_start(num_states: int) -> None:
    mdp = chain(num_states, discount=1.0)
    inner_S = np.arange(1, num_states + 1)
    close_fp64(evaluate(mdp, uniform(mdp))[1:-1], inner_S / (num_states + 1))
    close_fp64(policy_iteration(chain(num_states, discount=0.8)).value_S[1:-1], 0.8 ** (num_states - inner_S))
    assert mdp.terminal_S.tolist() == [True] + [False] * num_states + [True]


def test_the_discounted_walk_has_the_values_of_its_recurrence() -> None:
    # v(k) = gamma / 2 (v(k - 1) + v(k + 1)), v(0) = 0, v(6) counts as 1 / gamma, since the last step is not
    # discounted. With r = (1 + sqrt(1 - gamma^2)) / gamma: v(k) = (r^k - r^-k) / (r^6 - r^-6) / gamma.
    gamma = 0.9
    root = (1 + np.sqrt(1 - gamma**2)) / gamma
    k_S = np.arange(1, 6)
    mdp = chain(5, discount=gamma)
    expected_S = (root**k_S - root**-k_S) / (root**6 - root**-6.0) / gamma
    close_fp64(evaluate(mdp, uniform(mdp))[1:-1], expected_S)


def test_the_gridworld_has_the_values_of_the_book() -> None:
    mdp = gridworld(4, discount=1.0)
    book = [[0, -14, -20, -22], [-14, -18, -20, -20], [-20, -20, -18, -14], [-22, -20, -14, 0]]
    close_fp64(evaluate(mdp, uniform(mdp)).reshape(4, 4), book)


@pytest.mark.parametrize("side", [2, 5])
def test_the_best_path_of_a_gridworld_is_the_shortest(side: int) -> None:
    row, column = np.indices((side, side))
    steps = np.minimum(row + column, 2 * (side - 1) - row - column)
    found = policy_iteration(gridworld(side, discount=0.8)).value_S.reshape(side, side)
    close_fp64(found, -(1 - 0.8**steps) / 0.2)


@pytest.mark.slow
def test_every_action_of_a_random_mdp_ends_it_once_in_ten() -> None:
    mdp = random_mdp(4, 3, discount=1.0, seed=1)
    close_fp64(mdp.transition_SAS[:-1, :, -1].tolist(), np.full((4, 3), 0.1))
    assert mdp.terminal_S.tolist() == [False] * 4 + [True]
    episodes = sample_episodes(mdp, uniform(mdp), 2000, seed=0)
    # The number of steps is geometric: mean 10, variance 90.
    assert abs(np.mean([one.num_steps for one in episodes]) - 10) < 4 * np.sqrt(90 / 2000)
    again, other = (random_mdp(4, 3, discount=1.0, seed=seed) for seed in (1, 2))
    assert (again.transition_SAS == mdp.transition_SAS).all() and (again.reward_SA == mdp.reward_SA).all()
    assert not (other.reward_SA == mdp.reward_SA).all()


def test_episodes_begin_in_every_state_that_is_not_terminal() -> None:
    for mdp in (chain(3, discount=1), gridworld(3, discount=1), random_mdp(4, 2, discount=1, seed=0)):
        close_fp64(mdp.start_S.tolist(), ~mdp.terminal_S / (~mdp.terminal_S).sum())


def test_sizes_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^num_states is 0; it is at least 1$"):
        chain(0, discount=1)
    with pytest.raises(ValueError, match=r"^side is 1; it is at least 2$"):
        gridworld(1, discount=1)
    with pytest.raises(ValueError, match=r"^num_states is 0; it is at least 1$"):
        random_mdp(0, 1, discount=1, seed=0)
    with pytest.raises(ValueError, match=r"^num_actions is 0; it is at least 1$"):
        random_mdp(1, 0, discount=1, seed=0)
