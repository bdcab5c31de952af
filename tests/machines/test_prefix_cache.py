"""Random operations on the prefix cache, held against a plain list of the prefixes that blocks hold."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millrace.inference.block_manager import BlockManager
from millrace.inference.prefix_cache import PrefixCache, root
from tests.inference.invariants import check_blocks, check_cache

SIZE = 2


class World:
    """Sequences that hold blocks, as requests do, and which prefix stands in each registered block."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, SIZE)
        self.cache = PrefixCache(self.blocks)
        self.prefix: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.held: list[list[int]] = []

    def begin(self, tokens: tuple[int, ...], version: int) -> None:
        """Look up, allocate the rest, register what is full."""
        hits = self.cache.match(tokens, version)
        assert len(hits) * SIZE < len(tokens)
        for index, block in enumerate(hits):
            assert self.prefix[block] == (version, tokens[: (index + 1) * SIZE])
        known = {self.prefix[block] for block in self.prefix if block in self.cache}
        longest = 0
        while (longest + 1) * SIZE < len(tokens) and (version, tokens[: (longest + 1) * SIZE]) in known:
            longest += 1
        assert len(hits) == longest
        fresh = self.blocks.allocate(len(tokens) // SIZE - len(hits))
        if fresh is None:
            self.blocks.release(hits)
            return
        digest = self.cache.digest(hits[-1]) if hits else root(version)
        for index, block in enumerate(fresh, len(hits)):
            piece = np.array(tokens[index * SIZE : (index + 1) * SIZE], np.int32)
            digest = self.cache.register(block, digest, piece)
            if block in self.cache:
                self.prefix[block] = version, tokens[: (index + 1) * SIZE]
        self.held.append(hits + fresh)

    def end(self, number: int) -> None:
        if self.held:
            self.blocks.release(self.held.pop(number % len(self.held)))

    def drop(self) -> None:
        self.cache.drop_all()
        assert len(self.cache) == 0

    def check(self) -> None:
        check_blocks(self.blocks)
        check_cache(self.cache)
        used = {block for blocks in self.held for block in blocks}
        assert self.blocks.num_free == self.blocks.num_blocks - len(used)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
VERSIONS = st.sampled_from([0, 0, 1])


class CacheMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.world = World(num_blocks)

    @rule(tokens=TOKENS, version=VERSIONS)
    def begin(self, tokens: tuple[int, ...], version: int) -> None:
        self.world.begin(tokens, version)

    @rule(number=st.integers(0, 20))
    def end(self, number: int) -> None:
        self.world.end(number)

    @rule()
    def drop(self) -> None:
        self.world.drop()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_thousand_operations_break_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng.choice([3, 10, 25]))
    for _ in range(25_000):
        kind = rng.random()
        if kind < 0.5:
            tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
            world.begin(tokens, (rng.randrange(2), rng.choice(["", "x"])))
        elif kind < 0.999:
            world.end(rng.randrange(100))
        else:
            world.drop()
        world.check()
    assert world.cache.num_queries == 0
