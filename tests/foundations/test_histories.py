from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations import occupancy, solve
from millrace.foundations.histories import (
    History,
    as_history_policy,
    choices,
    expected_return,
    markov_equivalent,
    occupancy_by_step,
)
from millrace.foundations.mdp import Floats, Mdp
from tests.close import close_fp64
from tests.foundations.test_solve import every_seed
from tests.foundations.worlds import random_mdp, random_policy


def looks_back(history: History) -> Floats:
    """A policy of two actions that depends on everything that happened."""
    share = (1 + sum((k + 1) * word for k, word in enumerate(history))) % 7 / 7
    return np.array([share, 1 - share])


@pytest.mark.slow_beyond(4)
@every_seed
def test_a_markov_policy_is_one_of_histories_that_ignores_them(seed: int) -> None:
    mdp = random_mdp(seed, num_states=3, num_actions=2, horizon=3, discount=0.9)
    policy_HSA = random_policy(seed, 3, 3, 2)
    lifted = as_history_policy(mdp, policy_HSA)
    close_fp64(expected_return(mdp, lifted), solve.expected_return(mdp, policy_HSA))
    close_fp64(occupancy_by_step(mdp, lifted), occupancy.occupancy_by_step(mdp, policy_HSA))
    close_fp64(markov_equivalent(mdp, lifted), policy_HSA)


@pytest.mark.slow_beyond(4)
@every_seed
def test_a_markov_policy_does_as_well_as_any_that_looks_back(seed: int) -> None:
    mdp = random_mdp(seed, num_states=3, num_actions=2, horizon=3, discount=0.9, terminal=seed % 2 == 0)
    policy_HSA = markov_equivalent(mdp, looks_back)
    close_fp64(solve.expected_return(mdp, policy_HSA), expected_return(mdp, looks_back))
    close_fp64(occupancy.occupancy_by_step(mdp, policy_HSA), occupancy_by_step(mdp, looks_back))
    best_HSA = solve.backward_induction(mdp)[1]
    assert expected_return(mdp, looks_back) < solve.expected_return(mdp, best_HSA)


def test_choices_by_hand() -> None:
    # From 0, action 1 ends in state 1; action 0 stays. History (0, 0, 0) has 3/7 of its second choice on 1.
    transition_SAS = [[[1, 0], [0, 1]], [[0, 1], [0, 1]]]
    mdp = Mdp(transition_SAS, [[2, 5], [0, 0]], 0.5, [1, 0], horizon=2)  # type: ignore[arg-type]
    found = [(history, action, round(p * 49, 9)) for history, action, p in choices(mdp, looks_back)]
    assert found == [((0,), 0, 7), ((0, 0, 0), 0, 1), ((0, 0, 0), 1, 6), ((0,), 1, 42)]
    close_fp64(expected_return(mdp, looks_back), (7 * 2 + 42 * 5 + 0.5 * (1 * 2 + 6 * 5)) / 49)


def test_bad_policies_of_histories_are_refused_with_the_history() -> None:
    mdp = random_mdp(0, num_states=2, num_actions=2, horizon=2)
    with pytest.raises(ValueError, match=r"^policy\(\(0,\)\) sums to 0.9; probabilities sum to 1$"):
        expected_return(mdp, lambda history: np.array([0.5, 0.4]))
    with pytest.raises(ValueError, match=r"^policy\(\(0,\)\) has shape \(3,\); it must be \(2,\)$"):
        expected_return(mdp, lambda history: np.array([0.5, 0.4, 0.1]))
    with pytest.raises(ValueError, match=r"^the MDP has no horizon, so its steps cannot be counted$"):
        expected_return(random_mdp(0, num_actions=2), looks_back)
