from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.mdp import uniform
from millrace.foundations.monte_carlo import (
    constant,
    every_visit,
    first_visit,
    importance_sampling,
    incremental,
    one_over_n,
)
from millrace.foundations.solve import evaluate, return_variance
from millrace.foundations.walks import Walk, sample_episodes
from tests.close import close_fp64
from tests.foundations.worlds import random_mdp, random_policy

NAN = float("nan")


def episode(states: list[int], rewards: list[float], *, actions: list[int] | None = None) -> Walk:
    words = np.zeros(len(states), dtype=np.int64) if actions is None else np.array(actions)
    return Walk(np.array(states), words, np.array(rewards), last_state=3, ended=True)


# Returns at discount 1/2: (0: 3, 1: 4, 0: 2) and (1: -2). State 2 is never visited.
TWO = [episode([0, 1, 0], [1.0, 3.0, 2.0]), episode([1], [-2.0])]


def test_first_and_every_visit_by_hand() -> None:
    first = first_visit(TWO, 3, discount=0.5)
    close_fp64(first.value_S, [3.0, 1.0, NAN], equal_nan=True)
    assert first.count_S.tolist() == [1, 2, 0]
    every = every_visit(TWO, 3, discount=0.5)
    close_fp64(every.value_S, [2.5, 1.0, NAN], equal_nan=True)
    assert every.count_S.tolist() == [2, 2, 0]


def test_the_running_mean_is_the_mean_and_a_constant_step_forgets() -> None:
    close_fp64(incremental(TWO, 3, discount=0.5, initial_S=[9, 9, 9]), [2.5, 1, 9])
    # State 0: 8 -> 8 + (3 - 8) / 4 = 6.75 -> 6.75 + (2 - 6.75) / 4; state 1: 0 -> 1 -> 1 / 4.
    found_S = incremental(TWO, 3, discount=0.5, step=constant(0.25), initial_S=[8, 0, 9])
    close_fp64(found_S, [5.5625, 0.25, 9])
    close_fp64(incremental(TWO, 3, discount=0.5, step=constant(0.25)), [1.0625, 0.25, 0])
    assert [one_over_n(n) for n in (1, 2, 4)] == [1, 0.5, 0.25]


def test_the_values_to_begin_with_are_not_written() -> None:
    initial_S = np.zeros(3)
    incremental(TWO, 3, discount=0.5, initial_S=initial_S)
    assert initial_S.tolist() == [0, 0, 0]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("discount", [1.0, 0.8])
def test_the_mean_of_first_visits_lies_within_four_standard_errors_of_the_value(discount: float) -> None:
    mdp, policy_SA = random_mdp(4, terminal=True, discount=discount), random_policy(4, 5, 3)
    episodes = sample_episodes(mdp, policy_SA, 1500, seed=0)
    found = first_visit(episodes, 5, discount=discount)
    live_S = ~mdp.terminal_S
    error_S = np.sqrt(return_variance(mdp, policy_SA)[live_S] / found.count_S[live_S])
    distance_S = np.abs(found.value_S - evaluate(mdp, policy_SA))[live_S]
    assert (distance_S <= 4 * error_S).all()
    assert 0 < distance_S.max() < 0.2
    assert found.count_S[4] == 0
    # Every visit: dependent draws, so only held against the same scale.
    every = every_visit(episodes, 5, discount=discount)
    assert (every.count_S[live_S] > found.count_S[live_S]).all()
    assert (np.abs(every.value_S - evaluate(mdp, policy_SA))[live_S] <= 4 * error_S).all()
    close_fp64(incremental(episodes, 5, discount=discount)[live_S], every.value_S[live_S])


def test_importance_sampling_by_hand() -> None:
    target_SA = np.array([[0.9, 0.1], [0.5, 0.5], [1.0, 0.0]])
    behaviour_SA = np.array([[0.3, 0.7], [0.25, 0.75], [0.5, 0.5]])
    episodes = [
        episode([0, 1], [1.0, 2.0], actions=[0, 1]),  # weights from 0: 3 * 2/3 = 2, from 1: 2/3
        episode([1, 0], [4.0, -2.0], actions=[0, 1]),  # from 1: 2 * 1/7, from 0: 1/7
        episode([2], [5.0], actions=[1]),  # pi never does this: weight 0
    ]
    ordinary = importance_sampling(episodes, target_SA, behaviour_SA, discount=0.5, weighted=False)
    close_fp64(ordinary.value_S, [(2 * 2 - 2 / 7) / 2, (2 * 2 / 3 + 3 * 2 / 7) / 2, 0])
    assert ordinary.count_S.tolist() == [2, 2, 1]
    weighted = importance_sampling(episodes, target_SA, behaviour_SA, discount=0.5, weighted=True)
    close_fp64(
        weighted.value_S,
        [(4 - 2 / 7) / (2 + 1 / 7), (4 / 3 + 6 / 7) / (2 / 3 + 2 / 7), NAN],
        equal_nan=True,
    )


def test_only_the_first_visit_of_a_state_is_weighted() -> None:
    half_SA = np.full((1, 2), 0.5)
    target_SA = np.array([[0.8, 0.2]])
    (value,) = importance_sampling(
        [episode([0, 0], [1.0, 10.0])], target_SA, half_SA, discount=1.0, weighted=False
    ).value_S
    close_fp64(value, 1.6**2 * 11)


def test_importance_sampling_of_the_same_policy_is_first_visit() -> None:
    mdp, policy_SA = random_mdp(6, terminal=True, discount=0.9), random_policy(6, 5, 3)
    episodes = sample_episodes(mdp, policy_SA, 50, seed=2)
    for weighted in (True, False):
        found = importance_sampling(episodes, policy_SA, policy_SA, discount=0.9, weighted=weighted)
        close_fp64(found.value_S, first_visit(episodes, 5, discount=0.9).value_S, equal_nan=True)


@pytest.mark.slow
def test_both_kinds_of_importance_sampling_find_the_value_of_the_other_policy() -> None:
    mdp, policy_SA = random_mdp(8, num_actions=2, terminal=True, discount=0.7), random_policy(8, 5, 2)
    near_SA = 0.7 * policy_SA + 0.3 * uniform(mdp)
    episodes = sample_episodes(mdp, near_SA, 4000, seed=0)
    exact_S, other_S = evaluate(mdp, policy_SA), evaluate(mdp, near_SA)
    for weighted in (True, False):
        found = importance_sampling(episodes, policy_SA, near_SA, discount=0.7, weighted=weighted)
        live_S = ~mdp.terminal_S
        assert np.abs(found.value_S - exact_S)[live_S].max() < 0.08
        assert np.abs(other_S - exact_S)[live_S].max() > 0.16


def test_bad_input_is_refused_by_name() -> None:
    cut = Walk(np.array([0, 1]), np.array([0, 0]), np.array([1.0, 2.0]), last_state=1, ended=False)
    for method in (first_visit, every_visit, incremental):
        with pytest.raises(ValueError, match=r"^episodes\[2\] was cut off after 2 steps$"):
            method([*TWO, cut], 3, discount=0.5)
        with pytest.raises(ValueError, match=r"^discount is -1; it lies in \[0, 1\]$"):
            method(TWO, 3, discount=-1)
    with pytest.raises(ValueError, match=r"^initial_S has shape \(2,\); it must be \(3,\)$"):
        incremental(TWO, 3, discount=0.5, initial_S=[0, 0])
    for step in (0.0, 1.5, NAN):
        with pytest.raises(ValueError, match=rf"^step is {step}; it is above 0 and at most 1$"):
            constant(step)
    assert constant(1.0)(3) == 1
    never_SA, half_SA = np.array([[0.0, 1.0]]), np.array([[0.5, 0.5]])
    with pytest.raises(ValueError, match=r"^behaviour_SA gives probability 0 to an action that was taken$"):
        importance_sampling([episode([0], [1.0])], half_SA, never_SA, discount=1.0, weighted=True)
    with pytest.raises(ValueError, match=r"^target_SA has shape \(1, 2\); it must be \(2, 2\)$"):
        importance_sampling([], half_SA, np.full((2, 2), 0.5), discount=1.0, weighted=True)
    with pytest.raises(ValueError, match=r"^behaviour_SA\[0\] sums to 2"):
        importance_sampling([], half_SA, np.ones((1, 2)), discount=1.0, weighted=True)
    with pytest.raises(ValueError, match=r"^target_SA\[0\] sums to 2"):
        importance_sampling([], np.ones((1, 2)), half_SA, discount=1.0, weighted=True)
