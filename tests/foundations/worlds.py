"""Small MDPs to solve: random ones, and some whose numbers are known by hand."""

from __future__ import annotations

import numpy as np

from millrace.foundations.mdp import Floats, Mdp
from millrace.foundations.softmax_policy import softmax


def random_mdp(
    seed: int,
    *,
    num_states: int = 5,
    num_actions: int = 3,
    discount: float = 0.85,
    terminal: bool = False,
    horizon: int | None = None,
) -> Mdp:
    """Dense transitions with some exact zeros; the last state is terminal if asked for."""
    rng = np.random.default_rng(seed)
    transition_SAS = rng.dirichlet(np.ones(num_states), (num_states, num_actions))
    transition_SAS[transition_SAS < 0.05] = 0
    transition_SAS /= transition_SAS.sum(axis=2, keepdims=True)
    reward_SA = rng.normal(size=(num_states, num_actions))
    if terminal:
        transition_SAS[:-1] = 0.85 * transition_SAS[:-1]
        transition_SAS[:-1, :, -1] += 0.15
        transition_SAS[-1] = np.eye(num_states)[-1]
        reward_SA[-1] = 0
    return Mdp(transition_SAS, reward_SA, discount, rng.dirichlet(np.ones(num_states)), horizon)


def random_policy(seed: int, *shape: int) -> Floats:
    return softmax(np.random.default_rng(1000 + seed).normal(size=shape))


def corridor(length: int, *, discount: float) -> Mdp:
    """States 0 to length - 1 in a row and an exit behind the last; action 1 goes on at cost 1, action 0 stays
    at cost 20. The best value n steps from the exit is -(1 + gamma + ... + gamma^(n - 1))."""
    transition_SAS = np.zeros((length + 1, 2, length + 1))
    for state in range(length):
        transition_SAS[state, 0, state] = 1
        transition_SAS[state, 1, state + 1] = 1
    transition_SAS[length, :, length] = 1
    reward_SA = np.tile([-20.0, -1.0], (length + 1, 1))
    reward_SA[length] = 0
    return Mdp(transition_SAS, reward_SA, discount, np.eye(length + 1)[0])
