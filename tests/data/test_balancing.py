"""Segments dealt to ranks: even work, and samples of one prompt together."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.algorithms.weights import token_mean
from millrace.data.balancing import SLACK, deal
from millrace.data.batch import Batch
from millrace.data.packing import pack_demonstrations
from millrace.data.shared_prefix import common_beginnings
from tests.close import close_fp64


def load(held: list[int], work: list[float], saved: list[float], group: list[int]) -> float:
    """What one rank has to do: everything, less what the second and later ones of a group save."""
    seen: set[int] = set()
    total = 0.0
    for b in held:
        total += work[b] - (saved[b] if group[b] in seen else 0.0)
        seen.add(group[b])
    return total


def long_tailed(seed: int, num_groups: int, size: int) -> tuple[list[float], list[float], list[int]]:
    """Groups of samples that begin alike, the lengths of what follows of a long tail."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_groups), size)
    saved = rng.uniform(50, 300, num_groups)[group]
    work = saved + 150 * np.exp(0.8 * rng.standard_normal(num_groups * size))
    return work.tolist(), saved.tolist(), group.tolist()


CASES = [(2, 16), (4, 16), (4, 4), (8, 64), (5, 6), (4, 2), (3, 1)]


@pytest.mark.slow_beyond(21)
@pytest.mark.parametrize(("world", "num_groups"), CASES)
@pytest.mark.parametrize("seed", range(10))
def test_every_segment_is_dealt_once_and_no_rank_has_more_than_one_by_one(seed, world, num_groups):
    work, saved, group = long_tailed(seed, num_groups, 8)
    dealt = deal(work, saved, group, world)
    assert sorted(b for held in dealt for b in held) == list(range(len(work)))
    assert all(held == sorted(held) for held in dealt)
    loads = [load(held, work, saved, group) for held in dealt]
    apart: list[list[int]] = [[] for _ in range(world)]
    for b in sorted(range(len(work)), key=lambda b: -work[b]):
        min(apart, key=lambda held: load([*held, b], work, saved, group)).append(b)
    assert max(loads) <= max(load(held, work, saved, group) for held in apart) + 1e-9
    # A rank that got a segment by itself had the least; one that got a group whole kept to the limit.
    even = sum(loads) / world
    assert max(loads) <= max((1 + SLACK) * even, even + max(work))


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(10))
def test_the_unit_of_work_does_not_matter(seed):
    work, saved, group = long_tailed(seed, 12, 4)
    small = deal([x / 4096 for x in work], [x / 4096 for x in saved], group, 3)
    assert small == deal(work, saved, group, 3)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize(("world", "num_groups"), CASES[:4])
def test_the_fullest_rank_has_little_more_than_if_no_group_were_apart(world, num_groups):
    together, apart = [], []
    for seed in range(10):
        work, saved, group = long_tailed(seed, num_groups, 8)
        least = load(list(range(len(work))), work, saved, group) / world
        ours = deal(work, saved, group, world)
        plain = deal(work, [0.0] * len(work), range(len(work)), world)
        for found, dealt in ((together, ours), (apart, plain)):
            found.append(max(load(held, work, saved, group) for held in dealt) / least)
    assert np.mean(together) < (1.15 if num_groups == world else 1.06)
    assert np.mean(apart) > 1.1


def test_what_fits_goes_whole_and_the_rest_one_by_one_to_who_then_has_the_least():
    # Two groups of 5 + 1 + 1 and one of 5 + 1: the even share of two ranks is 10, so the last does not fit.
    work, group = [5.0] * 8, [0, 0, 0, 1, 1, 1, 2, 2]
    # 7 and 7, then 12 and 7; its other segment makes that 13 beside the first, or 12 on the other rank.
    assert deal(work, [4.0] * 8, group, 2) == [[0, 1, 2, 6], [3, 4, 5, 7]]
    # Where nothing is saved, both ways give 20 and 20: one by one it is.
    assert deal(work, [0.0] * 8, group, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_group_that_just_keeps_to_the_limit_goes_whole():
    # 18 + 3, 10 and 9: of 40, the even share is 20 and the limit 21. In parts, the first would make it 28.
    assert deal([18.0, 18.0, 10.0, 9.0], [15.0, 15.0, 0.0, 0.0], [0, 0, 1, 2], 2) == [[0, 1], [2, 3]]
    assert SLACK == 0.05


def test_a_group_that_is_more_than_an_even_share_is_split():
    assert deal([10.0] * 4, [9.0] * 4, [0] * 4, 2) == [[0, 2], [1, 3]]
    # 10 + 9 + 9 + 9 and 3, of which 20 is even: two and two, and the small one beside either.
    work, saved, group = [10.0, 10.0, 10.0, 10.0, 3.0], [1.0] * 5, [0, 0, 0, 0, 1]
    dealt = deal(work, saved, group, 2)
    close_fp64([load(held, work, saved, group) for held in dealt], [22.0, 19.0])


def batch_of_groups(seed: int, num_groups: int, size: int) -> Batch:
    """Packed samples of prompts, as `pack` lays them."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(num_groups):
        prompt = rng.integers(1, 1000, rng.integers(20, 60)).tolist()
        pairs += [(prompt, rng.integers(1, 1000, rng.integers(5, 60)).tolist()) for _ in range(size)]
    return pack_demonstrations(pairs, token_mean)


def computed(batch: Batch, segments: list[int]) -> int:
    """Tokens that a rank computes of its segments in one row."""
    own = batch.select(segments)
    shared = common_beginnings(own.token_T, own.length_B)
    return own.num_tokens if shared is None else len(shared.kept_S)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("world", [2, 4])
def test_sharing_survives_on_many_ranks(world: int) -> None:
    for seed in range(5):
        batch = batch_of_groups(seed, 16, 8)
        alone = computed(batch, list(range(batch.num_segments)))
        tokens = [computed(batch, held) for held in batch.deal(world, even_tokens=500.0, sharing=True)]
        plain = [computed(batch, held) for held in batch.deal(world, even_tokens=500.0)]
        assert sum(tokens) < 1.05 * alone < sum(plain)
        assert max(tokens) < 0.9 * max(plain)
