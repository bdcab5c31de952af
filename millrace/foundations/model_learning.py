"""A model of an unknown MDP, estimated from episodes, for planning.

S = states, A = actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.foundations.mdp import Bools, Floats, Ints, Mdp
from millrace.foundations.walks import Walk


@dataclass(frozen=True, eq=False, slots=True)
class Model:
    """Transition counts, and sums of rewards, of the observed episodes."""

    count_SAS: Ints
    reward_SA: Floats

    @property
    def unvisited_SA(self) -> Bools:
        """The state-action pairs that were never tried."""
        return np.asarray(self.count_SAS.sum(axis=2) == 0)

    def mdp(self, *, discount: float, start_S: Any, unvisited_reward: float = 0.0) -> Mdp:
        """The MDP in which every probability is an observed frequency and every reward a mean.

        An action that was never tried earns `unvisited_reward` and leads back to its state. At reward 0, a
        state in which none was tried is therefore terminal; a reward above all others attracts a planner
        (optimism in the face of uncertainty), one below all others keeps it away.
        """
        visits_SA = self.count_SAS.sum(axis=2)
        unvisited_SA = self.unvisited_SA
        tries_SA = np.maximum(visits_SA, 1)
        stay_SAS = np.eye(len(visits_SA))[:, None] * unvisited_SA[..., None]
        return Mdp(
            self.count_SAS / tries_SA[..., None] + stay_SAS,
            np.where(unvisited_SA, unvisited_reward, self.reward_SA / tries_SA),
            discount,
            start_S,
        )


def learn_model(episodes: Sequence[Walk], num_states: int, num_actions: int) -> Model:
    """Count the transitions of episodes; ValueError for a state or an action beyond the given numbers."""
    count_SAS = np.zeros((num_states, num_actions, num_states), dtype=np.int64)
    reward_SA = np.zeros((num_states, num_actions))
    for number, episode in enumerate(episodes):
        next_T = np.append(episode.state_T[1:], episode.last_state)
        for name, index_T, size in (
            ("state", np.append(episode.state_T, episode.last_state), num_states),
            ("action", episode.action_T, num_actions),
        ):
            beyond_T = index_T[(index_T < 0) | (index_T >= size)]
            if len(beyond_T):
                raise ValueError(f"episodes[{number}] holds {name} {beyond_T[0]}; there are {size}")
        np.add.at(count_SAS, (episode.state_T, episode.action_T, next_T), 1)
        np.add.at(reward_SA, (episode.state_T, episode.action_T), episode.reward_T)
    return Model(count_SAS, reward_SA)
