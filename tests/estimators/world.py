"""One token MDP played to the end in every way, by the library and by a plain twin of it.

P = prefixes, V = vocabulary, N = sequences, T = packed tokens, B = segments, D = draws (batches).
An estimator is judged by its gradient with respect to the logits, averaged over every batch that can be
drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch import Tensor

from millrace.foundations.enumerate import Draws, TokenTree, draws, prefix_values, token_scores
from millrace.foundations.mdp import Floats
from millrace.foundations.softmax_policy import softmax
from tests.close import close_fp64

TREE = TokenTree(num_tokens=3, horizon=3)


@dataclass(frozen=True, eq=False)
class World:
    """Two policies and two kinds of reward.

    Attributes:
        seed: of everything.
        fresh: the sampler is the policy itself.
        spread: of the policy's logits; 0 is the uniform policy.
    """

    seed: int
    fresh: bool = False
    spread: float = 1.0

    @cached_property
    def policy_PV(self) -> Floats:
        return softmax(self.spread * self._random(0, len(TREE.prefixes), 3))

    @cached_property
    def sampler_PV(self) -> Floats:
        shift_PV = 0 if self.fresh else 0.6 * self._random(1, len(TREE.prefixes), 3)
        return softmax(np.log(self.policy_PV) + shift_PV)

    @cached_property
    def reward_N(self) -> Floats:
        """Of whole sequences; some are equal and some are 0."""
        return np.random.default_rng([self.seed, 2]).choice([-0.5, 0.0, 0.9, 2.0], len(TREE.sequences))

    @cached_property
    def final_PV(self) -> Floats:
        """The same as rewards of single tokens."""
        return TREE.at_the_end(self.reward_N)

    @cached_property
    def reward_PV(self) -> Floats:
        """Rewards of single tokens, at every step."""
        return self._random(3, len(TREE.prefixes), 3)

    def value_P(self, *, discount: float = 1.0) -> Floats:
        """Of `reward_PV` under the policy."""
        return prefix_values(TREE, self.policy_PV, self.reward_PV, discount=discount)

    def batch(self, size: int) -> Batch:
        """Every batch of so many sequences that the sampler can draw."""
        every = draws(TREE, self.sampler_PV, size)
        pair = every.prefix_T, every.token_T

        def tensor(table_PV: Floats) -> Tensor:
            return torch.from_numpy(np.log(table_PV)[pair])

        return Batch(
            every=every,
            size=size,
            policy_T=tensor(self.policy_PV).requires_grad_(),
            sampler_T=tensor(self.sampler_PV),
            square_T=torch.from_numpy(np.square(self.policy_PV).sum(axis=1)[every.prefix_T]),
            reward_T=torch.from_numpy(self.reward_PV[pair]),
            reward_B=torch.from_numpy(self.reward_N[every.sequence_B]),
            length_B=torch.from_numpy(every.length_B),
            segment_T=torch.from_numpy(every.segment_T),
            group_B=torch.from_numpy(every.draw_B),
            prefix_T=torch.from_numpy(every.prefix_T),
            position_T=torch.from_numpy(every.position_T),
        )

    def gradients(self, batch: Batch, loss_T: Tensor, weight_T: Tensor | None = None) -> Floats:
        """What each batch moves the logits by, uphill, [D, P, V]; a token weighs 1 / size by default."""
        weight_T = torch.full_like(loss_T, 1 / batch.size) if weight_T is None else weight_T
        (slope_T,) = torch.autograd.grad((loss_T * weight_T).sum(), batch.policy_T, retain_graph=True)
        return batch.every.gradients(-slope_T.numpy(), self.policy_PV)

    def mean(self, batch: Batch, loss_T: Tensor, weight_T: Tensor | None = None) -> Floats:
        """The expected gradient, [P, V]."""
        return batch.every.mean(self.gradients(batch, loss_T, weight_T))

    def _random(self, stream: int, *shape: int) -> Floats:
        return np.random.default_rng([self.seed, stream]).normal(size=shape)


@dataclass(frozen=True, eq=False)
class Batch:
    """What the library sees: batches one after another, each a group of its own.

    `policy_T` is the leaf that gradients are taken with respect to.
    """

    every: Draws
    size: int
    policy_T: Tensor
    sampler_T: Tensor
    square_T: Tensor
    reward_T: Tensor
    reward_B: Tensor
    length_B: Tensor
    segment_T: Tensor
    group_B: Tensor
    prefix_T: Tensor
    position_T: Tensor

    @property
    def num_segments(self) -> int:
        return len(self.length_B)

    @property
    def groups(self) -> tuple[Tensor, int]:
        return self.group_B, self.num_segments // self.size

    def spread(self, advantage_B: Tensor) -> Tensor:
        return advantage_B[self.segment_T]

    def values(self, value_P: Floats) -> Tensor:
        return torch.from_numpy(value_P)[self.prefix_T]

    def one_by_one(self, function: Callable[[Batch], Tensor]) -> Tensor:
        """[T] of a function that looks at its whole batch, called for each batch alone."""
        return torch.cat([function(one) for one in self])

    def __iter__(self) -> Iterator[Batch]:
        first = 0
        for start in range(0, self.num_segments, self.size):
            segments = slice(start, start + self.size)
            tokens = slice(first, first := first + int(self.length_B[segments].sum()))
            yield replace(
                self,
                **{
                    name: getattr(self, name)[tokens]
                    for name in ("policy_T", "sampler_T", "square_T", "reward_T", "prefix_T", "position_T")
                },
                segment_T=self.segment_T[tokens] - start,
                reward_B=self.reward_B[segments],
                length_B=self.length_B[segments],
                group_B=torch.zeros(self.size, dtype=torch.long),
            )


@dataclass(frozen=True)
class Path:
    """One sequence, as plain numbers: what the twin of an estimator sees.

    Attributes:
        probability: of being drawn.
        prefixes: the prefix before each token.
        policy: log-probability of each token under the policy.
        sampler: likewise under the sampler.
        energy: squared length of the gradient of `policy` with respect to the logits, for each token.
        rewards: of each token.
        reward: of the sequence.
    """

    probability: float
    prefixes: list[int]
    tokens: list[int]
    policy: list[float]
    sampler: list[float]
    energy: list[float]
    rewards: list[float]
    reward: float

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ratio(self) -> float:
        """Policy over sampler, of the whole sequence."""
        return math.exp(sum(self.policy) - sum(self.sampler))


Coefficients = list[list[float]]
Twin = Callable[[list[Path]], Coefficients]


def paths(world: World) -> list[Path]:
    found = []
    for sequence, reward in zip(TREE.sequences, world.reward_N, strict=True):
        prefixes = [TREE.prefixes.index(sequence[:t]) for t in range(len(sequence))]
        pairs = list(zip(prefixes, sequence, strict=True))
        rows = [[(token == v) - world.policy_PV[p, v] for v in range(3)] for p, token in pairs]
        found.append(
            Path(
                probability=math.prod(world.sampler_PV[pair] for pair in pairs),
                prefixes=prefixes,
                tokens=list(sequence),
                policy=[math.log(world.policy_PV[pair]) for pair in pairs],
                sampler=[math.log(world.sampler_PV[pair]) for pair in pairs],
                energy=[sum(part * part for part in row) for row in rows],
                rewards=[float(world.reward_PV[pair]) for pair in pairs],
                reward=float(reward),
            )
        )
    return found


def twin_gradients(world: World, size: int, twin: Twin) -> tuple[list[float], Floats]:
    """Probability and gradient [P, V] of every batch, the twin saying what each token's score is worth."""
    score = token_scores(world.policy_PV, np.repeat(np.arange(7), 3), np.tile(np.arange(3), 7)).reshape(
        7, 3, 3
    )
    chances, gradients = [], []
    for drawn in product(paths(world), repeat=size):
        gradient_PV = np.zeros((7, 3))
        for path, coefficients in zip(drawn, twin(list(drawn)), strict=True):
            for prefix, token, worth in zip(path.prefixes, path.tokens, coefficients, strict=True):
                gradient_PV[prefix] += worth / size * score[prefix, token]
        chances.append(math.prod(path.probability for path in drawn))
        gradients.append(gradient_PV)
    return chances, np.array(gradients)


def close_to_twin(world: World, batch: Batch, found_DPV: Floats, twin: Twin, *, rtol: float = 1e-9) -> None:
    """Mean and variance of the gradient are those of the twin, which plays every order of every batch."""
    chances, expected_DPV = twin_gradients(world, batch.size, twin)
    mean_PV = sum(chance * one for chance, one in zip(chances, expected_DPV, strict=True))
    close_fp64(batch.every.mean(found_DPV), mean_PV, rtol=rtol, atol=rtol)
    variance = sum(c * ((one - mean_PV) ** 2).sum() for c, one in zip(chances, expected_DPV, strict=True))
    close_fp64(batch.every.variance(found_DPV), variance, rtol=rtol, atol=rtol)


def per_sequence(weigh: Callable[[list[Path]], list[float]]) -> Twin:
    """A twin that gives all tokens of a sequence the same worth."""
    return lambda drawn: [[worth] * len(path) for path, worth in zip(drawn, weigh(drawn), strict=True)]


def whitened(numbers: Coefficients) -> Coefficients:
    flat = [one for row in numbers for one in row]
    mean = sum(flat) / len(flat)
    variance = sum((one - mean) ** 2 for one in flat) / max(len(flat) - 1, 1)
    return [[(one - mean) / math.sqrt(variance + 1e-8) for one in row] for row in numbers]
