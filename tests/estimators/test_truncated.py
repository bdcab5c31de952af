"""Sampling from top-k and top-p on the token MDP: the gradient is that of the truncated policy, exactly.

P = prefixes, V = vocabulary. The policy is a table of logits; a hidden state names its prefix, and the table
is the output head, so that what is tested is what a training step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms.kl import k1, straight_through
from millrace.config.method_sections import PpoClipLoss
from millrace.data.batch import Batch
from millrace.data.packing import pack
from millrace.foundations.enumerate import TokenTree
from millrace.kernels.token_logprob import Head, token_divergence, token_logprob, token_squares
from millrace.run.build_algorithm import build_loss
from millrace.training.policy import PolicyObjective, Predicted
from millrace.types import Completion, Outcome, Support, Trajectory, Turn
from tests.close import close_fp32, close_fp64

TEMPERATURE = 0.7
LONG, SHORT = TokenTree(num_tokens=6, horizon=3), TokenTree(num_tokens=9, horizon=1)
TRUNCATIONS = {"top-k": (3, 1.0), "top-p": (0, 0.8), "both": (5, 0.8), "neither": (0, 1.0)}
EVERYTHING = PolicyObjective(build_loss(PpoClipLoss(clip_low=1 - 1e-6, clip_high=1e6)))


def kept(share_V: list[float], top_k: int, top_p: float) -> list[int]:
    """The top k tokens, and of those the fewest that hold the share top_p of their mass."""
    order = sorted(range(len(share_V)), key=lambda v: -share_V[v])[: top_k or None]
    total, mass, found = sum(share_V[v] for v in order), 0.0, []
    for v in order:
        if found and mass >= top_p * total:
            break
        found.append(v)
        mass += share_V[v]
    return sorted(found)


@dataclass(frozen=True, eq=False)
class Truncated:
    """A sampler that draws among some tokens only, and the policy that learns from it.

    Attributes:
        tree: of prefixes and tokens.
        seed: of everything.
        fresh: the sampler is the policy itself.
        truncation: top-k and top-p.
    """

    tree: TokenTree
    seed: int
    fresh: bool
    truncation: tuple[int, float]

    @cached_property
    def logit_PV(self) -> Tensor:
        return self._random(0)

    @cached_property
    def sampler_PV(self) -> Tensor:
        """The sampler's log-probabilities over the whole vocabulary."""
        shift_PV = 0 if self.fresh else 0.5 * self._random(1)
        return ((self.logit_PV + shift_PV) / TEMPERATURE).log_softmax(1)

    @cached_property
    def kept_P(self) -> list[list[int]]:
        return [kept(share_V, *self.truncation) for share_V in self.sampler_PV.exp().tolist()]

    def reward(self, sequence: tuple[int, ...]) -> float:
        return float(np.random.default_rng([self.seed, 2, *sequence]).normal())

    def walk(self, logprob_PV: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """Every sequence that can be drawn, with its probability under a policy over the kept tokens."""
        found = []
        for sequence in self.tree.sequences:
            pairs = list(zip(*(part.tolist() for part in self.tree.path(sequence)), strict=True))
            if all(token in self.kept_P[p] for p, token in pairs):
                parts = [
                    logprob_PV[p, token] - logprob_PV[p, self.kept_P[p]].logsumexp(0) for p, token in pairs
                ]
                found.append((sequence, torch.stack(parts).sum().exp()))
        return found

    def exact_gradient(self) -> Tensor:
        """Of the expected reward of the truncated policy with respect to its logits, [P, V]."""
        logit_PV = self.logit_PV.clone().requires_grad_()
        pairs = self.walk(logit_PV / TEMPERATURE)
        total = torch.stack([chance * self.reward(sequence) for sequence, chance in pairs]).sum()
        return torch.autograd.grad(total, logit_PV)[0]

    def batch(self) -> Batch:
        """Every sequence that can be drawn; its advantage is its reward, its weight its probability."""
        drawn = self.walk(self.sampler_PV)
        close_fp64(sum(float(chance) for _, chance in drawn), 1.0)
        batch = pack([self._trajectory(sequence) for sequence, _ in drawn])
        mask_T = batch.action_mask_T.double()
        reward_N = torch.tensor([self.reward(sequence) for sequence, _ in drawn], dtype=torch.float64)
        chance_N = torch.stack([chance for _, chance in drawn])
        batch.advantage_T = reward_N[batch.segment_T] * mask_T
        batch.weight_T = chance_N[batch.segment_T] * mask_T
        return batch

    def hidden(self, batch: Batch) -> Tensor:
        """The prefix of each chosen token, one-hot, [N, P]."""
        token_T, mask_T, segment_T = batch.token_T.tolist(), batch.action_mask_T.tolist(), batch.segment_T
        rows = []
        for b in range(batch.num_segments):
            here = (segment_T == b).nonzero()[:, 0].tolist()
            sequence = tuple(token_T[t] for t in here if mask_T[t])
            rows.append(torch.from_numpy(self.tree.path(sequence)[0]))
        return torch.nn.functional.one_hot(torch.cat(rows), len(self.tree.prefixes)).double()

    def _trajectory(self, sequence: tuple[int, ...]) -> Trajectory:
        prefix_L, token_L = self.tree.path(sequence)
        supports = [self.kept_P[p] for p in prefix_L.tolist()]
        mass_L = torch.stack([self.sampler_PV[p, self.kept_P[p]].logsumexp(0) for p in prefix_L.tolist()])
        logprob_L = self.sampler_PV[prefix_L, token_L]
        support = Support(
            np.array(sum(supports, []), dtype=np.int32),
            np.array([len(one) for one in supports], dtype=np.int32),
            (logprob_L - mass_L).numpy().astype(np.float32),
        )
        logprobs = logprob_L.numpy().astype(np.float32)
        versions = np.zeros(len(sequence), dtype=np.int32)
        said = Completion(
            sequence, logprobs, versions, "stop", "", support=support if self.truncation != (0, 1.0) else None
        )
        return Trajectory((Turn((0,), said),), Outcome("score", 0.0))

    def _random(self, stream: int) -> Tensor:
        shape = len(self.tree.prefixes), self.tree.num_tokens
        return torch.from_numpy(np.random.default_rng([self.seed, stream]).normal(size=shape))


def predict(world: Truncated, batch: Batch) -> tuple[Predicted, Tensor]:
    """What the trainer's forward says of the batch, and the table of logits it can be differentiated by."""
    weight_VP = world.logit_PV.T.clone().requires_grad_()
    hidden_NP, head = world.hidden(batch), Head(weight_VP)
    logprob_N, entropy_N = token_logprob(
        hidden_NP,
        head,
        batch.token_T[batch.action_mask_T],
        temperature=TEMPERATURE,
        support=batch.chosen_support,
    )
    return Predicted(logprob_N, entropy_N, 0), weight_VP


def estimated_gradient(world: Truncated, batch: Batch) -> Tensor:
    """The expected gradient of the surrogate, uphill, [P, V]."""
    predicted, weight_VP = predict(world, batch)
    loss_N, _ = EVERYTHING(predicted, batch)
    (slope_VP,) = torch.autograd.grad((loss_N * batch.weight_T[batch.action_mask_T]).sum(), weight_VP)
    return -slope_VP.T


every_world = pytest.mark.parametrize(
    ("tree", "fresh"), [(LONG, True), (SHORT, True), (SHORT, False)], ids=["long", "short", "stale"]
)
every_truncation = pytest.mark.parametrize("truncation", TRUNCATIONS.values(), ids=TRUNCATIONS)


@pytest.mark.slow_beyond(2)
@every_world
@every_truncation
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_truncated_policy(
    seed: int, truncation: tuple[int, float], tree: TokenTree, fresh: bool
) -> None:
    """Stale weights need one step: a ratio for each token leaves out those of the tokens before it."""
    world = Truncated(tree, seed, fresh, truncation)
    exact_PV = world.exact_gradient()
    assert exact_PV.norm() > 0.05
    batch = world.batch()
    close_fp32(estimated_gradient(world, batch), exact_PV, atol=1e-6, rtol=1e-4)
    if truncation == (0, 1.0):
        assert batch.support is None
        return
    reached = [p for p in range(len(tree.prefixes)) if exact_PV[p].any()]
    for p in reached:
        inside = [v in world.kept_P[p] for v in range(tree.num_tokens)]
        assert estimated_gradient(world, batch)[p].ne(0).tolist() == inside
    # Log-probabilities over the whole vocabulary push up what cannot be drawn, and the mean is another.
    blind = replace(batch, support=None, sampler_logprob_T=whole(batch, world))
    assert (estimated_gradient(world, blind) - exact_PV).norm() > 0.05 * exact_PV.norm()


def whole(batch: Batch, world: Truncated) -> Tensor:
    """The sampler's log-probabilities over the whole vocabulary, [T]."""
    logprob_N = (world.hidden(batch) @ world.sampler_PV).gather(
        1, batch.token_T[batch.action_mask_T][:, None]
    )[:, 0]
    return torch.zeros(batch.num_tokens).masked_scatter(batch.action_mask_T, logprob_N.float())


@pytest.mark.slow_beyond(6)
@every_truncation
@pytest.mark.parametrize("seed", range(3))
def test_on_policy_every_ratio_is_1(seed: int, truncation: tuple[int, float]) -> None:
    world = Truncated(LONG, seed, True, truncation)
    batch = world.batch()
    predicted, _ = predict(world, batch)
    ratio_N = (predicted.logprob_N - batch.sampler_logprob_T[batch.action_mask_T]).exp()
    close_fp32(ratio_N, torch.ones_like(ratio_N))


@every_truncation
@pytest.mark.parametrize("seed", range(3))
def test_weights_off_the_sampler_have_ratios_whose_mean_is_1(
    seed: int, truncation: tuple[int, float]
) -> None:
    world = Truncated(SHORT, seed, False, truncation)
    batch = world.batch()
    predicted, _ = predict(world, batch)
    mask_T = batch.action_mask_T
    ratio_N = (predicted.logprob_N - batch.sampler_logprob_T[mask_T]).exp()
    assert (ratio_N - 1).abs().max() > 0.05
    close_fp32((ratio_N * batch.weight_T[mask_T]).sum(), 1.0)


@every_truncation
@pytest.mark.parametrize("seed", range(3))
def test_the_divergence_over_the_support_is_the_mean_of_its_estimates(
    seed: int, truncation: tuple[int, float]
) -> None:
    """Also the entropy and the sum of squares: of one draw they are the means of -log p and p."""
    world, other = Truncated(SHORT, seed, True, truncation), Truncated(SHORT, seed + 9, True, (0, 1.0))
    batch = world.batch()
    predicted, weight_VP = predict(world, batch)
    target_N, weight_N = batch.token_T[batch.action_mask_T], batch.weight_T[batch.action_mask_T]
    hidden_NP, own, head = world.hidden(batch), Head(weight_VP), Head(other.logit_PV.T)
    options = {"temperature": TEMPERATURE, "support": batch.chosen_support}
    reference_N, _ = token_logprob(hidden_NP, head, target_N, **options)
    divergence_N = token_divergence(hidden_NP, own, hidden_NP, head, **options)
    square_N = token_squares(hidden_NP, own, **options)
    logprob_N = predicted.logprob_N

    def mean(value_N: Tensor) -> Tensor:
        return (value_N * weight_N).sum()

    assert divergence_N.min() > 0.01
    close_fp64(mean(divergence_N), mean(k1(logprob_N, reference_N)))
    close_fp64(mean(predicted.entropy_N), mean(-logprob_N))
    close_fp64(mean(square_N), mean(logprob_N.exp()))
    estimate: Callable[[Tensor, Tensor], Tensor] = straight_through(k1)
    slopes = [
        torch.autograd.grad(mean(one_N), weight_VP, retain_graph=True)[0]
        for one_N in (divergence_N, estimate(logprob_N, reference_N))
    ]
    assert slopes[0].norm() > 0.01
    close_fp64(slopes[1], slopes[0])
