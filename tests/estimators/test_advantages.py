"""Every advantage estimator on the token MDP: its mean and its variance against its definition."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from millrace.algorithms import advantages
from millrace.algorithms.losses import reinforce
from millrace.algorithms.masked import whiten
from tests.estimators.world import (
    Batch,
    Path,
    Twin,
    World,
    close_to_twin,
    per_sequence,
    whitened,
)

WORLDS = [World(seed, fresh=True) for seed in range(3)]
every_world = pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"seed {world.seed}")


def of_group(function: Callable[..., Tensor]) -> Callable[[Batch], Tensor]:
    return lambda batch: batch.spread(function(batch.reward_B, *batch.groups))


# What each group estimator computes, in plain words.


def others(drawn: list[Path], i: int) -> list[float]:
    return [path.reward for j, path in enumerate(drawn) if j != i]


def rewards(drawn: list[Path]) -> list[float]:
    return [path.reward for path in drawn]


def centred(drawn: list[Path]) -> list[float]:
    return [path.reward - statistics.fmean(rewards(drawn)) for path in drawn]


def normalised(drawn: list[Path]) -> list[float]:
    return [one / (statistics.stdev(rewards(drawn)) + 1e-6) for one in centred(drawn)]


def left_out(drawn: list[Path]) -> list[float]:
    return [path.reward - statistics.fmean(others(drawn, i)) for i, path in enumerate(drawn)]


def left_out_normalised(drawn: list[Path]) -> list[float]:
    found = []
    for i, one in enumerate(left_out(drawn)):
        rest = others(drawn, i)
        spread = statistics.stdev(rest) if len(rest) > 1 else 0.0
        found.append(one / (spread + 1e-6) if spread > 0 else one)
    return found


def length_weighted(drawn: list[Path]) -> list[float]:
    tokens = sum(len(path) for path in drawn)
    baseline = sum(len(path) * path.reward for path in drawn) / tokens
    return [path.reward - baseline for path in drawn]


def best_only(drawn: list[Path], *, divide: bool) -> list[float]:
    best, second = sorted(rewards(drawn), reverse=True)[:2]
    scale = statistics.stdev(rewards(drawn)) + 1e-6 if divide else 1.0
    return [(best - second) / scale if path.reward == best > second else 0.0 for path in drawn]


def gpg(drawn: list[Path]) -> list[float]:
    scale = len(drawn) / max(sum(path.reward != 0 for path in drawn), 1)
    return [scale * one for one in centred(drawn)]


def baseline_of_tokens(drawn: list[Path]) -> list[list[float]]:
    found = []
    for path in drawn:
        row = []
        for t in range(len(path)):
            here = [(sum(one.energy[: t + 1]), one.reward) for one in drawn if len(one) > t]
            baseline = sum(w * r for w, r in here) / (sum(w for w, _ in here) + 1e-8)
            row.append(path.reward - (baseline if len(here) > 1 else 0.0))
        found.append(row)
    return found


GROUPS: dict[str, tuple[Callable[[Batch], Tensor], Twin]] = {
    "group_centred": (of_group(advantages.group_centred), per_sequence(centred)),
    "group_normalised": (of_group(advantages.group_normalised), per_sequence(normalised)),
    "leave_one_out": (of_group(advantages.leave_one_out), per_sequence(left_out)),
    "leave_one_out_normalised": (
        of_group(advantages.leave_one_out_normalised),
        per_sequence(left_out_normalised),
    ),
    "length_weighted_centred": (
        lambda batch: batch.spread(
            advantages.length_weighted_centred(batch.reward_B, batch.length_B, *batch.groups)
        ),
        per_sequence(length_weighted),
    ),
    "pass_at_k": (of_group(advantages.pass_at_k), per_sequence(partial(best_only, divide=True))),
    "pass_at_k, undivided": (
        of_group(partial(advantages.pass_at_k, divide_by_std=False)),
        per_sequence(partial(best_only, divide=False)),
    ),
    "optimal_token_baseline": (
        lambda batch: advantages.optimal_token_baseline(
            batch.spread(batch.reward_B),
            batch.policy_T.detach(),
            batch.square_T,
            batch.position_T,
            batch.segment_T,
            batch.group_B,
        ),
        baseline_of_tokens,
    ),
}


@pytest.mark.slow_beyond(4)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", GROUPS)
def test_mean_and_variance_of_group_estimators_are_those_of_their_definition(name: str, size: int) -> None:
    ours, twin = GROUPS[name]
    world = WORLDS[0]
    batch = world.batch(size)
    close_to_twin(world, batch, world.gradients(batch, reinforce(batch.policy_T, ours(batch))), twin)


def two_rewards(batch: Batch) -> Tensor:
    """The reward of the sequence and its length."""
    return torch.stack([batch.reward_B, batch.length_B.double()])


def decoupled(drawn: list[Path]) -> list[float]:
    lengths = [float(len(path)) for path in drawn]
    mean, spread = statistics.fmean(lengths), statistics.stdev(lengths) + 1e-6
    return [
        0.7 * one - 0.2 * (length - mean) / spread
        for one, length in zip(normalised(drawn), lengths, strict=True)
    ]


def discounted(path: Path, gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * path.rewards[k] for k in range(t, len(path))) for t in range(len(path))]


BATCHES: dict[str, tuple[Callable[[Batch], Tensor], Twin]] = {
    "gpg": (
        lambda batch: batch.spread(advantages.gpg(batch.reward_B, batch.group_B, 1)),
        per_sequence(gpg),
    ),
    "group_decoupled, whitened": (
        lambda batch: whiten(
            batch.spread(
                advantages.group_decoupled(
                    two_rewards(batch),
                    batch.group_B,
                    1,
                    weight_K=torch.tensor([0.7, -0.2], dtype=torch.float64),
                )
            )
        ),
        lambda drawn: whitened(per_sequence(decoupled)(drawn)),
    ),
    "reinforce_plus_plus": (
        lambda batch: advantages.reinforce_plus_plus(batch.reward_T, batch.length_B, gamma=0.9),
        lambda drawn: whitened([discounted(path, 0.9) for path in drawn]),
    ),
    "reinforce_plus_plus_baseline": (
        lambda batch: advantages.reinforce_plus_plus_baseline(
            batch.reward_B, batch.group_B, 1, batch.length_B
        ),
        lambda drawn: whitened(per_sequence(centred)(drawn)),
    ),
}


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", BATCHES)
def test_mean_and_variance_of_batch_estimators_are_those_of_their_definition(name: str) -> None:
    ours, twin = BATCHES[name]
    world = WORLDS[1]
    batch = world.batch(2)
    loss_T = reinforce(batch.policy_T, batch.one_by_one(ours))
    # Whitening numbers that are all but equal enlarges their rounding by 1e4.
    close_to_twin(world, batch, world.gradients(batch, loss_T), twin, rtol=1e-7)
