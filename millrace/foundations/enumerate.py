"""The token MDP: every sequence of a tiny vocabulary, so that expectations are sums and nothing is sampled.

A policy samples tokens one after another, each given the prefix before it; the last token of the vocabulary
ends the sequence, and so does the horizon. The policy is a table of probabilities, one row per prefix.
P = prefixes after which a token is sampled, V = vocabulary, N = sequences, T = packed tokens, B = segments
(one sequence each, back to back), D = batches of sequences. Functions raise ValueError for a policy that
has the wrong shape or is no distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import factorial, prod
from typing import Any

import numpy as np

from millrace.foundations.mdp import Floats, Ints, Mdp, check_distributions, check_finite, check_shape
from millrace.foundations.walks import returns

Sequence = tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class TokenTree:
    """All prefixes, and all sequences up to `horizon` (at least 1) tokens.

    V is `num_tokens`, at least 2; token V - 1 ends a sequence.
    """

    num_tokens: int
    horizon: int

    def __post_init__(self) -> None:
        if self.num_tokens < 2:
            raise ValueError(f"num_tokens is {self.num_tokens}; one token ends a sequence, so there are two")
        if self.horizon < 1:
            raise ValueError(f"horizon is {self.horizon}; a sequence has at least one token")

    @property
    def prefixes(self) -> list[Sequence]:
        """Every prefix after which a token is sampled, the empty one first, by length and then by tokens."""
        going_on = range(self.num_tokens - 1)
        return [prefix for length in range(self.horizon) for prefix in product(going_on, repeat=length)]

    @property
    def sequences(self) -> list[Sequence]:
        """Every whole sequence, in the order of its last prefix and then of its last token."""
        end = self.num_tokens - 1
        return [
            (*prefix, token)
            for prefix in self.prefixes
            for token in range(self.num_tokens)
            if token == end or len(prefix) == self.horizon - 1
        ]

    def path(self, sequence: Sequence) -> tuple[Ints, Ints]:
        """The index of the prefix before each token of a sequence, and the token: two arrays [tokens]."""
        place = {prefix: index for index, prefix in enumerate(self.prefixes)}
        return (
            np.array([place[sequence[:t]] for t in range(len(sequence))], dtype=np.int64),
            np.array(sequence, dtype=np.int64),
        )

    def at_the_end(self, reward_N: Any) -> Floats:
        """Finite rewards of whole sequences as rewards of single tokens [P, V]: all for the last token."""
        reward_N = np.asarray(reward_N, dtype=np.float64)
        check_shape(reward_N, (len(self.sequences),), "reward_N")
        check_finite(reward_N, "reward_N")
        reward_PV = np.zeros((len(self.prefixes), self.num_tokens))
        for sequence, reward in zip(self.sequences, reward_N, strict=True):
            prefix_T, token_T = self.path(sequence)
            reward_PV[prefix_T[-1], token_T[-1]] = reward
        return reward_PV

    def mdp(self, reward_PV: Floats, *, discount: float = 1.0) -> Mdp:
        """The same as an `Mdp`: prefixes are states, tokens actions, and the last state, P, is terminal."""
        num_prefixes = len(self.prefixes)
        transition_SAS = np.zeros((num_prefixes + 1, self.num_tokens, num_prefixes + 1))
        transition_SAS[..., num_prefixes] = 1
        for index, prefix in enumerate(self.prefixes[1:], 1):
            before, token = self.prefixes.index(prefix[:-1]), prefix[-1]
            transition_SAS[before, token, num_prefixes] = 0
            transition_SAS[before, token, index] = 1
        start_S = np.eye(num_prefixes + 1)[0]
        return Mdp(transition_SAS, np.vstack([reward_PV, np.zeros(self.num_tokens)]), discount, start_S)

    def walk(self, policy_PV: Any) -> Iterator[tuple[Sequence, float]]:
        """Every sequence with its probability."""
        policy_PV = np.asarray(policy_PV, dtype=np.float64)
        check_shape(policy_PV, (len(self.prefixes), self.num_tokens), "policy_PV")
        check_distributions(policy_PV, "policy_PV")
        for sequence in self.sequences:
            yield sequence, float(np.prod(policy_PV[self.path(sequence)]))


def expected_return(tree: TokenTree, policy_PV: Any, reward_PV: Floats, *, discount: float = 1.0) -> float:
    """J = E[sum_t gamma^t r_t], summed over all sequences."""
    return sum(
        probability * float(returns(reward_PV[tree.path(sequence)], discount)[0])
        for sequence, probability in tree.walk(policy_PV)
    )


def prefix_values(tree: TokenTree, policy_PV: Any, reward_PV: Floats, *, discount: float = 1.0) -> Floats:
    """The expected discounted return from each prefix on, [P]; ValueError for one of probability 0."""
    total_P, reach_P = np.zeros((2, len(tree.prefixes)))
    for sequence, probability in tree.walk(policy_PV):
        prefix_T, token_T = tree.path(sequence)
        total_P[prefix_T] += probability * returns(reward_PV[prefix_T, token_T], discount)
        reach_P[prefix_T] += probability
    if (reach_P == 0).any():
        raise ValueError(
            f"prefix {tree.prefixes[int(reach_P.argmin())]} is never reached, so it has no value"
        )
    return np.asarray(total_P / reach_P)


def token_scores(policy_PV: Floats, prefix_T: Ints, token_T: Ints) -> Floats:
    """The gradient of each token's log-probability with respect to the logits of its row, [T, V]."""
    return np.asarray(np.eye(policy_PV.shape[1])[token_T] - policy_PV[prefix_T])


def exact_gradient(tree: TokenTree, policy_PV: Any, reward_PV: Floats, *, discount: float = 1.0) -> Floats:
    """The gradient [P, V] of `expected_return` with respect to the logits, summed over all sequences.

    E[(sum_t gamma^t r_t) sum_t grad log pi(token_t | prefix_t)].
    """
    policy_PV = np.asarray(policy_PV, dtype=np.float64)
    gradient_PV = np.zeros(policy_PV.shape)
    for sequence, probability in tree.walk(policy_PV):
        prefix_T, token_T = tree.path(sequence)
        gain = returns(reward_PV[prefix_T, token_T], discount)[0]
        gradient_PV[prefix_T] += probability * gain * token_scores(policy_PV, prefix_T, token_T)
    return gradient_PV


@dataclass(frozen=True, eq=False, slots=True)
class Draws:
    """Every batch of sequences that a policy can sample, without regard to order, packed one after another.

    A batch represents all its orders, so an estimator must not depend on the order; `probability_D` is that
    of the batch in any order. `sequence_B` and `draw_B` are the tree's sequence and the batch of each
    segment; batches follow one another. `prefix_T` is the index of the prefix before each token.
    """

    sequence_B: Ints
    draw_B: Ints
    length_B: Ints
    prefix_T: Ints
    token_T: Ints
    segment_T: Ints
    probability_D: Floats

    @property
    def position_T(self) -> Ints:
        """Place of each token in its sequence, from 0."""
        first_B = self.length_B.cumsum() - self.length_B
        return np.asarray(np.arange(len(self.token_T)) - first_B[self.segment_T])

    def gradients(self, coefficient_T: Any, policy_PV: Floats) -> Floats:
        """sum_t c_t grad log pi(token_t | prefix_t) for each batch, [D, P, V].

        c is the estimator's factor for the score of each token; pi need not be the behaviour policy.
        """
        term_TV = np.asarray(coefficient_T)[:, None] * token_scores(policy_PV, self.prefix_T, self.token_T)
        gradient_DPV = np.zeros((len(self.probability_D), *policy_PV.shape))
        np.add.at(gradient_DPV, (self.draw_B[self.segment_T], self.prefix_T), term_TV)
        return gradient_DPV

    def mean(self, value_D: Floats) -> Floats:
        """Expectation over the batches, the first axis of the array."""
        return np.asarray(np.tensordot(self.probability_D, value_D, axes=1))

    def variance(self, value_D: Floats) -> float:
        """E|x - E x|^2 over the batches: the sum of the variances of all entries."""
        return float(self.mean(np.square(value_D - self.mean(value_D))).sum())


def draws(tree: TokenTree, policy_PV: Any, size: int) -> Draws:
    """Every batch of `size` >= 1 sequences sampled independently; those of probability 0 too."""
    if size < 1:
        raise ValueError(f"size is {size}; a batch has at least one sequence")
    walked = list(tree.walk(policy_PV))
    paths = [tree.path(sequence) for sequence, _ in walked]
    probability_N = np.array([probability for _, probability in walked])
    batches = list(combinations_with_replacement(range(len(walked)), size))
    orders_D = [factorial(size) // prod(map(factorial, Counter(batch).values())) for batch in batches]
    batch_DB = np.array(batches, dtype=np.int64)
    sequence_B = batch_DB.reshape(-1)
    length_B = np.array([len(prefix_T) for prefix_T, _ in paths], dtype=np.int64)[sequence_B]
    return Draws(
        sequence_B=sequence_B,
        draw_B=np.repeat(np.arange(len(batch_DB)), size),
        length_B=length_B,
        prefix_T=np.concatenate([paths[index][0] for index in sequence_B]),
        token_T=np.concatenate([paths[index][1] for index in sequence_B]),
        segment_T=np.repeat(np.arange(len(sequence_B)), length_B),
        probability_D=orders_D * probability_N[batch_DB].prod(axis=1),
    )
