"""Episodes of a policy in an MDP.

T = steps of an episode, S = states, A = actions, H = steps of a finite horizon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.foundations.mdp import Floats, Ints, Mdp, by_step, check_unit, stationary


@dataclass(frozen=True, eq=False, slots=True)
class Walk:
    """One trajectory in an MDP, and the state after its last action.

    It `ended` at a terminal state or the horizon; otherwise it was truncated.
    """

    state_T: Ints
    action_T: Ints
    reward_T: Floats
    last_state: int
    ended: bool

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.state_T)


def sample_episodes(
    mdp: Mdp, policy: Any, num_episodes: int, *, seed: int, max_steps: int = 10_000
) -> list[Walk]:
    """Sample episodes of a policy, each from a new start state, truncated after `max_steps`.

    The policy is [S, A], or [H, S, A] where there is a horizon; ValueError if it is none of this MDP.
    """
    policy = stationary(mdp, policy) if mdp.horizon is None else by_step(mdp, policy)
    rng = np.random.default_rng(seed)
    return [_sample(mdp, policy, rng, max_steps) for _ in range(num_episodes)]


def _sample(mdp: Mdp, policy: Floats, rng: np.random.Generator, max_steps: int) -> Walk:
    terminal_S = mdp.terminal_S
    state = int(rng.choice(mdp.num_states, p=mdp.start_S))
    states: list[int] = []
    actions: list[int] = []
    rewards: list[float] = []
    ended = bool(terminal_S[state])
    while not ended and len(states) < max_steps:
        policy_SA = policy if mdp.horizon is None else policy[len(states)]
        action = int(rng.choice(mdp.num_actions, p=policy_SA[state]))
        states.append(state)
        actions.append(action)
        rewards.append(float(mdp.reward_SA[state, action]))
        state = int(rng.choice(mdp.num_states, p=mdp.transition_SAS[state, action]))
        ended = bool(terminal_S[state]) or len(states) == mdp.horizon
    return Walk(
        np.array(states, dtype=np.int64),
        np.array(actions, dtype=np.int64),
        np.array(rewards, dtype=np.float64),
        state,
        ended,
    )


def returns(reward_T: Any, discount: float) -> Floats:
    """G_t = r_t + gamma G_{t+1}, [T]; ValueError for a discount outside [0, 1]."""
    check_unit(discount, "discount")
    reward_T = np.asarray(reward_T, dtype=np.float64)
    return_T = np.zeros(reward_T.shape)
    after = 0.0
    for t in reversed(range(len(reward_T))):
        return_T[t] = after = reward_T[t] + discount * after
    return return_T
