"""A game of two turns, small enough to enumerate: what credit over turns is compared with.

Four tokens, one for each turn. Token 3 stops in the first turn; the others go on to a second turn, where
every token ends the episode. Each turn may have a reward of its own, and each episode has an outcome. It is
the `TokenTree` of two tokens: a turn is a token, and a prefix is the state in which the policy acts.
P = prefixes ((), (0,), (1,), (2,)), V = the four tokens, N = the 13 episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from millrace.foundations.enumerate import TokenTree, exact_gradient
from millrace.foundations.mdp import Floats
from millrace.foundations.softmax_policy import softmax

TREE = TokenTree(num_tokens=4, horizon=2)
STOP = 3


@dataclass(frozen=True, eq=False, slots=True)
class TurnGame:
    """Policy and rewards of the game.

    Attributes:
        policy_PV: probability of each token after each prefix.
        reward_PV: the environment's reward for each turn.
        outcome_N: outcome of each episode, in the order of `TREE.sequences`.
    """

    policy_PV: Floats
    reward_PV: Floats
    outcome_N: Floats

    @property
    def total_PV(self) -> Floats:
        """Rewards with the outcome added to that of the last turn."""
        return np.asarray(self.reward_PV + TREE.at_the_end(self.outcome_N))

    @property
    def gradient_PV(self) -> Floats:
        """The exact gradient of the expected return with respect to the logits."""
        return exact_gradient(TREE, self.policy_PV, self.total_PV)

    @property
    def mean_intermediate_reward(self) -> float:
        """Expected reward of turns before the last one of their episode: here, of going on."""
        return float(self.policy_PV[0, :STOP] @ self.reward_PV[0, :STOP])

    @property
    def turn_index_bias_PV(self) -> Floats:
        """How far a baseline for each turn index moves the expected gradient: as a reward of -m for going on.

        m is the mean reward of the first turn of the episodes that go on.
        """
        lost_PV = np.zeros_like(self.reward_PV)
        lost_PV[0, :STOP] = -self.mean_intermediate_reward / self.policy_PV[0, :STOP].sum()
        return exact_gradient(TREE, self.policy_PV, lost_PV)


def example_game() -> TurnGame:
    """Going on earns a reward at once and, on average, a lower outcome than to stop, but more in all."""
    logit_PV = [[0.2, 0.0, -0.3, 0.1], [0.5, 0.0, 0.0, -0.5], [0.0, 0.4, 0.0, 0.0], [-0.2, 0.0, 0.3, 0.0]]
    reward_PV = np.zeros((4, 4))
    reward_PV[0] = [0.5, 0.4, 0.6, 0.0]
    reward_PV[1:] = 0.1, 0.0, 0.2, 0.0
    outcome_N = [0.6, *[1.0, 0.0, 0.0, 0.5], *[0.0, 1.0, 0.0, 0.0], *[0.0, 0.0, 1.0, 0.5]]
    return TurnGame(softmax(logit_PV), reward_PV, np.array(outcome_N))


def random_game(seed: int) -> TurnGame:
    """Random policy, turn rewards and outcomes."""
    rng = np.random.default_rng(seed)
    shape = (len(TREE.prefixes), TREE.num_tokens)
    return TurnGame(
        softmax(rng.normal(size=shape)), rng.normal(size=shape), rng.normal(size=len(TREE.sequences))
    )
