from __future__ import annotations

import numpy as np
import pytest

from millrace.foundations.mdp import Mdp, deterministic, uniform
from millrace.foundations.solve import (
    Solution,
    action_values,
    backward_induction,
    bellman_expectation,
    bellman_expectation_q,
    bellman_optimality,
    bellman_optimality_q,
    evaluate,
    evaluate_by_step,
    evaluate_iteratively,
    expected_return,
    greedy,
    policy_iteration,
    prioritised_sweeping,
    return_variance,
    value_iteration,
)
from tests.close import close_fp64
from tests.foundations.worlds import corridor, random_mdp, random_policy

SEEDS = range(10)
# With and without an end, discounted and not.
KINDS = [{"discount": 0.85}, {"discount": 0.6, "terminal": True}, {"discount": 1.0, "terminal": True}]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_seed = pytest.mark.parametrize("seed", SEEDS)


def test_values_of_two_states_by_hand() -> None:
    # From 0, action 0 stays (reward 1), action 1 goes to 1 (reward 0); from 1 both go back (reward 5 or 4).
    transition_SAS = [[[1, 0], [0, 1]], [[1, 0], [1, 0]]]
    mdp = Mdp(transition_SAS, [[1, 0], [5, 4]], 0.5, [0.25, 0.75])  # type: ignore[arg-type]
    # v0 = 0.5 (1 + v0 / 2) + 0.5 (0 + v1 / 2), v1 = 4.5 + v0 / 2: v0 = 13 / 5, v1 = 29 / 5.
    half_SA = uniform(mdp)
    close_fp64(evaluate(mdp, half_SA), [13 / 5, 29 / 5])
    assert expected_return(mdp, half_SA) == 0.25 * 2.6 + 0.75 * 5.8
    close_fp64(action_values(mdp, np.array([2.0, 4.0])), [[2, 2], [6, 5]])
    close_fp64(bellman_expectation(mdp, half_SA, np.array([2.0, 4.0])), [2, 5.5])
    close_fp64(bellman_optimality(mdp, np.array([2.0, 4.0])), [2, 6])
    # Best: 0 goes to 1 and 1 takes 5: v0 = v1 / 2, v1 = 5 + v0 / 2: v0 = 10 / 3, v1 = 20 / 3.
    best = policy_iteration(mdp)
    close_fp64(best.value_S, [10 / 3, 20 / 3])
    close_fp64(best.policy_SA, [[0, 1], [1, 0]])


@pytest.mark.slow_beyond(26)
@every_seed
@every_kind
def test_the_exact_and_the_iterated_value_of_a_policy_agree(kind: dict, seed: int) -> None:
    mdp, policy_SA = random_mdp(seed, **kind), random_policy(seed, 5, 3)
    value_S = evaluate(mdp, policy_SA)
    close_fp64(bellman_expectation(mdp, policy_SA, value_S), value_S)
    close_fp64(evaluate_iteratively(mdp, policy_SA), value_S, atol=1e-8)
    value_SA = action_values(mdp, value_S)
    close_fp64(bellman_expectation_q(mdp, policy_SA, value_SA), value_SA)


@pytest.mark.slow_beyond(5)
@every_seed
@every_kind
def test_all_ways_to_the_optimum_agree(kind: dict, seed: int) -> None:
    mdp = random_mdp(seed, **kind)
    ways: list[Solution] = [
        policy_iteration(mdp),
        policy_iteration(mdp, deterministic([0, 1, 2, 0, 0], 3)),
        value_iteration(mdp),
        value_iteration(mdp, in_place=True),
        prioritised_sweeping(mdp),
    ]
    for way in ways:
        close_fp64(way.value_S, ways[0].value_S, atol=1e-8)
        close_fp64(evaluate(mdp, way.policy_SA), ways[0].value_S)
    value_SA = action_values(mdp, ways[0].value_S)
    close_fp64(bellman_optimality(mdp, ways[0].value_S), ways[0].value_S)
    close_fp64(bellman_optimality_q(mdp, value_SA), value_SA)
    assert (evaluate(mdp, random_policy(seed, 5, 3)) <= ways[0].value_S + 1e-12).all()


@every_seed
def test_both_operators_contract_by_the_discount(seed: int) -> None:
    mdp, policy_SA = random_mdp(seed, discount=0.7), random_policy(seed, 5, 3)
    one_S, other_S = np.random.default_rng(seed).normal(size=(2, 5))
    distance = np.abs(one_S - other_S).max()
    expectation = bellman_expectation(mdp, policy_SA, one_S) - bellman_expectation(mdp, policy_SA, other_S)
    optimality = bellman_optimality(mdp, one_S) - bellman_optimality(mdp, other_S)
    assert max(np.abs(expectation).max(), np.abs(optimality).max()) <= 0.7 * distance
    # A constant is passed on by exactly the discount.
    close_fp64(bellman_optimality(mdp, one_S + 2) - bellman_optimality(mdp, one_S), np.full(5, 1.4))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("tolerance", [1e-2, 1e-5])
def test_the_tolerance_bounds_the_error(tolerance: float) -> None:
    for seed in SEEDS:
        mdp = random_mdp(seed, discount=0.95)
        exact_S = policy_iteration(mdp).value_S
        for way in (
            value_iteration(mdp, tolerance=tolerance),
            value_iteration(mdp, in_place=True, tolerance=tolerance),
            prioritised_sweeping(mdp, tolerance=tolerance),
        ):
            error = np.abs(way.value_S - exact_S).max()
            assert 0 < error <= tolerance
        policy_SA = random_policy(seed, 5, 3)
        near_S = evaluate_iteratively(mdp, policy_SA, tolerance=tolerance)
        assert 0 < np.abs(near_S - evaluate(mdp, policy_SA)).max() <= tolerance


def test_without_discount_the_tolerance_is_the_largest_change_in_the_last_sweep() -> None:
    for seed in SEEDS:
        mdp = random_mdp(seed, discount=1.0, terminal=True)
        near = [
            value_iteration(mdp, tolerance=0.01),
            value_iteration(mdp, in_place=True, tolerance=0.01),
            prioritised_sweeping(mdp, tolerance=0.01),
        ]
        for way in near:
            change = np.abs(bellman_optimality(mdp, way.value_S) - way.value_S).max()
            assert 0 < change <= 0.01
            assert way.num_updates < 0.7 * value_iteration(mdp).num_updates


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_the_order_of_updates_decides_how_many_a_corridor_needs(discount: float) -> None:
    mdp = corridor(6, discount=discount)
    expected_S = [-sum(discount**k for k in range(6 - s)) for s in range(6)] + [0.0]
    ways = [value_iteration(mdp), value_iteration(mdp, in_place=True), prioritised_sweeping(mdp)]
    for way in ways:
        close_fp64(way.value_S, expected_S)
        close_fp64(way.policy_SA[:-1], np.tile([0.0, 1.0], (6, 1)))
    # One state a sweep becomes right, from the exit backwards; then one sweep sees that nothing changes.
    assert ways[0].num_updates == ways[1].num_updates == 7 * 7
    assert ways[2].num_updates < 7 * 7


def test_in_place_sweeps_along_the_flow_of_value_need_only_one_and_a_look() -> None:
    mdp = corridor(6, discount=1.0)
    back = np.arange(7)[::-1]
    turned = Mdp(mdp.transition_SAS[back][:, :, back], mdp.reward_SA[back], mdp.discount, mdp.start_S[back])
    assert value_iteration(turned, in_place=True).num_updates == 2 * 7
    assert value_iteration(turned).num_updates == 7 * 7


def test_prioritised_sweeping_first_updates_what_is_furthest_off() -> None:
    # Three states that only lead to themselves, worth 10, 4 and 0 at discount 0: two updates are enough.
    stay = np.eye(3)[:, None]
    found = prioritised_sweeping(Mdp(stay, [[10.0], [4.0], [0.0]], 0.0, [1, 0, 0]))  # type: ignore[arg-type]
    assert found.num_updates == 2
    close_fp64(found.value_S, [10, 4, 0])


def test_policy_iteration_ends_although_all_actions_are_equally_good() -> None:
    transition_SAS = np.full((3, 2, 3), 1 / 3)
    mdp = Mdp(transition_SAS, np.full((3, 2), 0.1), 0.9, np.full(3, 1 / 3))
    found = policy_iteration(mdp, [[0, 1], [1, 0], [0, 1]])
    close_fp64(found.policy_SA, [[0, 1], [1, 0], [0, 1]])
    close_fp64(found.value_S, [1, 1, 1])
    assert found.num_updates == 3


def test_equal_actions_go_to_the_first() -> None:
    close_fp64(greedy(np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0]])), [[0, 1, 0], [1, 0, 0]])


@every_seed
@every_kind
def test_the_variance_of_the_return_obeys_its_definition(kind: dict, seed: int) -> None:
    """E[G^2] by carrying the distribution of (state, discounted sum so far) through the first steps."""
    mdp, policy_SA = random_mdp(seed, num_states=3, num_actions=2, **kind), random_policy(seed, 3, 2)
    value_S, variance_S = evaluate(mdp, policy_SA), return_variance(mdp, policy_SA)
    # One step: Var G = E[(r + gamma v')^2] - v^2 + gamma^2 E[Var G'].
    for s in range(3):
        square = later = 0.0
        for a in range(2):
            for t in range(3):
                p = policy_SA[s, a] * mdp.transition_SAS[s, a, t]
                square += p * (mdp.reward_SA[s, a] + mdp.discount * value_S[t]) ** 2
                later += p * variance_S[t]
        close_fp64(variance_S[s], square - value_S[s] ** 2 + mdp.discount**2 * later)


def test_the_variance_of_a_coin_by_hand() -> None:
    # Reward 3 or -1 with probability 1/4 and 3/4, then the end: mean 0, variance 3.
    transition_SAS = [[[0, 1], [0, 1]], [[0, 1], [0, 1]]]
    mdp = Mdp(transition_SAS, [[3, -1], [0, 0]], 1.0, [1, 0])  # type: ignore[arg-type]
    close_fp64(return_variance(mdp, [[0.25, 0.75], [1, 0]]), [3, 0])


@pytest.mark.slow_beyond(6)
@every_seed
def test_backward_induction_equals_the_best_of_all_markov_policies(seed: int) -> None:
    mdp = random_mdp(seed, num_states=2, num_actions=2, horizon=3, discount=0.9)
    value_HS, policy_HSA = backward_induction(mdp)
    assert value_HS.shape == (4, 2)
    close_fp64(value_HS[3], [0, 0])
    close_fp64(evaluate_by_step(mdp, policy_HSA), value_HS)
    # All 2^(3 * 2) deterministic policies.
    every = [deterministic(np.reshape([n >> k & 1 for k in range(6)], (3, 2)), 2) for n in range(64)]
    close_fp64(np.max([evaluate_by_step(mdp, one)[0] for one in every], axis=0), value_HS[0])
    close_fp64(max(expected_return(mdp, one) for one in every), expected_return(mdp, policy_HSA))


@every_seed
def test_a_long_horizon_comes_close_to_none(seed: int) -> None:
    long, endless = random_mdp(seed, horizon=60, discount=0.6), random_mdp(seed, discount=0.6)
    policy_SA = random_policy(seed, 5, 3)
    close_fp64(evaluate_by_step(long, policy_SA)[0], evaluate(endless, policy_SA), atol=1e-10)
    close_fp64(backward_induction(long)[0][0], policy_iteration(endless).value_S, atol=1e-10)


def test_two_steps_by_hand() -> None:
    # One state, actions worth 1 and 3, discount 1/2: uniform 2 + 1/2 * 2, best 3 + 1/2 * 3.
    mdp = Mdp([[[1], [1]]], [[1, 3]], 0.5, [1], horizon=2)  # type: ignore[arg-type]
    close_fp64(evaluate_by_step(mdp, uniform(mdp)), [[3], [2], [0]])
    assert expected_return(mdp, uniform(mdp)) == 3
    close_fp64(backward_induction(mdp)[0], [[4.5], [3], [0]])
    changing_HSA = [[[1, 0]], [[0, 1]]]
    close_fp64(evaluate_by_step(mdp, changing_HSA), [[2.5], [3], [0]])


def test_problems_of_the_other_kind_are_refused() -> None:
    short, endless = random_mdp(0, horizon=2), random_mdp(0)
    for solver in (
        value_iteration,
        prioritised_sweeping,
        policy_iteration,
        lambda mdp: evaluate(mdp, uniform(mdp)),
    ):
        with pytest.raises(ValueError, match=r"^the MDP has horizon 2; backward_induction and"):
            solver(short)
    for solver in (backward_induction, lambda mdp: evaluate_by_step(mdp, uniform(mdp))):
        with pytest.raises(ValueError, match=r"^the MDP has no horizon, so its steps cannot be counted$"):
            solver(endless)


def test_a_policy_that_never_ends_has_no_undiscounted_value() -> None:
    mdp = corridor(3, discount=1.0)
    ends_where_it_may = deterministic([1, 0, 1, 0], 2)
    with pytest.raises(
        ValueError, match=r"^at discount 1 the policy never reaches a terminal state from state 0$"
    ):
        evaluate(mdp, ends_where_it_may)
    close_fp64(evaluate(corridor(3, discount=0.5), ends_where_it_may), [-21, -40, -1, 0])


def test_values_that_do_not_settle_are_an_error_with_the_count() -> None:
    mdp = random_mdp(0, discount=0.9)
    with pytest.raises(ValueError, match=r"^max_sweeps is 5, and the values have not settled to 1e-10$"):
        value_iteration(mdp, max_sweeps=5)
    with pytest.raises(ValueError, match=r"^max_sweeps is 4, and the values have not settled to 0.001$"):
        evaluate_iteratively(mdp, uniform(mdp), tolerance=1e-3, max_sweeps=4)
    with pytest.raises(ValueError, match=r"^max_updates is 7, and the values have not settled to 1e-10$"):
        prioritised_sweeping(mdp, max_updates=7)


def test_values_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^value_S has shape \(3,\); it must be \(5,\)$"):
        action_values(random_mdp(0), np.zeros(3))
