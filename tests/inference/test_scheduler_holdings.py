from __future__ import annotations

import numpy as np
import pytest

from millrace.inference.scheduler import KVAllocator, RequestStart
from tests.inference.invariants import check_allocator
from tests.inference.pool import new_request


def new_holdings(num_blocks: int = 20, *, max_requests: int = 5, prefix_caching: bool = True) -> KVAllocator:
    sizes = {"num_blocks": num_blocks, "block_size": 4, "max_requests": max_requests}
    return KVAllocator(**sizes, prefix_caching=prefix_caching)


def begin(allocator: KVAllocator, *prompts: range, arrival: int = 0) -> list[RequestStart]:
    """Start requests together, as one step of the scheduler does."""
    starts = []
    for number, prompt in enumerate(prompts, arrival):
        request = new_request(prompt)
        request.arrival = number
        start = allocator.start(request, may_compute=True)
        assert start is not None
        starts.append(start)
    allocator.fill_rows(starts)
    return starts


def compute(allocator: KVAllocator, rows: list[int]) -> None:
    """All prompts of these rows are computed, and each row draws token 9."""
    table = allocator.table
    table.num_computed_R[rows] = table.num_prompt_R[rows]
    allocator.register(np.array(rows))
    everybody = [member for row in rows for member in (row, *allocator.followers(row))]
    allocator.fork()
    position_N = table.num_tokens_R[everybody]
    table.reserve(int(position_N.max()) + 1)
    table.token_RL[everybody, position_N] = 9
    table.num_tokens_R[everybody] += 1


def test_a_request_that_cannot_start_leaves_no_trace() -> None:
    allocator = new_holdings(4)
    (first,) = begin(allocator, range(8))
    compute(allocator, [first.row])
    free_rows = list(allocator.table.free_rows)
    late = new_request(range(12))
    # It finds a block or two, and one is missing: the running one must keep one to grow into.
    assert allocator.blocks.num_free == 2 and late.row == -1
    assert allocator.start(new_request([*range(8), 50, 51, 52, 53, 54]), may_compute=True) is None
    assert allocator.start(new_request(range(60, 63)), may_compute=False) is None
    assert allocator.blocks.num_free == 2 and allocator.table.free_rows == free_rows
    assert [allocator.blocks.num_references(block) for block in first.blocks or []] == [1, 1]
    assert (allocator.cache.num_queries, allocator.cache.num_hits) == (8, 0)
    start = allocator.start(late, may_compute=True)
    assert start is not None and start.blocks is not None
    assert start.num_hits == 2 and start.blocks[:2] == first.blocks
    assert (allocator.cache.num_queries, allocator.cache.num_hits) == (20, 8)


def test_who_joins_a_family_needs_no_blocks_and_no_budget() -> None:
    allocator = new_holdings(2)
    (leader,) = begin(allocator, range(5))
    follower = allocator.start(new_request(range(5)), may_compute=False)
    assert follower is not None and follower.blocks is None
    assert allocator.followers(leader.row) == [follower.row] and allocator.followers(follower.row) == []
    allocator.fill_rows([follower])
    check_allocator(allocator)
    assert allocator.num_running == 2 and allocator.running.tolist() == [leader.row]
    compute(allocator, [leader.row])
    assert allocator.start(new_request(range(5)), may_compute=False) is None
    assert allocator.running.tolist() == [leader.row, follower.row]
    check_allocator(allocator)


def test_making_room_is_all_or_nothing() -> None:
    allocator = new_holdings(3)
    leader, *followers = begin(allocator, *[range(6)] * 4)
    compute(allocator, [leader.row])
    before = {row: allocator.table.blocks(row) for row in allocator.running.tolist()}
    assert allocator.make_room(allocator.running) is None
    assert {row: allocator.table.blocks(row) for row in allocator.running.tolist()} == before
    check_allocator(allocator)
    for follower in followers[:2]:
        allocator.free(follower.row)
    allocator.compact()
    copies = allocator.make_room(allocator.running)
    assert copies is not None
    full, partial = before[leader.row]
    fresh = (set(range(3)) - {full, partial}).pop()
    assert [copy.tolist() for copy in copies] == [[partial], [fresh]]
    assert allocator.table.blocks(leader.row) == [full, fresh]
    assert allocator.table.blocks(followers[2].row) == [full, partial]
    assert not allocator.table.forked_R[allocator.running].any()
    check_allocator(allocator)


def test_a_row_grows_by_a_block_when_its_last_one_is_full() -> None:
    allocator = new_holdings()
    starts = begin(allocator, range(8), range(10, 17), range(20, 24))
    rows = [start.row for start in starts]
    compute(allocator, rows)
    copies = allocator.make_room(allocator.running)
    assert copies is not None and len(copies[0]) == len(copies[1]) == 0
    assert [len(allocator.table.blocks(row)) for row in rows] == [3, 2, 2]
    for start in starts:
        held = start.blocks
        assert held is not None and allocator.table.blocks(start.row)[: len(held)] == held
    assert allocator.blocks.num_free == 20 - 7
    check_allocator(allocator)


@pytest.mark.parametrize(
    ("priorities", "arrivals", "last"),
    [([0, 0, 0], [4, 9, 5], 1), ([0, 7, 0], [9, 4, 5], 1), ([2, 1, 2], [3, 9, 8], 2)],
)
def test_the_last_is_of_highest_priority_and_then_arrival(
    priorities: list[int], arrivals: list[int], last: int
) -> None:
    allocator = new_holdings()
    starts = begin(allocator, range(3), range(4), range(5))
    rows = [start.row for start in starts]
    allocator.table.priority_R[rows] = priorities
    allocator.table.arrival_R[rows] = arrivals
    assert allocator.last() == rows[last]


def test_several_blocks_of_several_rows_are_registered_at_once() -> None:
    allocator = new_holdings()
    starts = begin(allocator, range(13), range(50, 53), range(30, 38))
    compute(allocator, [start.row for start in starts])
    assert len(allocator.cache) == 3 + 0 + 2
    for start, num in zip(starts, (3, 0, 2), strict=True):
        tokens = [*start.token_L.tolist(), 99]
        found = allocator.cache.match(tokens, 0)
        assert start.blocks is not None and found == start.blocks[:num]
        assert allocator.table.num_hashed_R[start.row] == num
        allocator.blocks.release(found)


def test_a_row_that_found_a_prefix_continues_its_chain() -> None:
    allocator = new_holdings()
    (first,) = begin(allocator, range(9))
    compute(allocator, [first.row])
    (second,) = begin(allocator, range(13), arrival=1)
    assert second.num_hits == 2 and allocator.table.num_computed_R[second.row] == 8
    compute(allocator, [second.row])
    (third,) = begin(allocator, range(14), arrival=2)
    assert third.num_hits == 3 and third.blocks is not None and second.blocks is not None
    assert third.blocks[:3] == second.blocks[:3]


def test_without_prefix_caching_nothing_is_shared() -> None:
    allocator = new_holdings(prefix_caching=False)
    starts = begin(allocator, range(9), range(9))
    assert all(start.blocks is not None for start in starts) and not allocator.groups
    compute(allocator, [start.row for start in starts])
    assert len(allocator.cache) == 0


def test_after_a_restart_nobody_shares_with_what_runs() -> None:
    allocator = new_holdings()
    (leader,) = begin(allocator, range(9))
    allocator.restart(1)
    (other,) = begin(allocator, range(9), arrival=1)
    assert other.blocks is not None and allocator.followers(leader.row) == []
    compute(allocator, [leader.row])
    assert len(allocator.cache) == 0
    compute(allocator, [other.row])
    assert len(allocator.cache) == 2
    check_allocator(allocator)
