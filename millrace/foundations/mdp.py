"""Finite Markov decision processes, and the Markov policies that act in them.

S = states, A = actions, H = steps of a finite horizon (there are no attention heads here).
A policy is an array of probabilities: [S, A] if it is stationary, [H, S, A] if it changes with the step.
Functions of a policy raise ValueError if it has the wrong shape or is no distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Probabilities are written in decimals, which need not add up to 1 in binary.
SUM_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class Mdp:
    """A finite Markov decision process: p(next state | state, action), expected rewards, and p(first state).

    A state that every action leaves as it is, at reward 0, is terminal: episodes end there. A discount of 1
    needs a terminal state or a `horizon` of steps; None goes on until a terminal state, or for ever. The
    arrays are copied and made read-only. Raises ValueError for values that cannot be.
    """

    transition_SAS: Floats
    reward_SA: Floats
    discount: float
    start_S: Floats
    horizon: int | None = None

    def __post_init__(self) -> None:
        for name in ("transition_SAS", "reward_SA", "start_S"):
            array = np.array(getattr(self, name), dtype=np.float64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        shape = self.transition_SAS.shape
        if len(shape) != 3 or shape[0] != shape[2] or 0 in shape:
            raise ValueError(
                f"transition_SAS has shape {shape}; it is [S, A, S] with at least one state and one action"
            )
        check_shape(self.reward_SA, shape[:2], "reward_SA")
        check_finite(self.reward_SA, "reward_SA")
        check_shape(self.start_S, shape[:1], "start_S")
        check_distributions(self.transition_SAS, "transition_SAS")
        check_distributions(self.start_S, "start_S")
        check_unit(self.discount, "discount")
        if self.horizon is not None and self.horizon < 1:
            raise ValueError(f"horizon is {self.horizon}; an episode has at least one step")
        if self.discount == 1 and self.horizon is None and not self.terminal_S.any():
            raise ValueError("discount is 1 with neither a horizon nor a terminal state")

    @property
    def num_states(self) -> int:
        """S."""
        return self.reward_SA.shape[0]

    @property
    def num_actions(self) -> int:
        """A."""
        return self.reward_SA.shape[1]

    @property
    def terminal_S(self) -> Bools:
        """Which states every action leaves as they are, at reward 0."""
        stays_SA = np.diagonal(self.transition_SAS, axis1=0, axis2=2).T == 1
        return np.asarray((stays_SA & (self.reward_SA == 0)).all(axis=1))


def without_horizon(mdp: Mdp) -> None:
    """Raise ValueError if the MDP has a horizon: then values depend on the step."""
    if mdp.horizon is not None:
        raise ValueError(
            f"the MDP has horizon {mdp.horizon}; backward_induction and evaluate_by_step solve such problems"
        )


def with_horizon(mdp: Mdp) -> int:
    """The number of steps; ValueError if the MDP has no horizon."""
    if mdp.horizon is None:
        raise ValueError("the MDP has no horizon, so its steps cannot be counted")
    return mdp.horizon


def stationary(mdp: Mdp, policy_SA: Any) -> Floats:
    """The policy of an MDP without a horizon as an array, checked."""
    without_horizon(mdp)
    policy = np.asarray(policy_SA, dtype=np.float64)
    check_shape(policy, mdp.reward_SA.shape, "policy_SA")
    check_distributions(policy, "policy_SA")
    return policy


def by_step(mdp: Mdp, policy: Any) -> Floats:
    """A policy of an MDP with a horizon, stationary or not, as [H, S, A], checked."""
    shape = (with_horizon(mdp), *mdp.reward_SA.shape)
    policy = np.asarray(policy, dtype=np.float64)
    if policy.shape == mdp.reward_SA.shape:
        policy = np.broadcast_to(policy, shape)
    check_shape(policy, shape, "policy_HSA")
    check_distributions(policy, "policy_HSA")
    return policy


def deterministic(action_S: Any, num_actions: int) -> Floats:
    """The policy [..., S, A] that always takes the given action; a leading axis of steps is kept."""
    return np.eye(num_actions)[np.asarray(action_S)]


def uniform(mdp: Mdp) -> Floats:
    """The policy [S, A] that takes every action equally often."""
    return np.full(mdp.reward_SA.shape, 1 / mdp.num_actions)


def markov_reward_process(mdp: Mdp, policy_SA: Any) -> Mdp:
    """The MDP [S, 1] whose only action is to follow the policy: P_pi and r_pi; without a horizon."""
    policy_SA = stationary(mdp, policy_SA)
    move_SS = np.einsum("sa,sat->st", policy_SA, mdp.transition_SAS)
    # What every action leaves as it is stays terminal to the last bit.
    move_SS[mdp.terminal_S] = np.eye(mdp.num_states)[mdp.terminal_S]
    reward_S = (policy_SA * mdp.reward_SA).sum(axis=1)
    return Mdp(move_SS[:, None], reward_S[:, None], mdp.discount, mdp.start_S)


def check_shape(array: NDArray[Any], shape: tuple[int, ...], name: str) -> None:
    """Raise ValueError unless the array has this shape."""
    if array.shape != tuple(shape):
        raise ValueError(f"{name} has shape {array.shape}; it must be {tuple(shape)}")


def check_finite(array: Floats, name: str) -> None:
    """Raise ValueError, naming the first entry, unless all are finite."""
    where = _first(~np.isfinite(array))
    if where is not None:
        raise ValueError(f"{name}{list(where)} is {array[where]}")


def check_distributions(array: Floats, name: str) -> None:
    """Raise ValueError, naming the first that is not, unless every last axis is a distribution."""
    check_finite(array, name)
    where = _first(array < 0)
    if where is not None:
        raise ValueError(f"{name}{list(where)} is {array[where]}; a probability is not negative")
    where = _first(np.abs(array.sum(axis=-1) - 1) > SUM_TOLERANCE)
    if where is not None:
        place = list(where) if where else ""
        raise ValueError(f"{name}{place} sums to {array[where].sum():.12g}; probabilities sum to 1")


def check_unit(number: float, name: str) -> None:
    """Raise ValueError unless the number is in [0, 1]."""
    if not 0 <= number <= 1:
        raise ValueError(f"{name} is {number}; it lies in [0, 1]")


def _first(bad: Bools) -> tuple[int, ...] | None:
    places = np.argwhere(bad)
    return tuple(int(i) for i in places[0]) if len(places) else None
