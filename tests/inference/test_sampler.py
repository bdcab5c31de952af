from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.inference.sampler import Rows, draw, uniform
from millrace.types import SamplingParams
from tests.close import close_fp32, close_fp64

CPU = torch.device("cpu")
SHARES = [0.4, 0.3, 0.15, 0.1, 0.05]
# Exceeded once in a thousand samplings, by number of outcomes less one.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 99: 148.23}


def draw_many(shares: list[float], num: int = 20_000, **params: Any) -> tuple[Tensor, Tensor]:
    """One token for each seed from 0 to num - 1."""
    rows = Rows.of([SamplingParams(seed=seed, **params) for seed in range(num)], CPU)
    return draw(torch.tensor(shares).log().expand(num, -1), rows, np.zeros(num, dtype=np.int64))


def chi_square(counts: list[int], shares: list[float]) -> float:
    expected = [share * sum(counts) / sum(shares) for share in shares]
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, SHARES),
        ({"top_k": 3}, SHARES[:3]),
        ({"top_p": 0.8}, SHARES[:3]),
        ({"top_p": 0.69}, SHARES[:2]),
        ({"top_k": 2, "top_p": 0.9}, SHARES[:2]),
        ({"temperature": 0.5}, [share**2 for share in SHARES]),
        ({"temperature": 2.0, "top_k": 4}, [share**0.5 for share in SHARES[:4]]),
    ],
    ids=str,
)
def test_tokens_are_as_frequent_as_the_distribution_says(params: dict[str, Any], kept: list[float]) -> None:
    counts = torch.bincount(draw_many(SHARES, **params)[0], minlength=5).tolist()
    assert sum(counts) == 20_000 and sum(counts[len(kept) :]) == 0
    assert chi_square(counts[: len(kept)], kept) < CHI_SQUARE[len(kept) - 1]


def test_tokens_of_one_seed_at_many_positions_follow_the_distribution() -> None:
    rows = Rows.of([SamplingParams(seed=11)] * 20_000, CPU)
    tokens, _ = draw(torch.tensor(SHARES).log().expand(20_000, -1), rows, np.arange(20_000))
    assert chi_square(torch.bincount(tokens, minlength=5).tolist(), SHARES) < CHI_SQUARE[4]


def support(shares: list[float], **params: Any) -> set[int]:
    return set(draw_many(shares, num=500, **params)[0].tolist())


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    assert support([0.5, 0.25, 0.25], top_p=0.5) == {0}
    assert support([0.5, 0.25, 0.25], top_p=0.501) == {0, 1}
    assert support([0.5, 0.25, 0.25], top_p=0.751) == {0, 1, 2}
    assert support([0.1, 0.2, 0.7], top_p=1e-6) == {2}


def test_top_p_is_taken_of_what_top_k_left() -> None:
    # Of 0.5 and 0.25 the first holds two thirds.
    assert support([0.5, 0.25, 0.25], top_k=2, top_p=0.66) == {0}
    assert support([0.5, 0.25, 0.25], top_k=2, top_p=0.67) == {0, 1}


def test_of_equals_top_k_takes_lower_ids() -> None:
    assert support([0.25] * 4, top_k=2) == {0, 1}
    assert support([0.25] * 4, top_k=9) == {0, 1, 2, 3}
    assert support([0.2, 0.5, 0.3], top_k=1) == {1}


def test_a_token_without_mass_is_never_drawn() -> None:
    assert support([0.0, 0.5, 0.0, 0.5, 0.0]) == {1, 3}


def test_temperature_0_takes_the_likeliest_token() -> None:
    tokens, logprobs = draw_many([0.2, 0.7, 0.1], num=50, temperature=0.0)
    assert set(tokens.tolist()) == {1}
    close_fp32(logprobs, torch.full((50,), 0.7).log())


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.6}])
def test_logprobs_are_those_of_the_whole_distribution(params: dict[str, Any]) -> None:
    tokens, logprobs = draw_many(SHARES, num=200, **params)
    close_fp32(logprobs, torch.tensor(SHARES)[tokens].log())


def test_logprobs_are_those_at_the_temperature() -> None:
    tokens, logprobs = draw_many(SHARES, num=200, temperature=0.5, top_k=3)
    squares = torch.tensor(SHARES).square()
    close_fp32(logprobs, (squares / squares.sum())[tokens].log())


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=2),
        SamplingParams(seed=3, temperature=0.0),
        SamplingParams(seed=4, top_p=0.5, temperature=0.3),
    ]
    logit_BV = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    position_B = np.array([3, 0, 7, 1])
    together = draw(logit_BV, Rows.of(params, CPU), position_B)
    for b in range(4):
        alone = draw(logit_BV[b : b + 1], Rows.of(params[b : b + 1], CPU), position_B[b : b + 1])
        assert int(alone[0]) == int(together[0][b]) and float(alone[1]) == float(together[1][b])
    order = torch.tensor([2, 0, 3])
    taken = draw(logit_BV[order], Rows.of(params, CPU).take(order), position_B[order.numpy()])
    assert torch.equal(taken[0], together[0][order])


def splitmix64(state: int, num: int) -> int:
    """The last of `num` outputs of the reference generator, in plain integers."""
    mask = 2**64 - 1
    x = (state + num * 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def test_uniform_is_the_published_generator_started_from_the_mixed_seed() -> None:
    # The first outputs for seed 1234567, as published with the generator.
    assert [splitmix64(1234567, num) for num in (1, 2)] == [6457827717110365317, 3203168211198807973]
    seeds, positions = [0, 1, 1234567, 2**64 - 1], [0, 1, 5, 10**6]
    expected = [
        (splitmix64(splitmix64(seed, 1), position + 1) >> 11) / 2**53
        for seed, position in zip(seeds, positions, strict=True)
    ]
    close_fp64(uniform(np.array(seeds, dtype=np.uint64), np.array(positions)), expected, rtol=0, atol=0)


def test_seeds_of_any_size_and_sign_are_taken() -> None:
    rows = Rows.of([SamplingParams(seed=seed) for seed in (-1, 2**64 - 1, 2**64 + 5, 5)], CPU)
    assert rows.seed_B[0] == rows.seed_B[1] and rows.seed_B[2] == rows.seed_B[3]


@pytest.fixture(scope="module")
def grid() -> np.ndarray:
    """Uniform numbers of 300 neighbouring seeds at 300 positions."""
    seed, position = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300), indexing="ij")
    return uniform(seed.ravel(), position.ravel()).reshape(300, 300)


def test_uniform_numbers_are_uniform_and_distinct(grid: np.ndarray) -> None:
    assert grid.min() >= 0 and grid.max() < 1 and len(np.unique(grid)) == grid.size
    counts = np.histogram(grid, bins=100, range=(0, 1))[0].tolist()
    assert chi_square(counts, [0.01] * 100) < CHI_SQUARE[99]


@pytest.mark.parametrize(
    ("seeds", "positions"), [(1, 0), (0, 1), (1, 1), (1, -1), (2, 0), (0, 2), (64, 0), (0, 64)]
)
def test_neighbouring_seeds_and_positions_do_not_correlate(
    grid: np.ndarray, seeds: int, positions: int
) -> None:
    one = grid[: 300 - seeds, max(0, -positions) : 300 - max(0, positions)]
    other = grid[seeds:, max(0, positions) : 300 + min(0, positions)]
    assert one.shape == other.shape
    correlation = float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
    assert abs(correlation) < 4 / one.size**0.5
