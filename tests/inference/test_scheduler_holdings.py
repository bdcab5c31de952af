from __future__ import annotations

import numpy as np
import pytest

from millrace.inference.scheduler import KVAllocator, RequestStart
from tests.inference.pool import new_request


def new_holdings(num_blocks: int = 20, *, max_requests: int = 5, prefix_caching: bool = True) -> KVAllocator:
    sizes = {"num_blocks": num_blocks, "block_size": 4, "max_requests": max_requests}
    return KVAllocator(**sizes, prefix_caching=prefix_caching)


def begin(holdings: KVAllocator, *prompts: range, arrival: int = 0) -> list[RequestStart]:
    """Start requests together, as one step of the scheduler does."""
    starts = []
    for number, prompt in enumerate(prompts, arrival):
        request = new_request(prompt)
        request.arrival = number
        start = holdings.start(request, may_compute=True)
        assert start is not None
        starts.append(start)
    holdings.seat(starts)
    return starts


def compute(holdings: KVAllocator, rows: list[int]) -> None:
    """All prompts of these rows are computed, and each row draws token 9."""
    table = holdings.table
    table.num_computed_R[rows] = table.num_prompt_R[rows]
    holdings.register(np.array(rows))
    everybody = [member for row in rows for member in (row, *holdings.heirs(row))]
    holdings.fork()
    position_N = table.num_tokens_R[everybody]
    table.reserve(int(position_N.max()) + 1)
    table.token_RL[everybody, position_N] = 9
    table.num_tokens_R[everybody] += 1


def test_a_request_that_cannot_start_leaves_no_trace() -> None:
    holdings = new_holdings(4)
    (first,) = begin(holdings, range(8))
    compute(holdings, [first.row])
    free_rows = list(holdings.table.free_rows)
    late = new_request(range(12))
    # It finds a block or two, and one is missing: the running one must keep one to grow into.
    assert holdings.blocks.num_free == 2 and late.row == -1
    assert holdings.start(new_request([*range(8), 50, 51, 52, 53, 54]), may_compute=True) is None
    assert holdings.start(new_request(range(60, 63)), may_compute=False) is None
    assert holdings.blocks.num_free == 2 and holdings.table.free_rows == free_rows
    assert [holdings.blocks.num_references(block) for block in first.held or []] == [1, 1]
    assert (holdings.cache.num_queries, holdings.cache.num_hits) == (8, 0)
    start = holdings.start(late, may_compute=True)
    assert start is not None and start.held is not None
    assert start.num_hits == 2 and start.held[:2] == first.held
    assert (holdings.cache.num_queries, holdings.cache.num_hits) == (20, 8)


def test_who_joins_a_family_needs_no_blocks_and_no_budget() -> None:
    holdings = new_holdings(2)
    (leader,) = begin(holdings, range(5))
    heir = holdings.start(new_request(range(5)), may_compute=False)
    assert heir is not None and heir.held is None
    assert holdings.heirs(leader.row) == [heir.row] and holdings.heirs(heir.row) == []
    holdings.seat([heir])
    holdings.check([])
    assert holdings.num_running == 2 and holdings.running.tolist() == [leader.row]
    compute(holdings, [leader.row])
    assert holdings.start(new_request(range(5)), may_compute=False) is None
    assert holdings.running.tolist() == [leader.row, heir.row]
    holdings.check([])


def test_making_room_is_all_or_nothing() -> None:
    holdings = new_holdings(3)
    leader, *heirs = begin(holdings, *[range(6)] * 4)
    compute(holdings, [leader.row])
    before = {row: holdings.table.blocks(row) for row in holdings.running.tolist()}
    assert holdings.make_room(holdings.running) is None
    assert {row: holdings.table.blocks(row) for row in holdings.running.tolist()} == before
    holdings.check([])
    for heir in heirs[:2]:
        holdings.leave(heir.row)
    holdings.sweep()
    copies = holdings.make_room(holdings.running)
    assert copies is not None
    full, partial = before[leader.row]
    fresh = (set(range(3)) - {full, partial}).pop()
    assert [copy.tolist() for copy in copies] == [[partial], [fresh]]
    assert holdings.table.blocks(leader.row) == [full, fresh]
    assert holdings.table.blocks(heirs[2].row) == [full, partial]
    assert not holdings.table.forked_R[holdings.running].any()
    holdings.check([])


def test_a_row_grows_by_a_block_when_its_last_one_is_full() -> None:
    holdings = new_holdings()
    starts = begin(holdings, range(8), range(10, 17), range(20, 24))
    rows = [start.row for start in starts]
    compute(holdings, rows)
    copies = holdings.make_room(holdings.running)
    assert copies is not None and len(copies[0]) == len(copies[1]) == 0
    assert [len(holdings.table.blocks(row)) for row in rows] == [3, 2, 2]
    for start in starts:
        held = start.held
        assert held is not None and holdings.table.blocks(start.row)[: len(held)] == held
    assert holdings.blocks.num_free == 20 - 7
    holdings.check([])


@pytest.mark.parametrize(
    ("priorities", "arrivals", "last"),
    [([0, 0, 0], [4, 9, 5], 1), ([0, 7, 0], [9, 4, 5], 1), ([2, 1, 2], [3, 9, 8], 2)],
)
def test_the_last_is_of_highest_priority_and_then_arrival(
    priorities: list[int], arrivals: list[int], last: int
) -> None:
    holdings = new_holdings()
    starts = begin(holdings, range(3), range(4), range(5))
    rows = [start.row for start in starts]
    holdings.table.priority_R[rows] = priorities
    holdings.table.arrival_R[rows] = arrivals
    assert holdings.last() == rows[last]


def test_several_blocks_of_several_rows_are_registered_at_once() -> None:
    holdings = new_holdings()
    starts = begin(holdings, range(13), range(50, 53), range(30, 38))
    compute(holdings, [start.row for start in starts])
    assert len(holdings.cache) == 3 + 0 + 2
    for start, num in zip(starts, (3, 0, 2), strict=True):
        tokens = [*start.token_L.tolist(), 99]
        found = holdings.cache.match(tokens, 0)
        assert start.held is not None and found == start.held[:num]
        assert holdings.table.num_hashed_R[start.row] == num
        holdings.blocks.release(found)


def test_a_row_that_found_a_prefix_continues_its_chain() -> None:
    holdings = new_holdings()
    (first,) = begin(holdings, range(9))
    compute(holdings, [first.row])
    (second,) = begin(holdings, range(13), arrival=1)
    assert second.num_hits == 2 and holdings.table.num_computed_R[second.row] == 8
    compute(holdings, [second.row])
    (third,) = begin(holdings, range(14), arrival=2)
    assert third.num_hits == 3 and third.held is not None and second.held is not None
    assert third.held[:3] == second.held[:3]


def test_without_prefix_caching_nothing_is_shared() -> None:
    holdings = new_holdings(prefix_caching=False)
    starts = begin(holdings, range(9), range(9))
    assert all(start.held is not None for start in starts) and not holdings.families
    compute(holdings, [start.row for start in starts])
    assert len(holdings.cache) == 0


def test_after_a_restart_nobody_shares_with_what_runs() -> None:
    holdings = new_holdings()
    (leader,) = begin(holdings, range(9))
    holdings.restart(1)
    (other,) = begin(holdings, range(9), arrival=1)
    assert other.held is not None and holdings.heirs(leader.row) == []
    compute(holdings, [leader.row])
    assert len(holdings.cache) == 0
    compute(holdings, [other.row])
    assert len(holdings.cache) == 2
    holdings.check([])
