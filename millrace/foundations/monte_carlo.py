"""Values from whole episodes: the mean of the returns that followed a state.

S = states, A = actions, T = steps of an episode. Functions raise ValueError for a truncated episode, because
the rest of its return is not known, and for a discount outside [0, 1].
Source: Sutton and Barto 2018, chapter 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.foundations.mdp import Floats, Ints, check_distributions, check_shape
from millrace.foundations.walks import Walk, returns

StepSize = Callable[[int], float]


@dataclass(frozen=True, eq=False, slots=True)
class Estimate:
    """Means of `count_S` returns; NaN in a state that was never visited, because nothing is known of it."""

    value_S: Floats
    count_S: Ints


def one_over_n(count: int) -> float:
    """The step size that makes a running mean: 1 / n at the n-th visit."""
    return 1 / count


def constant(step: float) -> StepSize:
    """The same step size in (0, 1] at every visit, which forgets old returns at that rate."""
    if not 0 < step <= 1:
        raise ValueError(f"step is {step}; it is above 0 and at most 1")
    return lambda count: step


def first_visit(episodes: Sequence[Walk], num_states: int, *, discount: float) -> Estimate:
    """The mean of the returns after the first visit of each episode: independent samples, so no bias."""
    return _mean(_visits(episodes, discount, first=True), num_states)


def every_visit(episodes: Sequence[Walk], num_states: int, *, discount: float) -> Estimate:
    """The mean of the returns after every visit: more, but dependent; its bias fades with episodes."""
    return _mean(_visits(episodes, discount, first=False), num_states)


def incremental(
    episodes: Sequence[Walk],
    num_states: int,
    *,
    discount: float,
    step: StepSize = one_over_n,
    initial_S: Any = None,
) -> Floats:
    """v(s) += step (G - v(s)) after every visit, in order, [S]; unvisited states keep `initial_S`, or 0.

    `step` is the step size at the n-th visit of a state; `one_over_n` gives `every_visit`, `constant`
    forgets.
    """
    value_S = initial_values(initial_S, num_states)
    count_S = np.zeros(num_states, dtype=np.int64)
    for state, _, _, gain in _visits(episodes, discount, first=False):
        count_S[state] += 1
        value_S[state] += step(int(count_S[state])) * (gain - value_S[state])
    return value_S


def importance_sampling(
    episodes: Sequence[Walk], target_SA: Any, behaviour_SA: Any, *, discount: float, weighted: bool
) -> Estimate:
    """Values of policy pi from episodes of policy mu: returns times w = prod_t pi(a_t | s_t) / mu(a_t | s_t).

    `weighted` divides the sum of w G by the sum of w, which is biased but has little variance, and is NaN
    where every w is 0; otherwise it is divided by the number of first visits, which is unbiased. ValueError
    for an action that mu never takes.
    """
    target_SA, behaviour_SA = (np.asarray(one, dtype=np.float64) for one in (target_SA, behaviour_SA))
    check_shape(target_SA, behaviour_SA.shape, "target_SA")
    check_distributions(target_SA, "target_SA")
    check_distributions(behaviour_SA, "behaviour_SA")
    num_states = len(target_SA)
    gain_S, weight_S = np.zeros((2, num_states))
    count_S = np.zeros(num_states, dtype=np.int64)
    for state, start, episode, gain in _visits(episodes, discount, first=True):
        pair = episode.state_T[start:], episode.action_T[start:]
        if (behaviour_SA[pair] == 0).any():
            raise ValueError("behaviour_SA gives probability 0 to an action that was taken")
        weight = float(np.prod(target_SA[pair] / behaviour_SA[pair]))
        gain_S[state] += weight * gain
        weight_S[state] += weight
        count_S[state] += 1
    total_S = weight_S if weighted else count_S
    return Estimate(_quotient(gain_S, total_S), count_S)


def initial_values(initial: Any, shape: int | tuple[int, ...]) -> Floats:
    """A copy of the values to begin with, checked; zeros for None."""
    if initial is None:
        return np.zeros(shape)
    values = np.array(initial, dtype=np.float64)
    check_shape(values, (shape,) if isinstance(shape, int) else shape, "initial_S")
    return values


def _visits(
    episodes: Sequence[Walk], discount: float, *, first: bool
) -> Iterator[tuple[int, int, Walk, float]]:
    """State, step, episode and the return from there on, for each visit in order."""
    for number, episode in enumerate(episodes):
        if not episode.ended:
            raise ValueError(f"episodes[{number}] was cut off after {episode.num_steps} steps")
        return_T = returns(episode.reward_T, discount)
        seen: set[int] = set()
        for t, state in enumerate(episode.state_T.tolist()):
            if not (first and state in seen):
                yield state, t, episode, float(return_T[t])
            seen.add(state)


def _mean(visits: Iterator[tuple[int, int, Walk, float]], num_states: int) -> Estimate:
    total_S = np.zeros(num_states)
    count_S = np.zeros(num_states, dtype=np.int64)
    for state, _, _, gain in visits:
        total_S[state] += gain
        count_S[state] += 1
    return Estimate(_quotient(total_S, count_S), count_S)


def _quotient(total_S: Floats, count_S: Floats | Ints) -> Floats:
    return np.divide(total_S, count_S, out=np.full(total_S.shape, np.nan), where=count_S > 0)
