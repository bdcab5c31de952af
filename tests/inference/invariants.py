"""Invariants of the engine's state between two steps: blocks, cache, table, prompt groups and queue agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from millrace.inference.async_engine import AsyncEngine
from millrace.inference.block_manager import BlockManager
from millrace.inference.engine import PagedEngine
from millrace.inference.prefix_cache import PrefixCache
from millrace.inference.request import Request, RequestTable
from millrace.inference.scheduler import KVAllocator, Scheduler


def check_blocks(blocks: BlockManager) -> None:
    """Every block is exactly one of used, kept and empty."""
    empty = set(blocks._empty)
    assert len(empty) == len(blocks._empty), "a block stands twice among the empty ones"
    for block, references in enumerate(blocks._references):
        assert references >= 0, f"block {block} has {references} references"
        places = (references > 0) + (block in empty) + (block in blocks._kept)
        assert places == 1, (
            f"block {block} stands in {places} of used, empty and kept; it has {references} references"
        )
        assert block not in blocks._kept or block in blocks._wanted, f"block {block} is kept but not wanted"
        assert block not in empty or block not in blocks._wanted, f"block {block} is wanted but empty"


def check_cache(cache: PrefixCache) -> None:
    """The two directions of the cache agree."""
    assert len(cache._found) == len(cache._digests), (
        f"{len(cache._found)} digests are cached for {len(cache._digests)} blocks"
    )
    for block, digest in cache._digests.items():
        held = cache._found.get(digest, (-1, b""))[0]
        assert held == block, f"the digest of block {block} leads to block {held}"


async def check_async_engine(engine: AsyncEngine) -> None:
    """Check the engine between two steps, in its own thread."""
    await engine._call(lambda: check_engine(engine._engine))


def check_engine(engine: PagedEngine) -> None:
    check_scheduler(engine._scheduler, engine._transfer.leases.pinned())


def check_scheduler(scheduler: Scheduler, leased: Sequence[int] = ()) -> None:
    waiting = [request for *_, request in scheduler._waiting]
    check_allocator(scheduler.allocator, waiting, leased)


def check_allocator(
    allocator: KVAllocator, waiting: Sequence[Request] = (), leased: Sequence[int] = ()
) -> None:
    table, blocks, cache = allocator.table, allocator.blocks, allocator.cache
    running = allocator.running.tolist()
    groups = {row: group.rows for row, group in allocator.groups.items()}
    check_blocks(blocks)
    check_cache(cache)
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
    held = Counter(block for row in used for block in table.blocks(row)) + Counter(leased)
    for block in range(blocks.num_blocks):
        assert blocks.num_references(block) == held[block], (
            f"block {block} has {blocks.num_references(block)} references, but {held[block]} rows and leases "
            "hold it"
        )
    for block in leased:
        assert block in cache, f"block {block} is leased, but the prefix cache does not know it"
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
