from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.mdp import deterministic, uniform
from millrace.foundations.occupancy import occupancy, occupancy_by_step, policy_of
from millrace.foundations.solve import evaluate, evaluate_by_step, expected_return
from tests.close import close_fp64
from tests.foundations.test_solve import SEEDS, every_kind, every_seed
from tests.foundations.worlds import corridor, random_mdp, random_policy


@every_seed
@every_kind
def test_the_return_is_the_reward_times_the_occupancy(kind: dict, seed: int) -> None:
    mdp, policy_SA = random_mdp(seed, **kind), random_policy(seed, 5, 3)
    occupancy_SA = occupancy(mdp, policy_SA)
    close_fp64((occupancy_SA * mdp.reward_SA).sum(), expected_return(mdp, policy_SA))
    close_fp64(expected_return(mdp, policy_SA), (mdp.start_S * evaluate(mdp, policy_SA)).sum())
    live_S = ~mdp.terminal_S
    close_fp64(policy_of(occupancy_SA)[live_S], policy_SA[live_S])
    # What flows into a state that is not terminal flows out of it.
    inflow_S = mdp.start_S + mdp.discount * np.einsum("sa,sat->t", occupancy_SA, mdp.transition_SAS)
    close_fp64(occupancy_SA.sum(axis=1)[live_S], inflow_S[live_S])


def test_without_an_end_the_occupancy_sums_to_the_discounted_number_of_steps() -> None:
    for seed in SEEDS:
        close_fp64(occupancy(random_mdp(seed, discount=0.8), random_policy(seed, 5, 3)).sum(), 5)


def test_a_walk_through_the_corridor_visits_each_state_once() -> None:
    mdp = corridor(3, discount=0.5)
    close_fp64(occupancy(mdp, deterministic([1, 1, 1, 0], 2)), [[0, 1], [0, 0.5], [0, 0.25], [0, 0]])


@every_seed
def test_the_occupancy_by_step_sums_to_the_discounted_one(seed: int) -> None:
    mdp = random_mdp(seed, terminal=True, discount=0.6)
    long = random_mdp(seed, terminal=True, discount=0.6, horizon=60)
    policy_SA = random_policy(seed, 5, 3)
    occupancy_HSA = occupancy_by_step(long, policy_SA)
    close_fp64(np.tensordot(0.6 ** np.arange(60), occupancy_HSA, 1), occupancy(mdp, policy_SA), atol=1e-10)


@every_seed
def test_a_policy_that_changes_with_the_step_is_found_again(seed: int) -> None:
    mdp, policy_HSA = random_mdp(seed, horizon=3, discount=0.7), random_policy(seed, 3, 5, 3)
    occupancy_HSA = occupancy_by_step(mdp, policy_HSA)
    close_fp64(occupancy_HSA.sum(axis=(1, 2)), [1, 1, 1])
    close_fp64(policy_of(occupancy_HSA), policy_HSA)
    gains_H = (occupancy_HSA * mdp.reward_SA).sum(axis=(1, 2)) * 0.7 ** np.arange(3)
    close_fp64(gains_H.sum(), (mdp.start_S * evaluate_by_step(mdp, policy_HSA)[0]).sum())


def test_a_state_never_visited_is_given_the_uniform_policy() -> None:
    close_fp64(policy_of([[0.0, 0.0], [3.0, 1.0]]), [[0.5, 0.5], [0.75, 0.25]])


@pytest.mark.parametrize("entry", [-0.1, float("nan"), float("inf")])
def test_what_is_no_occupancy_is_refused(entry: float) -> None:
    with pytest.raises(ValueError, match=r"^occupancy_SA holds an entry that is negative or not finite$"):
        policy_of([[0.2, entry]])


def test_the_occupancy_of_a_policy_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^at discount 1 the policy never reaches a terminal state from"):
        occupancy(corridor(2, discount=1.0), deterministic([0, 0, 0], 2))
    with pytest.raises(ValueError, match=r"^the MDP has no horizon"):
        occupancy_by_step(corridor(2, discount=0.5), uniform(corridor(2, discount=0.5)))
