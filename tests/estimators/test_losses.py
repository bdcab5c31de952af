"""Every policy loss on the token MDP: the gradient of each draw against its formula, and what theory says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms import losses
from millrace.foundations.enumerate import exact_gradient, prefix_values
from tests.close import close_fp64
from tests.estimators.test_advantages import discounted
from tests.estimators.test_returns import (
    STALE,
    climb,
    every_stale_world,
    every_world,
    quality,
    visits,
)
from tests.estimators.world import TREE, Batch, Path, World, close_to_twin, paths

Loss = Callable[[Batch, Tensor], Tensor]
Slope = Callable[[Path, list[float]], list[float]]
LOW, HIGH = 0.2, 0.28
EVERYTHING = {"low": 1 - 1e-9, "high": 1e9}


def token_loss(function: Callable[..., Tensor]) -> Loss:
    return lambda batch, advantage_T: function(batch.policy_T, batch.sampler_T, advantage_T)


def sequence_loss(function: Callable[..., Tensor]) -> Loss:
    return lambda batch, advantage_T: function(
        batch.policy_T, batch.sampler_T, advantage_T, batch.segment_T, batch.num_segments
    )


# How far each token's log-probability is pushed up, in plain words.


def each(worth: Callable[[float, float, float], float]) -> Slope:
    """Of a token by itself: from its advantage and its probabilities under policy and sampler."""
    return lambda path, advantage: [
        worth(a, math.exp(p), math.exp(q))
        for a, p, q in zip(advantage, path.policy, path.sampler, strict=True)
    ]


def clip_stops(a: float, ratio: float) -> bool:
    return (a > 0 and ratio > 1 + HIGH) or (a < 0 and ratio < 1 - LOW)


def ppo(a: float, p: float, q: float) -> float:
    return 0.0 if clip_stops(a, p / q) else a * p / q


def ppo_dual(a: float, p: float, q: float) -> float:
    return 0.0 if a < 0 and p / q > 1.5 else ppo(a, p, q)


def sapo(a: float, p: float, q: float) -> float:
    gate = 1 / (1 + math.exp(-(2.0 if a > 0 else 3.0) * (p / q - 1)))
    return a * p / q * 4 * gate * (1 - gate)


def dppo(a: float, p: float, q: float, *, divergence: Callable[[float, float], float]) -> float:
    leaves = divergence(p, q) > (0.05 if a > 0 else 0.03) and (p - q) * a > 0
    return 0.0 if leaves else a * min(p / q, 1.4)


def binary_kl(p: float, q: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def gspo(path: Path, advantage: list[float]) -> list[float]:
    ratio = path.ratio ** (1 / len(path))
    return [0.0 if clip_stops(a, ratio) else a * ratio for a in advantage]


def gspo_through_the_mean(path: Path, advantage: list[float]) -> list[float]:
    return [sum(gspo(path, advantage)) / len(path)] * len(path)


def gmpo(path: Path, advantage: list[float]) -> list[float]:
    kept, moves = [], []
    for a, p, q in zip(advantage, path.policy, path.sampler, strict=True):
        kept.append(min(p - q, 0.3) if a > 0 else max(p - q, -0.25))
        moves.append(kept[-1] == p - q)
    height = sum(advantage) / len(path) * math.exp(sum(kept) / len(path))
    return [height * move for move in moves]


def topr(path: Path, advantage: list[float]) -> list[float]:
    return [a if a > 0 else a * min(path.ratio, 1.0) for a in advantage]


LOSSES: dict[str, tuple[Loss, Slope]] = {
    "reinforce": (
        lambda batch, advantage_T: losses.reinforce(batch.policy_T, advantage_T),
        each(lambda a, p, q: a),
    ),
    "ppo_clip": (token_loss(partial(losses.ppo_clip, low=LOW, high=HIGH)), each(ppo)),
    "ppo_clip, dual": (token_loss(partial(losses.ppo_clip, low=LOW, high=HIGH, dual=1.5)), each(ppo_dual)),
    "cispo": (
        token_loss(partial(losses.cispo, low=LOW, high=HIGH)),
        each(lambda a, p, q: a * min(max(p / q, 1 - LOW), 1 + HIGH)),
    ),
    "sapo": (token_loss(partial(losses.sapo, positive=2.0, negative=3.0)), each(sapo)),
    "dppo_tv": (
        token_loss(partial(losses.dppo_tv, low=0.03, high=0.05, cap=1.4)),
        each(partial(dppo, divergence=lambda p, q: abs(p - q))),
    ),
    "dppo_kl": (
        token_loss(partial(losses.dppo_kl, low=0.03, high=0.05, cap=1.4)),
        each(partial(dppo, divergence=binary_kl)),
    ),
    "dro": (
        token_loss(partial(losses.dro, beta=0.7)),
        each(lambda a, p, q: a - 0.7 * math.log(p / q)),
    ),
    "gspo": (sequence_loss(partial(losses.gspo, low=LOW, high=HIGH)), gspo_through_the_mean),
    "gspo_token": (sequence_loss(partial(losses.gspo_token, low=LOW, high=HIGH)), gspo),
    "gmpo": (sequence_loss(partial(losses.gmpo, low=0.25, high=0.3)), gmpo),
    "topr": (sequence_loss(losses.topr), topr),
}


@pytest.mark.slow_beyond(30)
@every_stale_world
@pytest.mark.parametrize("name", LOSSES)
def test_mean_and_variance_of_each_loss_are_those_of_its_definition(name: str, world: World) -> None:
    """In draws of other weights, with an advantage that changes from token to token."""
    ours, twin = LOSSES[name]
    batch = world.batch(1)
    found_DPV = world.gradients(batch, ours(batch, batch.reward_T))
    # verl's 1e-8 in the divergence of dppo_kl does not reach the gradient.
    close_to_twin(world, batch, found_DPV, lambda drawn: [twin(path, path.rewards) for path in drawn])


def test_every_bound_acts_somewhere_in_these_worlds() -> None:
    """Otherwise the test above would compare REINFORCE with itself."""
    bounded = [name for name in LOSSES if name not in ("reinforce", "dro", "sapo")]
    for name in bounded:
        slopes = [
            (one, other)
            for world in STALE
            for path in paths(world)
            for one, other in zip(
                LOSSES[name][1](path, path.rewards), _unbounded(name, path, path.rewards), strict=True
            )
        ]
        differ = sum(abs(one - other) > 1e-9 for one, other in slopes)
        assert 0 < differ < len(slopes), name


def _unbounded(name: str, path: Path, advantage: list[float]) -> list[float]:
    whole = path.ratio ** (1 / len(path))
    token = [math.exp(p - q) for p, q in zip(path.policy, path.sampler, strict=True)]
    mean = sum(advantage) / len(path)
    if name == "topr":
        return [a if a > 0 else a * path.ratio for a in advantage]
    if name in ("gmpo", "gspo"):
        return [mean * whole] * len(path)
    ratio = [whole] * len(path) if name == "gspo_token" else token
    return [a * r for a, r in zip(advantage, ratio, strict=True)]


@pytest.mark.slow_beyond(32)
@every_world
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "gmpo"])
def test_on_the_policy_s_own_draws_every_loss_climbs_the_exact_gradient(name: str, world: World) -> None:
    """GSPO shares a sequence's advantage among its tokens; with one per sequence that changes nothing."""
    batch = world.batch(1)
    mean_PV = world.mean(batch, LOSSES[name][0](batch, batch.spread(batch.reward_B)))
    close_fp64(mean_PV, exact_gradient(TREE, world.policy_PV, world.final_PV))


@every_world
def test_on_the_policy_s_own_draws_gmpo_climbs_the_reward_per_token(world: World) -> None:
    """Its loss stands at every token; weighted by 1 / length it counts once and is divided by it."""
    batch = world.batch(1)
    loss_T = LOSSES["gmpo"][0](batch, batch.spread(batch.reward_B))
    mean_PV = world.mean(batch, loss_T, 1 / batch.spread(batch.length_B.double()))
    lengths_N = np.array([len(sequence) for sequence in TREE.sequences])
    per_token_PV = TREE.at_the_end(world.reward_N / lengths_N)
    close_fp64(mean_PV, exact_gradient(TREE, world.policy_PV, per_token_PV))


@every_stale_world
def test_without_bounds_token_ratios_climb_the_policy_where_the_sampler_goes(world: World) -> None:
    """sum_p d_mu(p) sum_a pi(a | p) q_mu(p, a) grad log pi: the surrogate of Kakade and Langford 2002."""
    batch = world.batch(1)
    gain_T = torch.from_numpy(np.concatenate([discounted(path, 1.0) for path in paths(world)]))
    mu_value_P = prefix_values(TREE, world.sampler_PV, world.reward_PV)
    visits_P = visits(world).sum(axis=1, keepdims=True)
    expected_PV = climb(world, quality(world, mu_value_P, 1.0), visits_P * world.policy_PV)
    for unbounded in (
        partial(losses.ppo_clip, **EVERYTHING),
        partial(losses.cispo, **EVERYTHING),
        partial(losses.dppo_tv, low=1.0, high=1.0, cap=1e9),
        partial(losses.dppo_kl, low=1e9, high=1e9, cap=1e9),
    ):
        loss_T = unbounded(batch.policy_T, batch.sampler_T, gain_T)
        close_fp64(world.mean(batch, loss_T), expected_PV)
    exact_PV = exact_gradient(TREE, world.policy_PV, world.reward_PV)
    assert np.abs(expected_PV - exact_PV).max() > 0.02


def covariances(drawn: list[Path]) -> list[list[float]]:
    """(A - mean A)(log pi - mean log pi) over the tokens of the batch."""
    advantage = [a for path in drawn for a in path.rewards]
    logprob = [p for path in drawn for p in path.policy]
    mean, middle = sum(advantage) / len(advantage), sum(logprob) / len(logprob)
    return [
        [(a - mean) * (p - middle) for a, p in zip(path.rewards, path.policy, strict=True)] for path in drawn
    ]


@pytest.mark.slow_beyond(2)
@every_stale_world
def test_clip_cov_leaves_out_tokens_of_middling_covariance_and_keeps_the_rest(world: World) -> None:
    """With a fraction of 1 every candidate is drawn, so nothing is left to chance."""
    batch = world.batch(2)

    def ours(one: Batch) -> Tensor:
        setting = {"low": LOW, "high": HIGH}
        loss_T = losses.ppo_clip(one.policy_T, one.sampler_T, one.reward_T, **setting)
        selected_T = losses.clip_cov_selection(
            losses.covariance(one.policy_T, one.reward_T),
            losses.clipped(one.policy_T.detach(), one.sampler_T, one.reward_T, **setting),
            fraction=1.0,
            low=0.1,
            high=0.6,
            generator=torch.Generator().manual_seed(0),
        )
        return loss_T * ~selected_T

    def twin(drawn: list[Path]) -> list[list[float]]:
        slopes = [each(ppo)(path, path.rewards) for path in drawn]
        return [
            [0.0 if 0.1 < c < 0.6 else slope for c, slope in zip(row, slope_row, strict=True)]
            for row, slope_row in zip(covariances(drawn), slopes, strict=True)
        ]

    close_to_twin(world, batch, world.gradients(batch, batch.one_by_one(ours)), twin)


@pytest.mark.slow_beyond(2)
@every_stale_world
def test_kl_cov_pulls_the_tokens_of_largest_covariance_back(world: World) -> None:
    batch = world.batch(2)

    def ours(one: Batch) -> Tensor:
        selected_T = losses.kl_cov_selection(losses.covariance(one.policy_T, one.reward_T), fraction=0.4)
        return losses.kl_cov(one.policy_T, one.sampler_T, one.reward_T, selected_T, coefficient=0.3)

    def twin(drawn: list[Path]) -> list[list[float]]:
        every = covariances(drawn)
        places = [(-c, i, t) for i, row in enumerate(every) for t, c in enumerate(row)]
        top = {place[1:] for place in sorted(places)[: max(1, int(0.4 * len(places)))]}
        return [
            [
                a * math.exp(p - q) - 0.3 * ((i, t) in top) * math.copysign(1, p - q)
                for t, (a, p, q) in enumerate(zip(path.rewards, path.policy, path.sampler, strict=True))
            ]
            for i, path in enumerate(drawn)
        ]

    close_to_twin(world, batch, world.gradients(batch, batch.one_by_one(ours)), twin)
