"""Temporal-difference learning: values from single steps, by bootstrapping.

S = states, A = actions, T = steps of an episode. An episode that was cut off is bootstrapped from its last
state. `step` is the step size at the n-th update of a state; initial values are 0 if None. Functions raise
ValueError for a discount, lambda or probability outside [0, 1], and for a wrong shape.
Source: Sutton and Barto 2018, chapters 6, 7 and 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.foundations.mdp import Floats, Mdp, check_unit, without_horizon
from millrace.foundations.monte_carlo import StepSize, initial_values
from millrace.foundations.walks import Walk


def td_zero(
    episodes: Sequence[Walk], num_states: int, *, discount: float, step: StepSize, initial_S: Any = None
) -> Floats:
    """v(s_t) += step (r_t + gamma v(s_{t+1}) - v(s_t)), [S]; `n_step_td` with one step."""
    return n_step_td(episodes, num_states, num_steps=1, discount=discount, step=step, initial_S=initial_S)


def n_step_td(
    episodes: Sequence[Walk],
    num_states: int,
    *,
    num_steps: int,
    discount: float,
    step: StepSize,
    initial_S: Any = None,
) -> Floats:
    """v(s_t) += step (r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n v(s_{t+n}) - v(s_t)), [S].

    n is `num_steps`, at least 1. The update of step t is made as soon as s_{t+n} is known, with the values of
    that moment. With n beyond the episode it is `monte_carlo.incremental`.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; it is at least 1")
    check_unit(discount, "discount")
    value_S = initial_values(initial_S, num_states)
    count_S = np.zeros(num_states, dtype=np.int64)
    for episode in episodes:
        state_T = [*episode.state_T.tolist(), episode.last_state]
        for t in range(episode.num_steps):
            end = min(t + num_steps, episode.num_steps)
            goal = _after(episode, end, value_S)
            for reward in episode.reward_T[t:end][::-1]:
                goal = reward + discount * goal
            count_S[state_T[t]] += 1
            value_S[state_T[t]] += step(int(count_S[state_T[t]])) * (goal - value_S[state_T[t]])
    return value_S


def td_lambda(
    episodes: Sequence[Walk],
    num_states: int,
    *,
    lam: float,
    discount: float,
    step: StepSize,
    offline: bool = False,
    initial_S: Any = None,
) -> Floats:
    """TD(lambda), the backward view with accumulating traces e, [S]; lambda 0 is `td_zero`.

    At each step e(s) = gamma lambda e(s) + [s = s_t], then v += step delta_t e, where delta_t = r_t + gamma
    v(s_{t+1}) - v(s_t). `offline` lets an episode's updates take effect at its end. They are then, in sum,
    those of the forward view, step (G^lambda_t - v(s_t)), where the step size is constant.
    """
    check_unit(lam, "lam")
    check_unit(discount, "discount")
    value_S = initial_values(initial_S, num_states)
    count_S = np.zeros(num_states, dtype=np.int64)
    for episode in episodes:
        trace_S = np.zeros(num_states)
        guess_S = value_S.copy() if offline else value_S
        for t, state in enumerate(episode.state_T.tolist()):
            count_S[state] += 1
            trace_S *= discount * lam
            trace_S[state] += 1
            goal = episode.reward_T[t] + discount * _after(episode, t + 1, guess_S)
            value_S += step(int(count_S[state])) * (goal - guess_S[state]) * trace_S
    return value_S


def lambda_returns(episode: Walk, value_S: Floats, *, lam: float, discount: float) -> Floats:
    """The forward view, [T]: G^lambda_t = r_t + gamma ((1 - lambda) v(s_{t+1}) + lambda G^lambda_{t+1}).

    It is the mean of the n-step returns weighted by (1 - lambda) lambda^(n-1), the whole return by the rest.
    """
    check_unit(lam, "lam")
    check_unit(discount, "discount")
    return_T = np.zeros(episode.num_steps)
    goal = _after(episode, episode.num_steps, value_S)
    for t in reversed(range(episode.num_steps)):
        goal = (1 - lam) * _after(episode, t + 1, value_S) + lam * goal
        return_T[t] = goal = episode.reward_T[t] + discount * goal
    return return_T


@dataclass(frozen=True, slots=True)
class Practice:
    """Settings of learning by interaction, in episodes that are truncated after `max_steps`.

    `step` is the step size at the n-th update of a pair of state and action; `explore` the probability of a
    random action in the n-th episode, in which otherwise the best one so far is taken.
    """

    num_episodes: int
    step: StepSize
    explore: StepSize
    seed: int
    max_steps: int = 10_000


def sarsa(mdp: Mdp, practice: Practice, *, initial_SA: Any = None) -> Floats:
    """On-policy control: q(s, a) += step (r + gamma q(s', a') - q(s, a)), a' the action taken next, [S, A].

    The MDP is only sampled; ValueError if it has a horizon.
    Source: Rummery and Niranjan 1994, "On-line Q-learning using connectionist systems".
    """
    return _control(mdp, practice, initial_SA, lambda next_A, action: float(next_A[action]))


def q_learning(mdp: Mdp, practice: Practice, *, initial_SA: Any = None) -> Floats:
    """Off-policy control: q(s, a) += step (r + gamma max_a' q(s', a') - q(s, a)), [S, A].

    Arguments and errors as `sarsa`. What it learns in the end does not depend on how it explores.
    Source: Watkins and Dayan 1992, "Q-learning".
    """
    return _control(mdp, practice, initial_SA, lambda next_A, action: float(next_A.max()))


def _control(mdp: Mdp, practice: Practice, initial_SA: Any, ahead: Callable[[Floats, int], float]) -> Floats:
    without_horizon(mdp)
    value_SA = initial_values(initial_SA, mdp.reward_SA.shape)
    count_SA = np.zeros(value_SA.shape, dtype=np.int64)
    terminal_S = mdp.terminal_S
    value_SA[terminal_S] = 0.0
    rng = np.random.default_rng(practice.seed)

    def choose(state: int, epsilon: float) -> int:
        if rng.random() < epsilon:
            return int(rng.integers(mdp.num_actions))
        return int(value_SA[state].argmax())

    for number in range(1, practice.num_episodes + 1):
        epsilon = practice.explore(number)
        check_unit(epsilon, f"explore({number})")
        state = int(rng.choice(mdp.num_states, p=mdp.start_S))
        action = choose(state, epsilon)
        for _ in range(practice.max_steps):
            if terminal_S[state]:
                break
            next_state = int(rng.choice(mdp.num_states, p=mdp.transition_SAS[state, action]))
            next_action = choose(next_state, epsilon)
            goal = mdp.reward_SA[state, action] + mdp.discount * ahead(value_SA[next_state], next_action)
            count_SA[state, action] += 1
            value_SA[state, action] += practice.step(int(count_SA[state, action])) * (
                goal - value_SA[state, action]
            )
            state, action = next_state, next_action
    return value_SA


def _after(episode: Walk, t: int, value_S: Floats) -> float:
    """The value of the state before step t; 0 once the episode has ended."""
    if t < episode.num_steps:
        return float(value_S[episode.state_T[t]])
    return 0.0 if episode.ended else float(value_S[episode.last_state])
