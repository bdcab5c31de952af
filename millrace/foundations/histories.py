"""History-dependent policies, and their Markov equivalents.

A history is (s_0, a_0, s_1, ..., s_t); a policy of histories maps it to the probabilities of the next action.
S = states, A = actions, H = steps of the horizon. Every history is enumerated, so keep the MDP small.
Functions raise ValueError for an MDP without a horizon, and a policy that gives no distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from millrace.foundations.mdp import Floats, Mdp, by_step, check_distributions, check_shape, with_horizon
from millrace.foundations.occupancy import policy_of

History = tuple[int, ...]
HistoryPolicy = Callable[[History], Floats]


def as_history_policy(mdp: Mdp, policy: Any) -> HistoryPolicy:
    """A Markov policy ([S, A] or [H, S, A]) as a history policy that uses only the last state."""
    policy_HSA = by_step(mdp, policy)
    return lambda history: policy_HSA[len(history) // 2, history[-1]]


def choices(mdp: Mdp, policy: HistoryPolicy) -> Iterator[tuple[History, int, float]]:
    """Every history before a choice, the action taken, and the probability of both."""
    horizon = with_horizon(mdp)
    terminal_S = mdp.terminal_S

    def walk(history: History, probability: float) -> Iterator[tuple[History, int, float]]:
        state, step = history[-1], len(history) // 2
        if step == horizon or terminal_S[state]:
            return
        action_A = np.asarray(policy(history), dtype=np.float64)
        check_shape(action_A, (mdp.num_actions,), f"policy({history})")
        check_distributions(action_A, f"policy({history})")
        for action in np.flatnonzero(action_A).tolist():
            taken = probability * float(action_A[action])
            yield history, action, taken
            next_S = mdp.transition_SAS[state, action]
            for after in np.flatnonzero(next_S).tolist():
                yield from walk((*history, action, after), taken * float(next_S[after]))

    for start in np.flatnonzero(mdp.start_S).tolist():
        yield from walk((start,), float(mdp.start_S[start]))


def expected_return(mdp: Mdp, policy: HistoryPolicy) -> float:
    """J = E[sum_t gamma^t r_t] over all histories."""
    return sum(
        probability * mdp.discount ** (len(history) // 2) * float(mdp.reward_SA[history[-1], action])
        for history, action, probability in choices(mdp, policy)
    )


def occupancy_by_step(mdp: Mdp, policy: HistoryPolicy) -> Floats:
    """rho_t(s, a) = p(s_t = s, a_t = a), [H, S, A], over all histories."""
    occupancy_HSA = np.zeros((with_horizon(mdp), *mdp.reward_SA.shape))
    for history, action, probability in choices(mdp, policy):
        occupancy_HSA[len(history) // 2, history[-1], action] += probability
    return occupancy_HSA


def markov_equivalent(mdp: Mdp, policy: HistoryPolicy) -> Floats:
    """The Markov policy [H, S, A] that at each step is as often in each state and takes each action as often.

    So its return is the same: no history-dependent policy is better than the best Markov policy.
    Source: Puterman 1994, theorem 5.5.1.
    """
    return policy_of(occupancy_by_step(mdp, policy))
