from __future__ import annotations

import numpy as np
import pytest

from millrace.inference.sampler import uniform

# Exceeded once in a thousand samplings of 100 equally likely outcomes.
CHI_SQUARE = 148.23


@pytest.fixture(scope="module")
def grid() -> np.ndarray:
    """Uniform numbers of 300 neighbouring seeds at 300 positions."""
    seed, position = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300), indexing="ij")
    return uniform(seed.ravel(), position.ravel()).reshape(300, 300)


def test_uniform_numbers_are_uniform_and_distinct(grid: np.ndarray) -> None:
    assert grid.min() >= 0 and grid.max() < 1 and len(np.unique(grid)) == grid.size
    counts = np.histogram(grid, bins=100, range=(0, 1))[0].tolist()
    assert sum((n - 900) ** 2 / 900 for n in counts) < CHI_SQUARE


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
