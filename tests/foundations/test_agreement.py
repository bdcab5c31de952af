from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.agreement import (
    MethodValues,
    decreasing,
    exact_methods,
    largest_deviation,
    largest_standard_score,
    policy_named,
    sampled_methods,
)
from millrace.foundations.example_mdps import chain, gridworld, random_mdp
from millrace.foundations.mdp import Mdp, markov_reward_process, uniform
from millrace.foundations.solve import evaluate, return_variance
from millrace.foundations.walks import sample_episodes
from tests.close import close_fp64
from tests.foundations.worlds import random_mdp as dense_mdp
from tests.foundations.worlds import random_policy

NAN = float("nan")
MDPS = [
    chain(5, discount=1.0),
    gridworld(3, discount=0.9),
    *(random_mdp(4, 3, discount=discount, seed=seed) for discount in (0.7, 1.0) for seed in range(3)),
]


@pytest.mark.slow_beyond(7)
@pytest.mark.parametrize("policy", ["uniform", "optimal"])
@pytest.mark.parametrize("mdp", MDPS)
def test_every_exact_method_finds_the_same(mdp: Mdp, policy: str) -> None:
    policy_SA = policy_named(mdp, policy)
    found = exact_methods(mdp, policy_SA, optimal=policy == "optimal")
    assert len(found) == {"uniform": 5, "optimal": 7}[policy]
    exact_S = evaluate(mdp, policy_SA)
    for one in found:
        close_fp64(one.expected_return, mdp.start_S @ exact_S, rtol=1e-8, atol=1e-8)
        if one.value_S is not None:
            close_fp64(one.value_S, exact_S, rtol=1e-8, atol=1e-8)
    assert [one.name for one in found if one.value_S is None] == ["linear program, dual", "occupancy measure"]


@pytest.mark.parametrize("seed", range(5))
def test_the_only_action_of_a_reward_process_is_the_policy(seed: int) -> None:
    mdp, policy_SA = dense_mdp(seed, terminal=True), random_policy(seed, 5, 3)
    process = markov_reward_process(mdp, policy_SA)
    assert process.num_actions == 1
    assert process.terminal_S.tolist() == mdp.terminal_S.tolist()
    close_fp64(evaluate(process, np.ones((5, 1))), evaluate(mdp, policy_SA))
    close_fp64(return_variance(process, np.ones((5, 1)))[-1], 0)


@pytest.mark.slow
def test_sampled_methods_come_near_and_know_how_near() -> None:
    mdp = chain(5, discount=1.0)
    episodes = sample_episodes(mdp, uniform(mdp), 1500, seed=3)
    first, every, zero, traces = sampled_methods(mdp, uniform(mdp), episodes, lam=0.8)
    exact_S = np.array([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 0])
    assert [one.name for one in (zero, traces)] == ["TD(0)", "TD(0.8)"]
    for one in (first, every, zero, traces):
        assert one.value_S is not None
        close_fp64(one.value_S, exact_S, atol=0.06)
        assert largest_deviation(one.value_S, exact_S) > 0
    # Every return is 0 or 1, so its variance is v (1 - v).
    assert first.error_S is not None
    visits_S = [sum(state in one.state_T for one in episodes) for state in range(1, 6)]
    close_fp64(first.error_S[1:-1], np.sqrt(exact_S * (1 - exact_S))[1:-1] / np.sqrt(visits_S))
    score = largest_standard_score(first, exact_S)
    assert score is not None and 0.1 < score < 4


def test_what_was_never_visited_has_no_value_and_no_error() -> None:
    mdp = chain(5, discount=1.0)
    episodes = sample_episodes(mdp, policy_named(chain(5, discount=0.9), "optimal"), 1, seed=0)
    (begin,) = {int(one.state_T[0]) for one in episodes}
    found = sampled_methods(mdp, uniform(mdp), episodes, lam=0.0)
    assert found[3].name == "TD(lambda), lambda 0"
    for one in found:
        assert one.value_S is not None and np.isnan(one.expected_return)
        assert np.isnan(one.value_S).tolist() == [0 < state < begin for state in range(7)]
    assert found[0].error_S is not None
    assert np.isfinite(found[0].error_S[1:-1]).tolist() == [state >= begin for state in range(1, 6)]


def test_deviations_by_hand() -> None:
    exact_S = np.array([1.0, 2.0, 3.0])
    assert largest_deviation(np.array([1.0, 2.5, NAN]), exact_S) == 0.5
    assert np.isnan(largest_deviation(np.full(3, NAN), exact_S))
    found = MethodValues("x", 0.0, np.array([1.5, 2.5, NAN]), np.array([0.0, 0.25, 1.0]))
    assert largest_standard_score(found, exact_S) == 2
    assert largest_standard_score(MethodValues("x", 0.0, exact_S), exact_S) is None
    assert largest_standard_score(MethodValues("x", 0.0, exact_S, np.zeros(3)), exact_S) is None
    close_fp64([decreasing(n) for n in (1, 4)], [1, 0.3789291416275995])


def test_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the policy is 'best'; it is uniform or optimal$"):
        policy_named(chain(2, discount=1), "best")
