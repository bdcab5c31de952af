"""Small MDPs with known solutions: a random walk, a gridworld and a random one.

Every episode ends with probability 1 under the uniform policy, and begins in each state that is not terminal
equally often. S = states, A = actions. Sizes below the least one raise ValueError.
"""

from __future__ import annotations

import numpy as np

from millrace.foundations.mdp import Floats, Mdp

# Probability that an action of `random_mdp` ends the episode.
END = 0.1


def chain(num_states: int, *, discount: float) -> Mdp:
    """A walk over num_states >= 1 states in a row, with a terminal state at each end; S = num_states + 2.

    Action 0 goes left, action 1 right. The step into the right end earns 1, every other 0. At discount 1 the
    uniform policy has v(k) = k / (num_states + 1); the best policy has v(k) = gamma^(num_states - k).
    Source: Sutton and Barto 2018, example 6.2.
    """
    _at_least(num_states, 1, "num_states")
    end = num_states + 1
    transition_SAS = np.zeros((end + 1, 2, end + 1))
    for state in range(1, end):
        transition_SAS[state, 0, state - 1] = 1
        transition_SAS[state, 1, state + 1] = 1
    transition_SAS[[0, end], :, [0, end]] = 1
    reward_SA = np.zeros((end + 1, 2))
    reward_SA[num_states, 1] = 1
    return Mdp(transition_SAS, reward_SA, discount, _anywhere_but(end + 1, 0, end))


def gridworld(side: int, *, discount: float) -> Mdp:
    """A square of side * side cells (side >= 2), by rows; the first and the last corner are terminal.

    Actions 0 to 3 go up, down, left and right; a move off the grid stays. Every step earns -1, so the best
    value n steps from the nearest terminal corner is -(1 + gamma + ... + gamma^(n - 1)).
    Source: Sutton and Barto 2018, example 4.1.
    """
    _at_least(side, 2, "side")
    num_states = side * side
    transition_SAS = np.zeros((num_states, 4, num_states))
    for state in range(num_states):
        row, column = divmod(state, side)
        for action, (down, right) in enumerate([(-1, 0), (1, 0), (0, -1), (0, 1)]):
            next_row, next_column = row + down, column + right
            inside = 0 <= next_row < side and 0 <= next_column < side
            transition_SAS[state, action, next_row * side + next_column if inside else state] = 1
    corners = [0, num_states - 1]
    transition_SAS[corners] = np.eye(num_states)[corners][:, None]
    reward_SA = np.full((num_states, 4), -1.0)
    reward_SA[corners] = 0
    return Mdp(transition_SAS, reward_SA, discount, _anywhere_but(num_states, *corners))


def random_mdp(num_states: int, num_actions: int, *, discount: float, seed: int) -> Mdp:
    """Random transitions between num_states >= 1 states and normal rewards; S = num_states + 1.

    Every action ends the episode, in the last state, with probability 0.1.
    """
    _at_least(num_states, 1, "num_states")
    _at_least(num_actions, 1, "num_actions")
    rng = np.random.default_rng(seed)
    transition_SAS = np.zeros((num_states + 1, num_actions, num_states + 1))
    inner_SAS = rng.dirichlet(np.ones(num_states), (num_states, num_actions))
    transition_SAS[:-1, :, :-1] = (1 - END) * inner_SAS
    transition_SAS[:-1, :, -1] = END
    transition_SAS[-1, :, -1] = 1
    reward_SA = np.zeros((num_states + 1, num_actions))
    reward_SA[:-1] = rng.normal(size=(num_states, num_actions))
    return Mdp(transition_SAS, reward_SA, discount, _anywhere_but(num_states + 1, num_states))


def _anywhere_but(num_states: int, *terminal: int) -> Floats:
    start_S = np.ones(num_states)
    start_S[list(terminal)] = 0
    return np.asarray(start_S / start_S.sum())


def _at_least(number: int, least: int, name: str) -> None:
    if number < least:
        raise ValueError(f"{name} is {number}; it is at least {least}")
