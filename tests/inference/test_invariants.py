from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.inference.scheduler import Scheduler
from tests.inference.invariants import check_scheduler
from tests.inference.pool import new_request, new_scheduler, pool_of, step


def busy() -> Scheduler:
    """Row 0 decodes, row 1 leads a family with heir 2, row 3 is free, and one request waits."""
    scheduler = new_scheduler(max_requests=4, max_batch_tokens=4)
    scheduler.add([new_request([1, 2, 3], max_tokens=20)])
    pool = pool_of(scheduler)
    step(scheduler, pool)
    scheduler.add([new_request(range(9), seed=seed) for seed in range(2)])
    scheduler.add([new_request(range(20, 29))])
    step(scheduler, pool)
    step(scheduler, pool)
    return scheduler


def twice(scheduler: Scheduler) -> None:
    scheduler._waiting.append(scheduler._waiting[0])


def shared(scheduler: Scheduler) -> None:
    """Row 1 also holds the block that row 0 writes to, and the counts agree."""
    table = scheduler.table
    (block,) = table.blocks(0)[1:]
    table.num_blocks_R[0] = 2
    last = int(table.num_blocks_R[1]) - 1
    scheduler.blocks.release([int(table.block_RC[1, last])])
    scheduler.blocks.retain([block])
    table.block_RC[1, last] = block


def cached(scheduler: Scheduler) -> None:
    table = scheduler.table
    block = table.blocks(0)[-1]
    scheduler.cache.register(block, b"", table.token_RL[0, :4])


BROKEN: list[tuple[Callable[[Scheduler], object], str]] = [
    (lambda s: s.table.used_R.__setitem__(3, True), "used_R and requests name different rows"),
    (lambda s: s.table.free_rows.append(0), "a row is both used and free, or neither"),
    (lambda s: s.table.free_rows.clear(), "a row is both used and free, or neither"),
    (
        lambda s: setattr(s.allocator, "running", s.allocator.running[:1]),
        "the rows in use are not those that run or wait for a leader",
    ),
    (lambda s: s.allocator.groups[1].rows.reverse(), "the rows in use are not those that run"),
    (lambda s: s.allocator.groups.__delitem__(2), "the rows in use are not those that run"),
    (
        lambda s: setattr(s.allocator.groups[1], "rows", [1]),
        "the prompt group of row 2 has no running leader",
    ),
    (
        lambda s: s.blocks.retain(s.table.blocks(0)[:1]),
        r"block \d+ has 2 references, but 1 rows and leases hold it",
    ),
    (lambda s: s.blocks.allocate(1), r"block \d+ has 1 references, but 0 rows and leases hold it"),
    (lambda s: setattr(s.table.requests[0], "row", 1), "row 0 and its request do not name each other"),
    (
        lambda s: setattr(s.table.requests[0], "finish_reason", "abort"),
        "row 0 is held by a request that has ended",
    ),
    (
        lambda s: s.table.num_computed_R.__setitem__(0, 6),
        "row 0 has 6 tokens computed of 6 known and 23 at most",
    ),
    (lambda s: s.table.limit_R.__setitem__(0, 6), "row 0 has 5 tokens computed of 6 known and 6 at most"),
    (lambda s: s.table.num_computed_R.__setitem__(2, 1), "row 2 waits for its leader, but it holds 0 blocks"),
    (
        lambda s: s.table.num_tokens_R.__setitem__(0, 3) or s.table.num_computed_R.__setitem__(0, 2),
        "row 0 holds 2 blocks for 3 tokens",
    ),
    (
        lambda s: s.table.num_tokens_R.__setitem__(0, 12) or s.table.num_computed_R.__setitem__(0, 9),
        "row 0 has 9 tokens computed in 2 blocks",
    ),
    (lambda s: s.table.num_hashed_R.__setitem__(0, 2), "row 0 has registered what is not computed"),
    (cached, r"block \d+ is cached, and row 0 will write to it"),
    (shared, r"block \d+ is shared, and row 0 will write to it"),
    (twice, "the queue is out of order, or a request stands in it twice"),
    (
        lambda s: setattr(s._waiting[0][2], "row", 1),
        r"request range\(20, 29\) waits, but it runs or has ended",
    ),
    (lambda s: setattr(s._waiting[0][2], "finish_reason", "stop"), "request .* waits, but it runs or has"),
]


@pytest.mark.slow_beyond(13)
@pytest.mark.parametrize(("broken", "sentence"), BROKEN)
def test_what_is_broken_is_named(broken: Callable[[Scheduler], object], sentence: str) -> None:
    scheduler = busy()
    check_scheduler(scheduler)
    broken(scheduler)
    with pytest.raises(AssertionError, match=f"^({sentence})"):
        check_scheduler(scheduler)


def test_a_shared_block_may_be_written_once_it_is_copied() -> None:
    scheduler = busy()
    shared(scheduler)
    scheduler.table.forked_R[0] = True
    with pytest.raises(AssertionError, match="is shared, and row 1 will write to it"):
        check_scheduler(scheduler)
    scheduler.table.forked_R[1] = True
    check_scheduler(scheduler)
