from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from millrace.inference.block_manager import BlockManager
from millrace.inference.prefix_cache import PrefixCache, root
from tests.inference.invariants import check_blocks, check_cache

SIZE = 3
VERSION = 4


def cached(cache: PrefixCache, blocks: BlockManager, tokens: Sequence[int]) -> list[int]:
    """Blocks that hold these tokens, registered; one reference each."""
    held = blocks.allocate(len(tokens) // SIZE)
    assert held is not None
    digest = root(VERSION)
    for index, block in enumerate(held):
        piece = np.array(tokens[index * SIZE : (index + 1) * SIZE], np.int32)
        digest = cache.register(block, digest, piece)
    return held


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(10, SIZE)


@pytest.fixture
def cache(blocks: BlockManager) -> PrefixCache:
    return PrefixCache(blocks)


@pytest.mark.parametrize(
    ("tokens", "num_found"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 2),  # the last token is left over, and its whole block with it
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 0], 3),
        ([1, 2, 3, 4, 5, 6, 7, 8, 0, 0], 2),
        ([1, 2, 3, 4, 5, 6, 7], 2),
        ([1, 2, 3, 4, 5, 6], 1),
        ([1, 2, 3, 4], 1),
        ([1, 2, 3], 0),
        ([1], 0),
        ([4, 5, 6, 7], 0),  # the second block, but without the first
        ([9, 2, 3, 4, 5, 6, 7, 8, 9, 0], 0),
        ([1, 2, 3, 4, 5, 9, 7, 8, 9, 0], 1),
    ],
)
def test_match_finds_the_longest_run_of_full_blocks(
    cache: PrefixCache, blocks: BlockManager, tokens: list[int], num_found: int
) -> None:
    held = cached(cache, blocks, range(1, 10))
    for given in (tokens, tuple(tokens), np.array(tokens), np.array(tokens, np.int32)):
        before = [blocks.num_references(block) for block in held]
        assert cache.match(given, VERSION) == held[:num_found]
        after = [blocks.num_references(block) for block in held]
        assert [b - a for a, b in zip(before, after, strict=True)] == [1] * num_found + [0] * (3 - num_found)


@pytest.mark.parametrize("version", [5, -4, 44])
def test_another_version_finds_nothing(cache: PrefixCache, blocks: BlockManager, version: int) -> None:
    cached(cache, blocks, range(6))
    assert cache.match(range(9), version) == []
    assert len(cache.match(range(9), VERSION)) == 2


def test_a_released_prefix_is_found_until_its_place_is_needed(
    cache: PrefixCache, blocks: BlockManager
) -> None:
    held = cached(cache, blocks, range(6))
    blocks.release(held)
    assert blocks.num_free == 10
    assert cache.match(range(9), VERSION) == held and blocks.num_free == 8
    blocks.release(held)
    assert blocks.allocate(9) is not None  # the tail goes, the head stays
    assert cache.match(range(9), VERSION) == held[:1]
    blocks.release(held[:1])
    assert blocks.allocate(1) == held[:1]
    assert cache.match(range(9), VERSION) == [] and len(cache) == 0
    check_cache(cache)
    check_blocks(blocks)


def test_of_equal_blocks_the_first_stays_cached(cache: PrefixCache, blocks: BlockManager) -> None:
    first = cached(cache, blocks, range(6))
    second = cached(cache, blocks, [*range(6), 7, 8, 9])
    assert len(cache) == 3
    assert cache.match([*range(6), 7, 8, 9, 0], VERSION) == [*first, second[2]]
    assert [block in cache for block in second] == [False, False, True]
    assert cache.digest(second[2]) != cache.digest(first[1])
    check_cache(cache)
    check_blocks(blocks)


def test_a_hit_must_hold_the_tokens_and_not_only_their_hash(cache: PrefixCache, blocks: BlockManager) -> None:
    held = cached(cache, blocks, range(6))
    digest = cache.digest(held[1])
    cache._found[digest] = (held[1], np.array([3, 4, 6], np.int32).tobytes())
    assert cache.match(range(9), VERSION) == held[:1]


def test_after_drop_all_nothing_is_found_and_nothing_is_lost(
    cache: PrefixCache, blocks: BlockManager
) -> None:
    used, free = cached(cache, blocks, range(6)), cached(cache, blocks, range(5, 11))
    blocks.release(free)
    cache.drop_all()
    assert (len(cache), cache.match(range(9), VERSION), blocks.num_free) == (0, [], 8)
    blocks.release(used)
    assert blocks.num_free == 10
    check_cache(cache)
    check_blocks(blocks)


def test_a_block_that_is_not_full_is_refused(cache: PrefixCache, blocks: BlockManager) -> None:
    (block,) = blocks.allocate(1) or ()
    sentence = "^a block of 3 tokens cannot be registered with 2; only full blocks are cached$"
    with pytest.raises(ValueError, match=sentence):
        cache.register(block, root(VERSION), np.array([1, 2], np.int32))


def test_a_block_cannot_hold_two_prefixes(cache: PrefixCache, blocks: BlockManager) -> None:
    (block,) = cached(cache, blocks, [1, 2, 3])
    with pytest.raises(ValueError, match=f"^block {block} is cached for other tokens; a full block is never"):
        cache.register(block, root(VERSION), np.array([1, 2, 4], np.int32))
    check_cache(cache)


def test_a_free_block_cannot_be_registered(cache: PrefixCache) -> None:
    with pytest.raises(ValueError, match="^block 7 is free; only a block in use can be kept$"):
        cache.register(7, root(VERSION), np.array([1, 2, 4], np.int32))
    assert len(cache) == 0


def test_check_finds_what_is_broken(cache: PrefixCache, blocks: BlockManager) -> None:
    held = cached(cache, blocks, range(6))
    digests = [cache.digest(block) for block in held]
    cache._digests[held[0]] = digests[1]
    with pytest.raises(AssertionError, match=f"^the digest of block {held[0]} leads to block {held[1]}$"):
        check_cache(cache)
    del cache._digests[held[0]]
    with pytest.raises(AssertionError, match="^2 digests are cached for 1 blocks$"):
        check_cache(cache)
