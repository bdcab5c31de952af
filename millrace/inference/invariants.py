"""Invariants of the scheduler's state between two steps. No torch; slow, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from millrace.inference.block_manager import BlockManager
from millrace.inference.prefix_cache import PrefixCache
from millrace.inference.request import Request, RequestTable


def check_state(
    table: RequestTable,
    blocks: BlockManager,
    cache: PrefixCache,
    *,
    waiting: Sequence[Request],
    running: Sequence[int],
    groups: Mapping[int, Sequence[int]],
) -> None:
    """Check that blocks, table, prompt groups and queue agree; an AssertionError names the place.

    `running` are the rows with blocks; `groups` has all rows of a prompt group, leader first, under each of
    them.
    """
    blocks.check()
    cache.check()
    used = [row for row, request in enumerate(table.requests) if request is not None]
    assert used == table.used_R.nonzero()[0].tolist(), "used_R and requests name different rows"
    assert sorted(used + table.free_rows) == list(range(len(table.requests))), (
        "a row is both used and free, or neither"
    )
    followers = sorted(row for row, rows in groups.items() if rows[0] != row)
    assert sorted([*running, *followers]) == used, (
        "the rows in use are not those that run or wait for a leader"
    )
    for row, rows in groups.items():
        assert row in rows and rows[0] in running, f"the prompt group of row {row} has no running leader"
    held = Counter(block for row in used for block in table.blocks(row))
    for block in range(blocks.num_blocks):
        assert blocks.num_references(block) == held[block], (
            f"block {block} has {blocks.num_references(block)} references, but {held[block]} rows hold it"
        )
    for row in used:
        _check_row(table, blocks, cache, row, waits=row in followers)
    order = [(request.priority, request.arrival) for request in waiting]
    assert order == sorted(set(order)), "the queue is out of order, or a request stands in it twice"
    for request in waiting:
        assert request.row < 0 and request.finish_reason is None, (
            f"request {request.id} waits, but it runs or has ended"
        )


def _check_row(
    table: RequestTable, blocks: BlockManager, cache: PrefixCache, row: int, *, waits: bool
) -> None:
    request = table.requests[row]
    assert request is not None and request.row == row, f"row {row} and its request do not name each other"
    assert request.finish_reason is None, f"row {row} is held by a request that has ended"
    size, held = blocks.block_size, table.blocks(row)
    computed, known = int(table.num_computed_R[row]), int(table.num_tokens_R[row])
    assert computed < known < table.limit_R[row], (
        f"row {row} has {computed} tokens computed of {known} known and {table.limit_R[row]} at most"
    )
    if waits:
        assert not held and not computed, f"row {row} waits for its leader, but it holds {len(held)} blocks"
        return
    assert computed <= len(held) * size, f"row {row} has {computed} tokens computed in {len(held)} blocks"
    assert len(held) <= -(-known // size), f"row {row} holds {len(held)} blocks for {known} tokens"
    assert table.num_hashed_R[row] * size <= computed, f"row {row} has registered what is not computed"
    for block in held[computed // size :]:
        assert block not in cache, f"block {block} is cached, and row {row} will write to it"
        assert blocks.num_references(block) == 1 or table.forked_R[row], (
            f"block {block} is shared, and row {row} will write to it"
        )
