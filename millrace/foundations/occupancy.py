"""The state-action occupancy of a policy, and the policy of an occupancy.

S = states, A = actions, H = steps of a finite horizon. Nothing is chosen in a terminal state, so it is not
counted. Functions raise ValueError as `solve.evaluate`, or by step for an MDP without a horizon.
Source: Puterman 1994, "Markov decision processes", sections 5.5 and 6.9.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.foundations.mdp import Floats, Mdp, by_step, stationary
from millrace.foundations.solve import discounted_sum


def occupancy(mdp: Mdp, policy_SA: Any) -> Floats:
    """rho(s, a) = sum_t gamma^t p(s_t = s, a_t = a), [S, A]; the expected return is (rho * r).sum().

    Without terminal states it sums to 1 / (1 - gamma).
    """
    policy_SA = stationary(mdp, policy_SA)
    visits_S = discounted_sum(mdp, policy_SA, mdp.start_S, mdp.discount, backwards=True)
    return np.asarray(visits_S[:, None] * policy_SA)


def occupancy_by_step(mdp: Mdp, policy: Any) -> Floats:
    """rho_t(s, a) = p(s_t = s, a_t = a) for each step, [H, S, A], not discounted."""
    policy_HSA = by_step(mdp, policy)
    occupancy_HSA = np.zeros(policy_HSA.shape)
    state_S = mdp.start_S
    for step, policy_SA in enumerate(policy_HSA):
        taken_SA = (state_S * ~mdp.terminal_S)[:, None] * policy_SA
        occupancy_HSA[step] = taken_SA
        state_S = np.einsum("sa,sat->t", taken_SA, mdp.transition_SAS)
    return occupancy_HSA


def policy_of(occupancy_SA: Any) -> Floats:
    """pi(a | s) = rho(s, a) / sum_a rho(s, a), [..., S, A]; uniform in a state that is never visited.

    No other policy has this occupancy, except for what it does where it never is. ValueError for an entry
    that is negative or not finite.
    """
    occupancy_SA = np.asarray(occupancy_SA, dtype=np.float64)
    if not (np.isfinite(occupancy_SA) & (occupancy_SA >= 0)).all():
        raise ValueError("occupancy_SA holds an entry that is negative or not finite")
    visits_S1 = occupancy_SA.sum(axis=-1, keepdims=True)
    even_SA = np.full(occupancy_SA.shape, 1 / occupancy_SA.shape[-1])
    return np.divide(occupancy_SA, visits_S1, out=even_SA, where=visits_S1 > 0)
