"""The primal and dual linear programs for the optimal policy of an infinite horizon.

S = states, A = actions. Both raise ValueError for an MDP with a horizon, or with values without a bound.
Source: Puterman 1994, "Markov decision processes", section 6.9.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linprog

from millrace.foundations.mdp import Floats, Mdp, without_horizon


def primal(mdp: Mdp) -> Floats:
    """v* [S]: the values of smallest sum with v >= r + gamma P v, that is, for every state and action.

    Terminal states are held at 0.
    """
    without_horizon(mdp)
    live_S = ~mdp.terminal_S
    rows = mdp.discount * mdp.transition_SAS[live_S] - np.eye(mdp.num_states)[live_S][:, None]
    return _solved(
        "primal",
        c=np.ones(mdp.num_states),
        A_ub=rows.reshape(-1, mdp.num_states),
        b_ub=-mdp.reward_SA[live_S].reshape(-1),
        bounds=[(None, None) if live else (0, 0) for live in live_S],
    )


def dual(mdp: Mdp) -> Floats:
    """The occupancy [S, A] of an optimal policy; `occupancy.policy_of` gives the policy.

    The largest sum_sa rho(s, a) r(s, a) with rho >= 0 and conserved flow in each state that is not terminal:
    sum_a rho(s, a) = start(s) + gamma sum_s'a' p(s | s', a') rho(s', a').
    """
    without_horizon(mdp)
    live_S = ~mdp.terminal_S
    out = np.repeat(np.eye(mdp.num_states), mdp.num_actions, axis=1)
    flow = out - mdp.discount * mdp.transition_SAS.reshape(-1, mdp.num_states).T
    live_SA = np.repeat(live_S, mdp.num_actions)
    occupancy_SA = np.zeros(mdp.reward_SA.shape)
    occupancy_SA[live_S] = _solved(
        "dual",
        c=-mdp.reward_SA[live_S].reshape(-1),
        A_eq=flow[live_S][:, live_SA],
        b_eq=mdp.start_S[live_S],
        bounds=(0, None),
    ).reshape(-1, mdp.num_actions)
    return occupancy_SA


def _solved(name: str, **program: Any) -> Floats:
    found = linprog(**program, method="highs")
    if found.status != 0:
        raise ValueError(f"the {name} linear program of this MDP has no solution: {found.message}")
    return np.asarray(found.x, dtype=np.float64)
