"""What the running requests hold: rows, blocks, prefixes, and each other's prompts. No torch.

B = rows that compute, N = some of them, M = blocks of theirs, L = tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.inference.block_manager import BlockManager
from millrace.inference.invariants import check_state
from millrace.inference.prefix_cache import PrefixCache, root
from millrace.inference.request import Request, RequestTable


@dataclass(slots=True, eq=False)
class Family:
    """Requests of one prompt that is being computed: the prompt, and their rows, leader first."""

    prompt: tuple[int, ...]
    token_L: np.ndarray
    rows: list[int]


@dataclass(slots=True, eq=False)
class Start:
    """A request about to run: the row it gets, its tokens, and either blocks or a leader who will have them.

    Attributes:
        request: who starts.
        row: its row.
        token_L: prompt and drawn tokens.
        held: blocks for all of these; None where it waits for its leader.
        num_hits: how many of the blocks are cached prefixes.
    """

    request: Request
    row: int
    token_L: np.ndarray
    held: list[int] | None
    num_hits: int = 0


class Holdings:
    """Rows and blocks of the running requests; the scheduler decides who gets them.

    Attributes:
        table: the running requests.
        blocks: the blocks of the pool.
        cache: prefixes that blocks hold.
        running: rows with blocks, in the order in which they got them; replaced, never written.
        families: of rows whose prompt is being computed for several, or may come to be.
        version: of the weights in force.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_requests: int, prefix_caching: bool) -> None:
        """Nobody holds anything, and the weights are at version 0."""
        self.blocks = BlockManager(num_blocks, block_size)
        self.cache = PrefixCache(self.blocks)
        self.table = RequestTable(max_requests, block_size)
        self.running = np.empty(0, np.int64)
        self.families: dict[int, Family] = {}
        self.version = 0
        self._open: dict[tuple[int, ...], Family] = {}
        self._prefix_caching = prefix_caching

    @property
    def num_running(self) -> int:
        """Requests with a row, those that wait for the leader of their family included."""
        return len(self.table.requests) - len(self.table.free_rows)

    def heirs(self, row: int) -> list[int]:
        """The rows that wait for this one to compute their prompt."""
        family = self.families.get(row)
        return family.rows[1:] if family is not None and family.rows[0] == row else []

    def last(self) -> int:
        """The running row that is the first to go when blocks are short: of highest (priority, arrival)."""
        row_B = self.running
        priority_B = self.table.priority_R[row_B]
        row_B = row_B[priority_B == priority_B.max()]
        return int(row_B[self.table.arrival_R[row_B].argmax()])

    def start(self, request: Request, *, may_compute: bool) -> Start | None:
        """A row for a request, and blocks or a leader; None, and nothing changed, if it cannot start now.

        Args:
            request: it waits, and a row is free.
            may_compute: whether it may start even without a leader.
        """
        # Whoever resumes, or wants log-probabilities of the prompt, computes alone.
        wants_all = not self._prefix_caching or request.params.prompt_logprobs
        alone = wants_all or len(request.drawn) > 0
        family = None if alone else self._open.get(request.prompt)
        if family is not None:
            row = self.table.free_rows.pop()
            family.rows.append(row)
            self.families[row] = family
            return Start(request, row, family.token_L, None)
        if not may_compute:
            return None
        token_L = request.known_tokens()
        hits = [] if wants_all else self.cache.match(token_L, self.version)
        num_new = -(-len(token_L) // self.blocks.block_size) - len(hits)
        # Everybody who runs keeps a free block to grow into, or would soon preempt whoever starts.
        fresh = self.blocks.allocate(num_new) if num_new + self.num_running <= self.blocks.num_free else None
        if fresh is None:
            self.blocks.release(hits)
            return None
        if not wants_all:
            self.cache.count(len(token_L), len(hits) * self.blocks.block_size)
        row = self.table.free_rows.pop()
        if not alone:
            self._open[request.prompt] = self.families[row] = Family(request.prompt, token_L, [row])
        return Start(request, row, token_L, hits + fresh, len(hits))

    def seat(self, starts: Sequence[Start]) -> None:
        """Fill in the rows of requests that start."""
        table = self.table
        rows = [start.row for start in starts]
        table.put(rows, [start.request for start in starts], [start.token_L for start in starts])
        table.caches_R[rows] = self._prefix_caching
        for start in starts:
            if start.held is not None:
                row, num_hits = start.row, start.num_hits
                table.block_RC[row, : len(start.held)] = start.held
                table.num_blocks_R[row] = len(start.held)
                if num_hits:
                    table.num_computed_R[row] = num_hits * self.blocks.block_size
                    table.num_hashed_R[row] = num_hits
                    table.digests[row] = self.cache.digest(start.held[num_hits - 1])
        computing = [start.row for start in starts if start.held is not None]
        self.running = np.append(self.running, np.array(computing, np.int64))

    def make_room(self, row_B: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Give rows blocks of their own to write to; None, and nothing changed, if there are too few.

        Returns:
            blocks to copy before anything is written, and where to.
        """
        table, size = self.table, self.blocks.block_size
        grown_N = row_B[table.num_tokens_R[row_B] > table.num_blocks_R[row_B] * size]
        forked_N = row_B[table.forked_R[row_B]]
        place_N = table.num_computed_R[forked_N] // size
        shared = table.block_RC[forked_N, place_N].tolist()
        # Where all holders write, the last one needs no copy.
        num_copies = sum(
            min(num, self.blocks.num_references(block) - 1) for block, num in Counter(shared).items()
        )
        fresh = self.blocks.allocate(len(grown_N) + num_copies)
        if fresh is None:
            return None
        copied, copy_to = [], fresh[len(grown_N) :]
        table.block_RC[grown_N, table.num_blocks_R[grown_N]] = fresh[: len(grown_N)]
        table.num_blocks_R[grown_N] += 1
        for at, block in enumerate(shared):
            if self.blocks.num_references(block) > 1:
                self.blocks.release([block])
                copied.append(at)
        table.block_RC[forked_N[copied], place_N[copied]] = copy_to
        table.forked_R[forked_N] = False
        return np.array(shared, np.int64)[copied], np.array(copy_to, np.int64)

    def register(self, row_B: np.ndarray) -> None:
        """Hand blocks that are full now to the prefix cache."""
        table, size = self.table, self.blocks.block_size
        full_B = table.num_computed_R[row_B] // size
        filled_B = (full_B > table.num_hashed_R[row_B]) & table.caches_R[row_B]
        row_N, full_N = row_B[filled_B], full_B[filled_B]
        count_N = full_N - table.num_hashed_R[row_N]
        row_M = np.repeat(row_N, count_N)
        place_M = np.arange(len(row_M)) + np.repeat(full_N - count_N.cumsum(), count_N)
        token_ML = table.token_RL[row_M[:, None], place_M[:, None] * size + np.arange(size)]
        places = zip(row_M.tolist(), place_M.tolist(), table.block_RC[row_M, place_M].tolist(), strict=True)
        for (row, place, block), token_L in zip(places, token_ML, strict=True):
            parent = table.digests[row] if place else root(self.version)
            table.digests[row] = self.cache.register(block, parent, token_L)
        table.num_hashed_R[row_N] = full_N

    def fork(self) -> None:
        """Let the families whose prompt is computed go on, each row for itself."""
        table, freed = self.table, []
        ready = [
            family
            for row, family in self.families.items()
            if family.rows[0] == row and table.num_computed_R[row] == table.num_prompt_R[row]
        ]
        for family in ready:
            leader, *heirs = family.rows
            held = table.blocks(leader)
            for _ in heirs:
                self.blocks.retain(held)
            if heirs:
                table.share(leader, heirs)
                table.forked_R[family.rows] = table.num_computed_R[leader] % self.blocks.block_size > 0
                freed += heirs
            self._close(family)
            for row in family.rows:
                del self.families[row]
        self.running = np.append(self.running, np.array(freed, np.int64))

    def leave(self, row: int) -> Request:
        """Free a row and its blocks; the first heir of a leader takes over what it has computed.

        `sweep` must follow, once for any number of rows.
        """
        table, family = self.table, self.families.pop(row, None)
        if family is not None:
            leads = family.rows[0] == row
            family.rows.remove(row)
            if not family.rows:
                self._close(family)
            elif leads:
                heir = family.rows[0]
                table.share(row, [heir])
                table.num_blocks_R[row] = 0
                self.running = np.where(self.running == row, heir, self.running)
        self.blocks.release(table.blocks(row))
        return table.take(row)

    def sweep(self) -> None:
        """Drop the rows that left from those that run."""
        self.running = self.running[self.table.used_R[self.running]]

    def restart(self, version: int) -> None:
        """Other weights: share nothing that was computed until now with requests that start from now on."""
        self.version = version
        self.cache.drop_all()
        self.table.caches_R[:] = False
        self._open.clear()

    def check(self, waiting: Sequence[Request]) -> None:
        """Prove that all of this, and the queue, agree; see `invariants.check_state`."""
        check_state(
            self.table,
            self.blocks,
            self.cache,
            waiting=waiting,
            running=self.running.tolist(),
            families={row: family.rows for row, family in self.families.items()},
        )

    def _close(self, family: Family) -> None:
        """Nobody joins this family any more."""
        if self._open.get(family.prompt) is family:
            del self._open[family.prompt]
