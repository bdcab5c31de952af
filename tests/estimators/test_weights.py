"""Token weights and importance weights on the token MDP: what they do to the expected gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.algorithms import ratios, weights
from millrace.algorithms.advantages import leave_one_out
from millrace.algorithms.losses import ppo_clip, reinforce
from millrace.algorithms.ratios import importance_weights
from millrace.foundations.enumerate import exact_gradient
from tests.close import close_fp64
from tests.estimators.test_advantages import left_out
from tests.estimators.test_returns import climb, every_stale_world, every_world, visits
from tests.estimators.world import TREE, Batch, Path, World, close_to_twin, per_sequence

# Shares are float32.
TOKEN_WEIGHTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[list[Path], Path], float]]] = {
    "token_mean": (weights.token_mean, lambda drawn, path: 1 / sum(map(len, drawn))),
    "token_sum": (weights.token_sum, lambda drawn, path: 1.0),
    "sequence_mean": (weights.sequence_mean, lambda drawn, path: 1 / (len(drawn) * len(path))),
    "sequence_sum": (weights.sequence_sum, lambda drawn, path: 1 / len(drawn)),
    "fixed_length": (
        partial(weights.fixed_length, length=5),
        lambda drawn, path: 1 / (len(drawn) * 5),
    ),
}
BETWEEN = (0.8, 1.4)  # bounds of weights


def shared(batch: Batch, share: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return batch.one_by_one(lambda one: share(torch.ones_like(one.segment_T).bool(), one.segment_T)).double()


def exact(world: World) -> np.ndarray:
    return exact_gradient(TREE, world.policy_PV, world.final_PV)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("name", TOKEN_WEIGHTS)
def test_mean_and_variance_of_each_share_are_those_of_its_definition(name: str) -> None:
    ours, twin = TOKEN_WEIGHTS[name]
    world = World(1, fresh=True)
    batch = world.batch(2)
    loss_T = reinforce(batch.policy_T, batch.spread(leave_one_out(batch.reward_B, *batch.groups)))
    found_DPV = world.gradients(batch, loss_T, shared(batch, ours))

    def worth(drawn: list[Path]) -> list[float]:
        return [
            2 * twin(drawn, path) * one for path, one in zip(drawn, left_out(drawn), strict=True)
        ]  # the twin's gradient divides by the size

    close_to_twin(world, batch, found_DPV, per_sequence(worth), rtol=1e-6)


@pytest.mark.slow_beyond(1)
@every_world
def test_shares_by_constants_keep_the_direction_and_shares_by_length_do_not(world: World) -> None:
    batch = world.batch(2)
    loss_T = reinforce(batch.policy_T, batch.spread(leave_one_out(batch.reward_B, *batch.groups)))
    mean = {name: world.mean(batch, loss_T, shared(batch, ours)) for name, (ours, _) in TOKEN_WEIGHTS.items()}
    for name, factor in (("sequence_sum", 1.0), ("token_sum", 2.0), ("fixed_length", 0.2)):
        close_fp64(mean[name], factor * exact(world), rtol=1e-6, atol=1e-7)
    for name in ("token_mean", "sequence_mean"):
        cosine = (mean[name] * exact(world)).sum() / math.sqrt(
            (mean[name] ** 2).sum() * (exact(world) ** 2).sum()
        )
        assert 0.5 < cosine < 0.9995


@every_world
def test_sequence_mean_climbs_the_reward_per_token_of_fixed_lengths(world: World) -> None:
    """E[r / l grad log p]: the gradient of the reward divided by the length, as if that were no choice."""
    batch = world.batch(1)
    loss_T = reinforce(batch.policy_T, batch.spread(batch.reward_B))
    lengths_N = np.array([len(sequence) for sequence in TREE.sequences])
    expected_PV = exact_gradient(TREE, world.policy_PV, TREE.at_the_end(world.reward_N / lengths_N))
    close_fp64(
        world.mean(batch, loss_T, shared(batch, weights.sequence_mean)), expected_PV, rtol=1e-6, atol=1e-7
    )


def weigh(batch: Batch, level: ratios.Level) -> Tensor:
    log_ratio_T = (batch.policy_T - batch.sampler_T).detach()
    return importance_weights(log_ratio_T, batch.segment_T, batch.num_segments, level=level)


def weighted_mean(world: World, weight: Callable[[Batch], Tensor]) -> np.ndarray:
    batch = world.batch(1)
    return world.mean(batch, weight(batch) * reinforce(batch.policy_T, batch.spread(batch.reward_B)))


def corrected(world: World, worth: Callable[[float], float]) -> np.ndarray:
    """sum over sequences of mu(y) worth(pi(y) / mu(y)) r(y) grad log pi(y), [P, V]."""
    pi_N, mu_N = (
        np.array([chance for _, chance in TREE.walk(table)]) for table in (world.policy_PV, world.sampler_PV)
    )
    share_N = np.array([worth(pi / mu) * mu / pi for pi, mu in zip(pi_N, mu_N, strict=True)])
    return exact_gradient(TREE, world.policy_PV, TREE.at_the_end(world.reward_N * share_N))


@every_stale_world
def test_weights_of_whole_sequences_make_other_weights_draws_unbiased(world: World) -> None:
    found_PV = weighted_mean(world, lambda batch: weigh(batch, "sequence"))
    close_fp64(found_PV, exact(world))
    uncorrected_PV = weighted_mean(world, lambda batch: torch.ones_like(batch.policy_T).detach())
    close_fp64(uncorrected_PV, corrected(world, lambda ratio: 1.0))
    assert np.abs(uncorrected_PV - exact(world)).max() > 0.02


LIMITED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], float]]] = {
    "truncate": (partial(ratios.truncate, high=BETWEEN[1]), lambda ratio: min(ratio, BETWEEN[1])),
    "icepop": (
        partial(ratios.icepop, low=BETWEEN[0], high=BETWEEN[1]),
        lambda ratio: ratio if BETWEEN[0] <= ratio <= BETWEEN[1] else 0.0,
    ),
}


@every_stale_world
@pytest.mark.parametrize("name", LIMITED)
def test_limited_weights_lose_exactly_what_lies_beyond_their_bounds(name: str, world: World) -> None:
    ours, twin = LIMITED[name]
    found_PV = weighted_mean(world, lambda batch: ours(weigh(batch, "sequence")))
    close_fp64(found_PV, corrected(world, twin))
    assert np.abs(found_PV - exact(world)).max() > 0.01


REJECTIONS: dict[str, tuple[Callable[..., Tensor], Callable[[float], bool]]] = {
    "sum of k1": (
        partial(ratios.rejection, estimator="k1", level="sum", low=0.7, high=1.6),
        lambda ratio: 0.7 <= 1 / ratio <= 1.6,
    ),
    "sum of k1, one bound": (
        partial(ratios.rejection, estimator="k1", level="sum", low=None, high=1.5),
        lambda ratio: 1 / 1.5 <= 1 / ratio <= 1.5,
    ),
}


@every_stale_world
@pytest.mark.parametrize("name", REJECTIONS)
def test_rejected_sequences_are_missing_from_the_mean_and_nothing_else_is(name: str, world: World) -> None:
    ours, keeps = REJECTIONS[name]

    def weight(batch: Batch) -> Tensor:
        log_ratio_T = (batch.policy_T - batch.sampler_T).detach()
        return weigh(batch, "sequence") * ours(log_ratio_T, batch.segment_T, batch.num_segments)

    close_fp64(weighted_mean(world, weight), corrected(world, lambda ratio: ratio * keeps(ratio)))


@pytest.mark.slow_beyond(13)
@every_stale_world
@pytest.mark.parametrize(
    ("estimator", "level"),
    [
        (estimator, level)
        for estimator in ("k1", "k2", "k3")
        for level in ("token", "sum", "mean", "max")
        if (estimator, level) != ("k1", "max")  # refused
    ],
)
def test_each_rejection_keeps_what_its_definition_keeps(estimator: str, level: str, world: World) -> None:
    high = 1.3 if estimator == "k1" else 0.06
    measure = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[estimator]

    def keep(path: Path) -> list[float]:
        each = [measure(p - q) for p, q in zip(path.policy, path.sampler, strict=True)]
        numbers = {
            "token": each,
            "sum": [sum(each)] * len(path),
            "mean": [sum(each) / len(path)] * len(path),
            "max": [max(each)] * len(path),
        }[level]
        kept = [1 / high <= math.exp(one) <= high if estimator == "k1" else one <= high for one in numbers]
        return [path.reward * one for one in kept]

    batch = world.batch(1)
    log_ratio_T = (batch.policy_T - batch.sampler_T).detach()
    kept_T = ratios.rejection(
        log_ratio_T,
        batch.segment_T,
        batch.num_segments,
        estimator=estimator,
        level=level,
        low=None,
        high=high,
    )
    assert 0 < kept_T.sum() < len(kept_T)
    found_DPV = world.gradients(batch, kept_T * reinforce(batch.policy_T, batch.spread(batch.reward_B)))
    close_to_twin(world, batch, found_DPV, lambda drawn: [keep(path) for path in drawn])


@every_stale_world
def test_weights_of_tokens_and_geometric_means_are_biased_as_their_definition_says(world: World) -> None:
    batch = world.batch(1)
    twins: dict[ratios.Level, Callable[[Path], list[float]]] = {
        "token": lambda path: [
            path.reward * math.exp(p - q) for p, q in zip(path.policy, path.sampler, strict=True)
        ],
        "geometric": lambda path: [path.reward * path.ratio ** (1 / len(path))] * len(path),
    }
    for level, twin in twins.items():
        loss_T = weigh(batch, level) * reinforce(batch.policy_T, batch.spread(batch.reward_B))
        found_DPV = world.gradients(batch, loss_T)
        close_to_twin(world, batch, found_DPV, lambda drawn, twin=twin: [twin(path) for path in drawn])
        assert np.abs(batch.every.mean(found_DPV) - exact(world)).max() > 0.01


@pytest.mark.slow_beyond(3)
@every_stale_world
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_are_divided_by_the_mean_of_their_batch(level: ratios.Level, world: World) -> None:
    batch = world.batch(2)

    def ours(one: Batch) -> Tensor:
        weight_T = weigh(one, level)
        return ratios.divide_by_mean(weight_T, one.segment_T, one.size, level=level)

    def twin(drawn: list[Path]) -> list[list[float]]:
        if level == "sequence":
            each = [[path.ratio] * len(path) for path in drawn]
            mean = sum(path.ratio for path in drawn) / len(drawn)
        else:
            each = [
                [math.exp(p - q) for p, q in zip(path.policy, path.sampler, strict=True)] for path in drawn
            ]
            mean = sum(map(sum, each)) / sum(map(len, each))
        return [[path.reward * w / mean for w in row] for path, row in zip(drawn, each, strict=True)]

    loss_T = batch.one_by_one(ours) * reinforce(batch.policy_T, batch.spread(batch.reward_B))
    close_to_twin(world, batch, world.gradients(batch, loss_T), twin)


@every_stale_world
def test_the_mean_weight_is_1_and_its_spread_is_chi_square(world: World) -> None:
    batch = world.batch(1)
    sequence_D = weigh(batch, "sequence").numpy()[np.r_[0, batch.length_B.cumsum(0)[:-1]]]
    pi_N, mu_N = (
        np.array([chance for _, chance in TREE.walk(table)]) for table in (world.policy_PV, world.sampler_PV)
    )
    close_fp64(batch.every.mean(sequence_D), 1)
    close_fp64(batch.every.mean(sequence_D**2), (pi_N**2 / mu_N).sum())


@pytest.mark.parametrize("lag", [1, 2, 5])
@every_stale_world
def test_the_decoupled_form_without_bounds_does_not_depend_on_the_proximal_weights(
    world: World, lag: int
) -> None:
    """pi / prox times prox / mu is pi / mu; with lag 1 the proximal policy is the sampler: no change."""
    batch = world.batch(1)
    proximal_T = ratios.interpolated_proximal(
        batch.policy_T, batch.sampler_T, torch.full_like(batch.segment_T, 7 - lag), version=7
    )
    behaviour_T = importance_weights(
        proximal_T - batch.sampler_T, batch.segment_T, batch.num_segments, level="token"
    )
    advantage_T = batch.reward_T

    def decoupled(low: float, high: float) -> np.ndarray:
        loss_T = ppo_clip(batch.policy_T, proximal_T, advantage_T, low=low, high=high)
        return world.mean(batch, behaviour_T * loss_T)

    visits_P = visits(world).sum(axis=1, keepdims=True)
    surrogate_PV = climb(world, world.reward_PV, visits_P * world.policy_PV)
    close_fp64(decoupled(1 - 1e-9, 1e9), surrogate_PV)
    plain_T = ppo_clip(batch.policy_T, batch.sampler_T, advantage_T, low=0.2, high=0.28)
    difference = np.abs(decoupled(0.2, 0.28) - world.mean(batch, plain_T)).max()
    assert difference < 1e-12 if lag == 1 else difference > 1e-3


@every_stale_world
def test_an_interpolated_proximal_policy_stands_where_its_age_says(world: World) -> None:
    batch = world.batch(1)
    version_T = batch.segment_T % 4 + 4  # lags 3, 2, 1, 0 of version 7
    proximal_T = ratios.interpolated_proximal(batch.policy_T, batch.sampler_T, version_T, version=7)
    share = {4: 2 / 3, 5: 1 / 2, 6: 0.0, 7: 0.0}
    expected = [
        q + share[version] * (p - q)
        for p, q, version in zip(
            batch.policy_T.tolist(), batch.sampler_T.tolist(), version_T.tolist(), strict=True
        )
    ]
    close_fp64(proximal_T, expected)
    assert not proximal_T.requires_grad
