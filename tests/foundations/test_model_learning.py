from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.mdp import uniform
from millrace.foundations.model_learning import Model, learn_model
from millrace.foundations.solve import evaluate, policy_iteration
from millrace.foundations.walks import Walk, sample_episodes
from tests.close import close_fp64
from tests.foundations.worlds import random_mdp

EPISODES = [
    Walk(np.array([0, 1, 0]), np.array([1, 0, 1]), np.array([1.0, 3.0, 2.0]), last_state=2, ended=True),
    Walk(np.array([0, 0]), np.array([1, 1]), np.array([0.5, 6.0]), last_state=1, ended=False),
    Walk(np.array([], dtype=np.int64), np.array([], dtype=np.int64), np.array([]), last_state=2, ended=True),
]


def test_counts_by_hand() -> None:
    model = learn_model(EPISODES, 3, 2)
    # From 0 action 1 led to 1, 2, 0, 1; from 1 action 0 led to 0.
    close_fp64(model.count_SAS, [[[0, 0, 0], [1, 2, 1]], [[1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]])
    close_fp64(model.reward_SA, [[0, 9.5], [3, 0], [0, 0]])
    assert model.unvisited_SA.tolist() == [[True, False], [False, True], [True, True]]


def test_the_model_is_shares_and_means_and_what_was_never_tried_stays() -> None:
    mdp = learn_model(EPISODES, 3, 2).mdp(discount=0.5, start_S=[1, 0, 0])
    close_fp64(
        mdp.transition_SAS.copy(),
        [[[1, 0, 0], [0.25, 0.5, 0.25]], [[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 1]]],
    )
    close_fp64(mdp.reward_SA.copy(), [[0, 2.375], [3, 0], [0, 0]])
    assert mdp.terminal_S.tolist() == [False, False, True]
    assert mdp.discount == 0.5


def test_a_reward_for_the_unknown_draws_the_planner_there_or_keeps_it_away() -> None:
    model = learn_model(EPISODES, 3, 2)
    curious = policy_iteration(model.mdp(discount=0.5, start_S=[1, 0, 0], unvisited_reward=6.0))
    close_fp64(curious.policy_SA[:2], [[1, 0], [0, 1]])
    close_fp64(curious.value_S, [12, 12, 12])
    careful = policy_iteration(model.mdp(discount=0.5, start_S=[1, 0, 0], unvisited_reward=-6.0))
    close_fp64(careful.policy_SA[:2], [[0, 1], [1, 0]])


def test_planning_in_a_model_of_exact_shares_is_planning_in_the_world() -> None:
    world = random_mdp(2, terminal=True, discount=0.9)
    times = 1_000_000_007
    count_SAS = np.rint(world.transition_SAS * times).astype(np.int64)
    model = Model(count_SAS, world.reward_SA * count_SAS.sum(axis=2))
    learned = policy_iteration(model.mdp(discount=0.9, start_S=world.start_S))
    close_fp64(learned.value_S, policy_iteration(world).value_S, atol=1e-6)


@pytest.mark.slow
def test_a_model_of_many_episodes_plans_nearly_as_well_as_the_world() -> None:
    world = random_mdp(7, num_actions=2, terminal=True, discount=0.8)
    episodes = sample_episodes(world, uniform(world), 800, seed=0)
    model = learn_model(episodes, 5, 2)
    assert not model.unvisited_SA[:-1].any()
    learned = policy_iteration(model.mdp(discount=0.8, start_S=world.start_S))
    best = policy_iteration(world)
    assert np.abs(learned.value_S - best.value_S).max() < 0.15
    close_fp64(evaluate(world, learned.policy_SA), best.value_S, atol=0.02)
    close_fp64(model.mdp(discount=0.8, start_S=world.start_S).reward_SA.copy(), world.reward_SA.copy())


@pytest.mark.parametrize(
    ("state", "action", "sentence"),
    [
        (3, 0, "episodes[1] holds state 3; there are 3"),
        (-1, 0, "episodes[1] holds state -1; there are 3"),
        (0, 2, "episodes[1] holds action 2; there are 2"),
        (0, -1, "episodes[1] holds action -1; there are 2"),
    ],
)
def test_what_lies_beyond_the_given_numbers_is_refused(state: int, action: int, sentence: str) -> None:
    bad = Walk(np.array([0]), np.array([action]), np.array([1.0]), last_state=state, ended=True)
    with pytest.raises(ValueError) as caught:
        learn_model([EPISODES[0], bad], 3, 2)
    assert str(caught.value) == sentence
