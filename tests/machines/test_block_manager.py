"""Random operations on the block manager, held against plain sets and counters."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millrace.inference.block_manager import BlockManager
from tests.inference.invariants import check_blocks


class World:
    """A manager and what it should know: references, and which blocks are kept, in order of release."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, 4)
        self.blocks.report_evictions(self._evicted)
        self.references: Counter[int] = Counter()
        self.wanted: set[int] = set()
        self.kept: list[int] = []
        self.num_free = num_blocks

    def _evicted(self, block: int) -> None:
        assert self.kept.pop(0) == block
        self.wanted.remove(block)

    def allocate(self, num: int) -> None:
        before = len(self.kept)
        num_empty = self.num_free - before
        taken = self.blocks.allocate(num)
        assert (taken is None) == (num > self.num_free)
        if taken is None:
            assert len(self.kept) == before
            return
        assert len(set(taken)) == num and not any(self.references[block] for block in taken)
        assert before - len(self.kept) == max(0, num - num_empty)
        self.num_free -= num
        self.references.update(taken)

    def retain(self, block: int) -> None:
        if not self.references[block] and block not in self.kept:
            with pytest.raises(ValueError, match=f"block {block} is empty"):
                self.blocks.retain([block])
            return
        self.blocks.retain([block])
        if not self.references[block]:
            self.kept.remove(block)
            self.num_free -= 1
        self.references[block] += 1

    def release(self, block: int) -> None:
        if not self.references[block]:
            with pytest.raises(ValueError, match=f"block {block} is free"):
                self.blocks.release([block])
            return
        self.blocks.release([block])
        self.references[block] -= 1
        if not self.references[block]:
            self.num_free += 1
            if block in self.wanted:
                self.kept.append(block)

    def keep(self, block: int) -> None:
        if self.references[block]:
            self.blocks.keep(block)
            self.wanted.add(block)

    def forget(self, block: int) -> None:
        self.blocks.forget(block)
        self.wanted.discard(block)
        if block in self.kept:
            self.kept.remove(block)

    def check(self) -> None:
        check_blocks(self.blocks)
        assert self.blocks.num_free == self.num_free
        for block in range(self.blocks.num_blocks):
            assert self.blocks.num_references(block) == self.references[block]


BLOCKS = st.integers(0, 7)


class BlockMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.world = World(num_blocks)

    @rule(num=st.integers(0, 9))
    def allocate(self, num: int) -> None:
        self.world.allocate(num)

    @rule(block=BLOCKS)
    def retain(self, block: int) -> None:
        self.world.retain(block % self.num_blocks)

    @precondition(lambda self: self.world.references.total())
    @rule(block=BLOCKS)
    def release(self, block: int) -> None:
        self.world.release(block % self.num_blocks)

    @rule(block=BLOCKS)
    def keep(self, block: int) -> None:
        self.world.keep(block % self.num_blocks)

    @rule(block=BLOCKS)
    def forget(self, block: int) -> None:
        self.world.forget(block % self.num_blocks)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestBlocks = BlockMachine.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_thousand_operations_break_nothing(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([1, 5, 12, 30])
    world = World(num_blocks)
    for _ in range(25_000):
        block = rng.randrange(num_blocks)
        kind = rng.choice(["allocate", "retain", "release", "release", "release", "keep", "forget"])
        getattr(world, kind)(rng.randrange(num_blocks // 2 + 2) if kind == "allocate" else block)
        world.check()
    assert world.blocks.num_blocks == num_blocks
