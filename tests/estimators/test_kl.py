"""Estimators of the divergence on the token MDP: what they expect, and where their gradients lead."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms import kl, ratios
from millrace.algorithms.losses import reinforce
from millrace.algorithms.returns import discounted_returns
from millrace.foundations.enumerate import exact_gradient
from millrace.foundations.mdp import Floats
from millrace.foundations.softmax_policy import softmax
from tests.close import close_fp64
from tests.estimators.test_returns import every_stale_world, visits
from tests.estimators.world import TREE, Batch, World

Estimator = Callable[[Tensor, Tensor], Tensor]
every_seed = pytest.mark.parametrize("seed", range(3))


class Lesson:
    """A policy that draws for itself, and a reference: the sampler of the world of the same seed."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, fresh=True)
        self.batch: Batch = self.world.batch(1)
        self.policy_PV = self.world.policy_PV
        self.reference_PV = World(seed).sampler_PV
        self.log_PV = np.log(self.policy_PV / self.reference_PV)
        pair = self.batch.every.prefix_T, self.batch.every.token_T
        self.reference_T = torch.from_numpy(np.log(self.reference_PV)[pair])
        self.visits_P1 = visits(self.world).sum(axis=1, keepdims=True)

    def mean(self, estimator: Estimator) -> float:
        """The expectation of its sum over a sequence."""
        each_T = estimator(self.batch.policy_T.detach(), self.reference_T)
        total_D = np.bincount(self.batch.every.segment_T, each_T.numpy())
        return float(self.batch.every.mean(total_D))

    def descent(self, estimator: Estimator) -> Floats:
        """The expected gradient of its sum as a loss, [P, V]."""
        return -self.world.mean(self.batch, estimator(self.batch.policy_T, self.reference_T))

    def divergence(self, logit_PV: Floats) -> float:
        """KL(policy || reference) of whole sequences."""
        pairs = zip(TREE.walk(softmax(logit_PV)), TREE.walk(self.reference_PV), strict=True)
        return sum(pi * np.log(pi / ref) for (_, pi), (_, ref) in pairs)


@every_seed
def test_k1_and_k3_expect_the_divergence_and_the_others_what_they_are(seed: int) -> None:
    lesson = Lesson(seed)
    exact = lesson.divergence(np.log(lesson.policy_PV))
    taken_PV = lesson.visits_P1 * lesson.policy_PV
    close_fp64((taken_PV * lesson.log_PV).sum(), exact)
    for unbiased in (kl.k1, kl.k3, kl.straight_through(kl.k1), kl.straight_through(kl.k3)):
        close_fp64(lesson.mean(unbiased), exact)
    close_fp64(lesson.mean(kl.k2), 0.5 * (taken_PV * lesson.log_PV**2).sum())
    close_fp64(lesson.mean(kl.absolute), (taken_PV * np.abs(lesson.log_PV)).sum())
    assert abs(lesson.mean(kl.k2) - exact) > 0.001
    assert abs(lesson.mean(kl.absolute) - exact) > 0.1


@every_seed
def test_k3_has_less_variance_than_k1(seed: int) -> None:
    lesson = Lesson(seed)
    spread = {}
    for estimator in (kl.k1, kl.k3):
        each_T = estimator(lesson.batch.policy_T.detach(), lesson.reference_T)
        total_D = np.bincount(lesson.batch.every.segment_T, each_T.numpy())
        spread[estimator] = lesson.batch.every.variance(total_D)
    taken_PV = lesson.visits_P1 * lesson.policy_PV
    assert spread[kl.k3] < 0.5 * spread[kl.k1]
    assert 0 < spread[kl.k1] < 9 * (taken_PV * lesson.log_PV**2).sum()


@every_seed
def test_as_a_loss_k1_leads_nowhere_k2_down_the_divergence_and_k3_down_the_other_one(seed: int) -> None:
    """With visits held still: KL(policy || reference) at each prefix by k2, KL(reference || policy) by k3."""
    lesson = Lesson(seed)
    close_fp64(lesson.descent(kl.k1), np.zeros((7, 3)))
    local_P1 = (lesson.policy_PV * lesson.log_PV).sum(axis=1, keepdims=True)
    down_PV = lesson.visits_P1 * lesson.policy_PV * (lesson.log_PV - local_P1)
    close_fp64(lesson.descent(kl.k2), down_PV)
    for estimator in (kl.k1, kl.k3, kl.absolute):
        close_fp64(lesson.descent(kl.straight_through(estimator)), down_PV)
    other_PV = lesson.visits_P1 * (lesson.policy_PV - lesson.reference_PV)
    close_fp64(lesson.descent(kl.k3), other_PV)
    assert np.abs(other_PV - down_PV).max() > 0.005
    sign_PV = lesson.policy_PV * np.sign(lesson.log_PV)
    expected_PV = sign_PV - lesson.policy_PV * sign_PV.sum(axis=1, keepdims=True)
    close_fp64(lesson.descent(kl.absolute), lesson.visits_P1 * expected_PV)


@pytest.mark.slow_beyond(2)
@every_seed
def test_k1_in_the_reward_climbs_down_the_divergence_of_whole_sequences(seed: int) -> None:
    """Unlike any loss, it also counts that a token now decides where later ones are drawn."""
    lesson = Lesson(seed)
    batch = lesson.batch
    penalty_T = -kl.k1(batch.policy_T.detach(), lesson.reference_T)
    return_T = discounted_returns(penalty_T, batch.length_B, gamma=1.0)
    found_PV = lesson.world.mean(batch, reinforce(batch.policy_T, return_T))
    close_fp64(found_PV, exact_gradient(TREE, lesson.policy_PV, -lesson.log_PV))
    slope_PV, logit_PV = np.zeros((7, 3)), np.log(lesson.policy_PV)
    for place in np.ndindex(7, 3):
        move_PV = np.zeros((7, 3))
        move_PV[place] = 1e-5
        up, down = lesson.divergence(logit_PV + move_PV), lesson.divergence(logit_PV - move_PV)
        slope_PV[place] = (up - down) / 2e-5
    close_fp64(found_PV, -slope_PV, rtol=1e-6, atol=1e-9)
    assert np.abs(found_PV + lesson.descent(kl.k2)).max() > 0.005


@every_stale_world
def test_the_mismatch_of_what_the_sampler_drew_expects_its_divergence_from_the_policy(world: World) -> None:
    batch = world.batch(1)
    pi_N, mu_N = (
        np.array([chance for _, chance in TREE.walk(table)]) for table in (world.policy_PV, world.sampler_PV)
    )
    found = [ratios.mismatch_metrics(one.policy_T.detach(), one.sampler_T, one.segment_T, 1) for one in batch]
    length_N = batch.length_B.numpy()
    exact = (mu_N * np.log(mu_N / pi_N)).sum()
    for name in ("k1", "k3"):
        close_fp64(sum(mu_N * length_N * [one[name] for one in found]), exact)
    chi_square = sum(mu_N * [one["chi_square_sequence"] for one in found])
    close_fp64(chi_square, (pi_N**2 / mu_N).sum() - 1)
    perplexity = sum(mu_N * [one["perplexity_ratio"] for one in found])
    close_fp64(perplexity, (mu_N * (mu_N / pi_N) ** (1 / length_N)).sum())
