from __future__ import annotations

import pytest

from millrace.inference.block_manager import BlockManager
from tests.inference.invariants import check_blocks


def test_allocation_is_all_or_nothing() -> None:
    blocks = BlockManager(5, 16)
    first = blocks.allocate(3)
    assert first is not None and len(set(first)) == 3 and blocks.num_free == 2
    assert blocks.allocate(3) is None and blocks.num_free == 2
    rest = blocks.allocate(2)
    assert rest is not None and sorted(first + rest) == [0, 1, 2, 3, 4] and blocks.num_free == 0
    assert blocks.allocate(0) == []
    check_blocks(blocks)


def test_a_block_is_free_after_its_last_reference() -> None:
    blocks = BlockManager(4, 16)
    held = blocks.allocate(2)
    assert held is not None
    blocks.retain(held)
    blocks.retain(held[:1])
    assert [blocks.num_references(block) for block in held] == [3, 2]
    blocks.release(held)
    blocks.release(held)
    assert [blocks.num_references(block) for block in held] == [1, 0] and blocks.num_free == 3
    blocks.release(held[:1])
    assert blocks.num_free == 4
    check_blocks(blocks)


def test_empty_blocks_go_before_kept_ones_and_of_these_the_tail_of_the_oldest_first() -> None:
    blocks = BlockManager(6, 16)
    evicted: list[int] = []
    blocks.report_evictions(evicted.append)
    old, young = blocks.allocate(2), blocks.allocate(2)
    assert old is not None and young is not None
    for block in old + young:
        blocks.keep(block)
    blocks.release(old)
    blocks.release(young)
    assert blocks.num_free == 6
    assert blocks.allocate(2) is not None and evicted == []
    assert blocks.allocate(3) is not None and evicted == [old[1], old[0], young[1]]
    assert blocks.allocate(1) == [young[0]] and evicted[3:] == [young[0]]
    check_blocks(blocks)


def test_a_kept_block_can_be_shared_again_and_then_goes_last() -> None:
    blocks = BlockManager(2, 16)
    evicted: list[int] = []
    blocks.report_evictions(evicted.append)
    held = blocks.allocate(2)
    assert held is not None
    for block in held:
        blocks.keep(block)
    blocks.release(held)
    blocks.retain(held[1:])
    assert blocks.num_references(held[1]) == 1 and blocks.num_free == 1
    blocks.release(held[1:])
    assert blocks.allocate(1) == [held[0]] and evicted == [held[0]]
    check_blocks(blocks)


def test_a_forgotten_block_is_empty_when_it_is_free() -> None:
    blocks = BlockManager(3, 16)
    held = blocks.allocate(2)
    assert held is not None
    for block in held:
        blocks.keep(block)
    blocks.release(held[:1])
    for block in held:
        blocks.forget(block)
    blocks.release(held[1:])
    blocks.report_evictions(lambda block: pytest.fail(f"{block} was evicted"))
    check_blocks(blocks)
    assert blocks.num_free == 3 and blocks.allocate(3) is not None


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
def test_a_pool_of_nothing_is_refused(name: str) -> None:
    numbers = {"num_blocks": 1, "block_size": 1}
    assert BlockManager(**numbers).num_free == 1
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1$"):
        BlockManager(**(numbers | {name: 0}))


def test_misuse_is_named() -> None:
    blocks = BlockManager(2, 16)
    with pytest.raises(ValueError, match="^block 1 is empty and cannot be shared; allocate one$"):
        blocks.retain([1])
    with pytest.raises(
        ValueError, match="^block 1 is free; it was released more often than it was retained$"
    ):
        blocks.release([1])
    with pytest.raises(ValueError, match="^block 0 is free; only a block in use can be kept$"):
        blocks.keep(0)
    check_blocks(blocks)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (lambda b: b._empty.append(b._empty[0]), "a block stands twice among the empty ones"),
        (lambda b: b._empty.append(0), "block 0 stands in 2 of used, empty and kept; it has 1 references"),
        (lambda b: b._empty.pop(), "block 2 stands in 0 of used, empty and kept; it has 0 references"),
        (lambda b: b._references.__setitem__(0, -1), "block 0 has -1 references"),
        (lambda b: b._wanted.discard(1), "block 1 is kept but not wanted"),
        (lambda b: b._wanted.add(2), "block 2 is wanted but empty"),
    ],
)
def test_check_finds_what_is_broken(broken, sentence: str) -> None:
    blocks = BlockManager(4, 16)
    blocks.allocate(1)
    (kept,) = blocks.allocate(1) or ()
    blocks.keep(kept)
    blocks.release([kept])
    assert kept == 1
    check_blocks(blocks)
    broken(blocks)
    with pytest.raises(AssertionError, match=f"^{sentence}"):
        check_blocks(blocks)
