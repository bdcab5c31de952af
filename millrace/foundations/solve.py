"""Exact values and optimal policies of a known MDP, by dynamic programming.

S = states, A = actions, H = steps of a finite horizon. v(s) is the expected discounted sum of rewards from s
on. Functions raise ValueError for a policy that has the wrong shape or is no distribution, for an MDP with a
horizon (those by step: without one), for a policy that never ends at discount 1, and for values that do not
settle in `max_sweeps`. `tolerance` is the largest error of the values; at discount 1, the largest change in
the last sweep.
Source: Puterman 1994, "Markov decision processes"; Sutton and Barto 2018, chapters 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.foundations.mdp import (
    Floats,
    Mdp,
    by_step,
    check_shape,
    deterministic,
    stationary,
    uniform,
    with_horizon,
    without_horizon,
)

# Actions with values closer than this fraction of the largest value count as ties.
TIE = 1e-12


@dataclass(frozen=True, eq=False, slots=True)
class Solution:
    """The optimal values of an infinite horizon, and a deterministic policy that earns them.

    `num_updates` counts how many times the value of a single state was worked out.
    """

    value_S: Floats
    policy_SA: Floats
    num_updates: int


def action_values(mdp: Mdp, value_S: Floats) -> Floats:
    """q(s, a) = r(s, a) + gamma sum_s' p(s' | s, a) v(s'), [S, A]."""
    check_shape(value_S, (mdp.num_states,), "value_S")
    return mdp.reward_SA + mdp.discount * mdp.transition_SAS @ value_S


def bellman_expectation(mdp: Mdp, policy_SA: Floats, value_S: Floats) -> Floats:
    """(T_pi v)(s) = sum_a pi(a | s) q(s, a); a contraction by gamma with fixed point v_pi."""
    return np.asarray((policy_SA * action_values(mdp, value_S)).sum(axis=1))


def bellman_optimality(mdp: Mdp, value_S: Floats) -> Floats:
    """(T v)(s) = max_a q(s, a); a contraction by gamma with fixed point v*."""
    return np.asarray(action_values(mdp, value_S).max(axis=1))


def bellman_expectation_q(mdp: Mdp, policy_SA: Floats, value_SA: Floats) -> Floats:
    """(T_pi q)(s, a) = r(s, a) + gamma sum_s' p(s' | s, a) sum_a' pi(a' | s') q(s', a')."""
    return action_values(mdp, (policy_SA * value_SA).sum(axis=1))


def bellman_optimality_q(mdp: Mdp, value_SA: Floats) -> Floats:
    """(T q)(s, a) = r(s, a) + gamma sum_s' p(s' | s, a) max_a' q(s', a')."""
    return action_values(mdp, value_SA.max(axis=1))


def greedy(value_SA: Floats) -> Floats:
    """The deterministic policy that takes the best action of each state, the first of equals; [..., S, A]."""
    return deterministic(value_SA.argmax(axis=-1), value_SA.shape[-1])


def evaluate(mdp: Mdp, policy_SA: Any) -> Floats:
    """v_pi [S], the solution of v = r_pi + gamma P_pi v; 0 in terminal states."""
    policy_SA = stationary(mdp, policy_SA)
    return discounted_sum(mdp, policy_SA, (policy_SA * mdp.reward_SA).sum(axis=1), mdp.discount)


def return_variance(mdp: Mdp, policy_SA: Any) -> Floats:
    """Variance [S] of the discounted return from each state, for rewards that are functions of (s, a).

    The second moment obeys a Bellman equation of its own: m = E[r^2 + 2 gamma r v(s') + gamma^2 m(s')].
    Source: Sobel 1982, "The variance of discounted Markov decision processes".
    """
    value_S = evaluate(mdp, policy_SA)
    next_SA = action_values(mdp, value_S) - mdp.reward_SA
    square_SA = np.square(mdp.reward_SA) + 2 * mdp.reward_SA * next_SA
    policy_SA = stationary(mdp, policy_SA)
    moment_S = discounted_sum(mdp, policy_SA, (policy_SA * square_SA).sum(axis=1), mdp.discount**2)
    return moment_S - np.square(value_S)


def discounted_sum(
    mdp: Mdp, policy_SA: Floats, amount_S: Floats, discount: float, *, backwards: bool = False
) -> Floats:
    """sum_t discount^t P_pi^t x over states that are not terminal, [S]; 0 in terminal ones.

    `backwards` transposes P_pi: x flows from states to their successors instead of back.
    """
    live_S = ~mdp.terminal_S
    move_SS = np.einsum("sa,sat->st", policy_SA, mdp.transition_SAS)
    if discount == 1:
        ends_S = ~live_S
        for _ in range(mdp.num_states):
            ends_S = ends_S | ((move_SS > 0) & ends_S).any(axis=1)
        if not ends_S.all():
            raise ValueError(
                f"at discount 1 the policy never reaches a terminal state from state {ends_S.argmin()}"
            )
    inner = move_SS[np.ix_(live_S, live_S)]
    inner = inner.T if backwards else inner
    total_S = np.zeros(mdp.num_states)
    total_S[live_S] = np.linalg.solve(np.eye(len(inner)) - discount * inner, amount_S[live_S])
    return total_S


def evaluate_iteratively(
    mdp: Mdp, policy_SA: Any, *, tolerance: float = 1e-10, max_sweeps: int = 100_000
) -> Floats:
    """v_pi [S] by applying the Bellman expectation operator again and again, from 0."""
    policy_SA = stationary(mdp, policy_SA)
    return _fixed_point(mdp, lambda v: bellman_expectation(mdp, policy_SA, v), tolerance, max_sweeps)[0]


def value_iteration(
    mdp: Mdp, *, in_place: bool = False, tolerance: float = 1e-10, max_sweeps: int = 100_000
) -> Solution:
    """v* by applying the Bellman optimality operator again and again, from 0.

    With `in_place` a state already sees the new values of the states before it (Gauss-Seidel); otherwise all
    states see the values of the last sweep.
    """
    without_horizon(mdp)

    def one_after_another(value_S: Floats) -> Floats:
        value_S = value_S.copy()
        for s in range(mdp.num_states):
            value_S[s] = _best(mdp, s, value_S)
        return value_S

    sweep = one_after_another if in_place else lambda v: bellman_optimality(mdp, v)
    value_S, num_sweeps = _fixed_point(mdp, sweep, tolerance, max_sweeps)
    return Solution(value_S, greedy(action_values(mdp, value_S)), num_sweeps * mdp.num_states)


def prioritised_sweeping(mdp: Mdp, *, tolerance: float = 1e-10, max_updates: int = 1_000_000) -> Solution:
    """v* by always updating the state with the largest Bellman error, its distance.

    Only the states that lead to the updated one can have changed their distance, so only theirs is worked out
    anew. `num_updates` counts those of values, not of distances.
    Source: Moore and Atkeson 1993, "Prioritized sweeping".
    """
    without_horizon(mdp)
    leads_SS = mdp.transition_SAS.max(axis=1)
    value_S = np.zeros(mdp.num_states)
    distance_S = np.abs(bellman_optimality(mdp, value_S))
    enough = _enough(mdp, tolerance)
    for num_updates in range(max_updates):
        s = int(distance_S.argmax())
        if distance_S[s] <= enough:
            return Solution(value_S, greedy(action_values(mdp, value_S)), num_updates)
        value_S[s] = _best(mdp, s, value_S)
        for before in {s, *np.flatnonzero(leads_SS[:, s])}:
            distance_S[before] = abs(_best(mdp, before, value_S) - value_S[before])
    raise ValueError(f"max_updates is {max_updates}, and the values have not settled to {tolerance}")


def policy_iteration(mdp: Mdp, policy_SA: Any = None) -> Solution:
    """v* by evaluating a policy, at first the uniform one, exactly and making it greedy, until it stays."""
    policy_SA = stationary(mdp, uniform(mdp) if policy_SA is None else policy_SA)
    num_updates = 0
    while True:
        value_S = evaluate(mdp, policy_SA)
        num_updates += mdp.num_states
        value_SA = action_values(mdp, value_S)
        held_SA = np.where(policy_SA == 1, value_SA, -np.inf)
        slack = TIE * np.abs(value_SA).max()
        # An action is replaced only by a better one; swapping ties would loop for ever.
        changes_S = np.flatnonzero(held_SA.max(axis=1) < value_SA.max(axis=1) - slack)
        if not len(changes_S):
            return Solution(value_S, policy_SA, num_updates)
        policy_SA = policy_SA.copy()
        policy_SA[changes_S] = greedy(value_SA)[changes_S]


def evaluate_by_step(mdp: Mdp, policy: Any) -> Floats:
    """Value of each state before each step of a finite horizon, [H + 1, S]; the last row is 0."""
    policy_HSA = by_step(mdp, policy)
    return _backwards(mdp, lambda step, value_SA: policy_HSA[step])[0]


def backward_induction(mdp: Mdp) -> tuple[Floats, Floats]:
    """The optimal values [H + 1, S] and a policy [H, S, A] that earns them, from the last step back."""
    return _backwards(mdp, lambda step, value_SA: greedy(value_SA))


def expected_return(mdp: Mdp, policy: Any) -> float:
    """J = sum_s start(s) v_pi(s), with or without a horizon."""
    value_S = evaluate(mdp, policy) if mdp.horizon is None else evaluate_by_step(mdp, policy)[0]
    return float(mdp.start_S @ value_S)


def _best(mdp: Mdp, s: int, value_S: Floats) -> float:
    return float((mdp.reward_SA[s] + mdp.discount * mdp.transition_SAS[s] @ value_S).max())


def _enough(mdp: Mdp, tolerance: float) -> float:
    """How small a change c must be for the tolerance to hold: c / (1 - gamma) bounds what is left."""
    return tolerance * (1 - mdp.discount) if mdp.discount < 1 else tolerance


def _fixed_point(
    mdp: Mdp, sweep: Callable[[Floats], Floats], tolerance: float, max_sweeps: int
) -> tuple[Floats, int]:
    value_S = np.zeros(mdp.num_states)
    for num_sweeps in range(max_sweeps):
        before_S, value_S = value_S, sweep(value_S)
        if np.abs(value_S - before_S).max() <= _enough(mdp, tolerance):
            return value_S, num_sweeps + 1
    raise ValueError(f"max_sweeps is {max_sweeps}, and the values have not settled to {tolerance}")


def _backwards(mdp: Mdp, choose: Callable[[int, Floats], Floats]) -> tuple[Floats, Floats]:
    values: list[Floats] = [np.zeros(mdp.num_states)]
    policies: list[Floats] = []
    for step in reversed(range(with_horizon(mdp))):
        value_SA = action_values(mdp, values[0])
        policies.insert(0, choose(step, value_SA))
        values.insert(0, (policies[0] * value_SA).sum(axis=1))
    return np.stack(values), np.stack(policies)
