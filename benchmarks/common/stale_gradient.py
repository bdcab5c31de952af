"""The gradient of stale tokens beside the exact one, on a token MDP where every expectation is a sum.

Four tokens of which the last ends a sequence, at most four tokens: 121 sequences, a policy of one row of
logits for each of 40 prefixes, a reward of 0 or 1 for each sequence. The policy moves from the sampler by
steps of one length along gradients of sampled batches, as in training; then the gradient of naive and of
decoupled PPO in tokens of the sampler is compared with the exact gradient of the policy. P = prefixes,
V = vocabulary, T = packed tokens of all sequences, D = sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from millrace.foundations.enumerate import Draws, TokenTree, draws, exact_gradient, expected_return
from millrace.foundations.mdp import Floats
from millrace.foundations.softmax_policy import softmax

TREE = TokenTree(num_tokens=4, horizon=4)
CLIP, CAP, MINIBATCH, BATCH = 0.2, 2.0, 32, 128
# Length of a policy's step, in logits.
STEP = 0.2
METHODS = ("naive", "decoupled", "decoupled, cap 2")


class World:
    """A sampler, rewards, and a policy that is some steps ahead of the sampler."""

    def __init__(self, seed: int) -> None:
        """The policy begins at the sampler."""
        self._rng = np.random.default_rng(seed)
        self._logit_PV = self._rng.normal(size=(len(TREE.prefixes), TREE.num_tokens))
        self._sampler_PV = softmax(self._logit_PV)
        reward_D = self._rng.choice([0.0, 1.0], len(TREE.sequences), p=[0.7, 0.3])
        self._reward_D, self._reward_PV = reward_D, TREE.at_the_end(reward_D)
        self._stale = draws(TREE, self._sampler_PV, 1)

    @property
    def expected(self) -> float:
        """Reward of the policy."""
        return expected_return(TREE, softmax(self._logit_PV), self._reward_PV)

    def step(self) -> None:
        """Move the policy along the gradient of a batch of its own samples."""
        policy_PV = softmax(self._logit_PV)
        own = draws(TREE, policy_PV, 1)
        count_D = self._rng.multinomial(BATCH, own.probability_D)
        advantage_D = self._reward_D - count_D @ self._reward_D / BATCH
        gradient_DPV = own.gradients(advantage_D[own.draw_B[own.segment_T]], policy_PV)
        gradient_PV = np.tensordot(count_D, gradient_DPV, axes=1)
        self._logit_PV = self._logit_PV + STEP * gradient_PV / np.linalg.norm(gradient_PV)

    def figures(self) -> dict[str, float]:
        """Fraction of tokens outside the clip, effective sample share, and cosines with the exact gradient.

        Of each method the cosine of its expected gradient, and that of a minibatch: the inner product of
        its gradient's expectation with the exact direction, over the root of its expected square.
        """
        policy_PV, stale = softmax(self._logit_PV), self._stale
        ratio_T = (policy_PV / self._sampler_PV)[stale.prefix_T, stale.token_T]
        probability_D, sequence_T = stale.probability_D, stale.draw_B[stale.segment_T]
        token_T = probability_D[sequence_T]
        mean = float(probability_D @ self._reward_D)
        deviation = math.sqrt(mean * (1 - mean))
        advantage_T = (self._reward_D[sequence_T] - mean) / deviation
        cut_T = np.where(advantage_T > 0, ratio_T > 1 + CLIP, ratio_T < 1 - CLIP)
        found = {
            "outside": float(token_T @ (abs(ratio_T - 1) > CLIP) / token_T.sum()),
            "ess": float((token_T @ ratio_T) ** 2 / token_T.sum() / (token_T @ ratio_T**2)),
        }
        factor_T = {
            "naive": np.where(cut_T, 0.0, ratio_T),
            "decoupled": ratio_T,
            "decoupled, cap 2": np.minimum(ratio_T, CAP),
        }
        exact_PV = exact_gradient(TREE, policy_PV, self._reward_PV)
        for method in METHODS:
            cosines = _cosines(stale, factor_T[method] * advantage_T, policy_PV, exact_PV)
            found[method], found[f"{method}, minibatch"] = cosines
        return found


def _cosines(stale: Draws, coefficient_T: Floats, policy_PV: Floats, exact_PV: Floats) -> tuple[float, float]:
    gradient_DPV = stale.gradients(coefficient_T, policy_PV)
    mean_PV = stale.mean(gradient_DPV)
    along = float((mean_PV * exact_PV).sum() / np.linalg.norm(exact_PV))
    square = float(np.square(mean_PV).sum())
    return along / math.sqrt(square), along / math.sqrt(square + stale.variance(gradient_DPV) / MINIBATCH)


def over_staleness(staleness: Sequence[int], seeds: Sequence[int]) -> dict[int, Mapping[str, float]]:
    """The means of `World.figures` over worlds, after so many steps; staleness rises."""
    each: dict[int, list[dict[str, float]]] = {eta: [] for eta in staleness}
    for seed in seeds:
        world = World(seed)
        for step in range(max(staleness) + 1):
            if step in each:
                each[step].append(world.figures())
            world.step()
    return {
        eta: {name: float(np.mean([one[name] for one in found])) for name in found[0]}
        for eta, found in each.items()
    }
