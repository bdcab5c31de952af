"""Scheduler: selects the requests of the next forward and their KV blocks. No torch, no text.

A step has one token budget for prefill and decode together. Running requests come first, each with its
uncomputed tokens, then waiting ones by (priority, arrival) while budget, rows and blocks last. Steady
decoding is numpy over all rows; Python objects are touched when a request starts, forks, fills a block, is
preempted or ends.

Requests with an equal prompt that are admitted before the prompt is computed form a `PromptGroup`. The leader
computes the prompt. The followers hold a row but no blocks until then. Afterwards they share the leader's
blocks and sample their first tokens from its logits. If the last block is not full, each request
copies it before its first write to it (copy on write); the last writer needs no copy.

B = rows that compute, N = rows that sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millrace.inference.block_manager import BlockManager, check_positive
from millrace.inference.prefix_cache import PrefixCache, root
from millrace.inference.request import ExpertsOf, FinishReason, Request, RequestTable, check_lengths
from millrace.types import SamplingParams


@dataclass(slots=True, eq=False)
class PromptGroup:
    """A prompt group: a prompt that is being computed, and the rows of its requests, leader first."""

    prompt: tuple[int, ...]
    token_L: np.ndarray
    rows: list[int]


@dataclass(slots=True, eq=False)
class RequestStart:
    """An admitted request with its row, and all of its tokens.

    `blocks` holds these tokens, the first `num_hits` of them from the prefix cache; None for a follower,
    which waits for its leader.
    """

    request: Request
    row: int
    token_L: np.ndarray
    blocks: list[int] | None
    num_hits: int


class KVAllocator:
    """KV allocator: rows and blocks of the running requests; the scheduler makes the decisions.

    `running` are the rows with blocks, in the order of allocation; replaced, never written in place. `groups`
    has the prompt group of each row in one; a group may have a single row. Without `prefix_caching` nothing
    is shared.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_requests: int,
        prefix_caching: bool,
        experts_of: ExpertsOf | None = None,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.cache = PrefixCache(self.blocks)
        self.table = RequestTable(max_requests, block_size, experts_of)
        self.running = np.empty(0, np.int64)
        self.groups: dict[int, PromptGroup] = {}
        self.version = 0
        self._open: dict[tuple[int, ...], PromptGroup] = {}
        self.prefix_caching = prefix_caching

    @property
    def num_running(self) -> int:
        """Number of requests with a row, followers included."""
        return len(self.table.requests) - len(self.table.free_rows)

    def followers(self, row: int) -> list[int]:
        """Return the followers of a leader's row; empty for any other row."""
        group = self.groups.get(row)
        return group.rows[1:] if group is not None and group.rows[0] == row else []

    def last(self) -> int:
        """Return the running row to preempt first when blocks run out: the highest (priority, arrival)."""
        row_B = self.running
        priority_B = self.table.priority_R[row_B]
        row_B = row_B[priority_B == priority_B.max()]
        return int(row_B[self.table.arrival_R[row_B].argmax()])

    def start(self, request: Request, *, may_compute: bool) -> RequestStart | None:
        """Allocate a row for a request, and blocks or a leader; None, and no change, if it cannot start now.

        A row must be free. Without `may_compute` only a follower starts.
        """
        # A request that resumes, or needs prompt log-probabilities, joins no group.
        whole_prompt = not self.prefix_caching or request.params.prompt_logprobs
        alone = whole_prompt or len(request.generated) > 0
        group = None if alone else self._open.get(request.prompt)
        if group is not None:
            row = self.table.free_rows.pop()
            group.rows.append(row)
            self.groups[row] = group
            return RequestStart(request, row, group.token_L, None, 0)
        if not may_compute:
            return None
        token_L = request.known_tokens()
        hits = [] if whole_prompt else self.cache.match(token_L, self.version)
        num_new = -(-len(token_L) // self.blocks.block_size) - len(hits)
        # One free block is reserved for each running request, or their growth would soon preempt this one.
        fresh = self.blocks.allocate(num_new) if num_new + self.num_running <= self.blocks.num_free else None
        if fresh is None:
            self.blocks.release(hits)
            return None
        if not whole_prompt:
            self.cache.num_queries += len(token_L)
            self.cache.num_hits += len(hits) * self.blocks.block_size
        row = self.table.free_rows.pop()
        if not alone:
            self._open[request.prompt] = self.groups[row] = PromptGroup(request.prompt, token_L, [row])
        return RequestStart(request, row, token_L, hits + fresh, len(hits))

    def fill_rows(self, starts: Sequence[RequestStart]) -> None:
        """Fill the table rows of the admitted requests."""
        table = self.table
        rows = [start.row for start in starts]
        table.put(rows, [start.request for start in starts], [start.token_L for start in starts])
        table.caches_R[rows] = self.prefix_caching
        for start in starts:
            if start.blocks is not None:
                row, num_hits = start.row, start.num_hits
                table.block_RC[row, : len(start.blocks)] = start.blocks
                table.num_blocks_R[row] = len(start.blocks)
                if num_hits:
                    table.num_computed_R[row] = num_hits * self.blocks.block_size
                    table.num_hashed_R[row] = num_hits
                    table.digests[row] = self.cache.digest(start.blocks[num_hits - 1])
        computing = [start.row for start in starts if start.blocks is not None]
        self.running = np.append(self.running, np.array(computing, np.int64))

    def make_room(self, row_B: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Allocate blocks that rows can write to; None, and no change, if too few are free.

        Return source and target blocks of the copies to make before the forward.
        """
        table, size = self.table, self.blocks.block_size
        grown_N = row_B[table.num_tokens_R[row_B] > table.num_blocks_R[row_B] * size]
        forked_N = row_B[table.forked_R[row_B]]
        place_N = table.num_computed_R[forked_N] // size
        shared = table.block_RC[forked_N, place_N].tolist()
        # If all holders of a block write to it, the last one needs no copy.
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
        """Add newly full blocks to the prefix cache."""
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
        """Fork the groups with a computed prompt: followers share the leader's blocks, and the group ends."""
        table, freed = self.table, []
        ready = [
            group
            for row, group in self.groups.items()
            if group.rows[0] == row and table.num_computed_R[row] == table.num_prompt_R[row]
        ]
        for group in ready:
            leader, *followers = group.rows
            blocks = table.blocks(leader)
            for _ in followers:
                self.blocks.retain(blocks)
            if followers:
                table.share(leader, followers)
                table.forked_R[group.rows] = table.num_computed_R[leader] % self.blocks.block_size > 0
                freed += followers
            self._close(group)
            for row in group.rows:
                del self.groups[row]
        self.running = np.append(self.running, np.array(freed, np.int64))

    def free(self, row: int) -> Request:
        """Free a row and its blocks; if it leads a group, its first follower takes over role and blocks.

        Call `compact` afterwards, once for any number of rows.
        """
        table, group = self.table, self.groups.pop(row, None)
        if group is not None:
            leads = group.rows[0] == row
            group.rows.remove(row)
            if not group.rows:
                self._close(group)
            elif leads:
                follower = group.rows[0]
                table.share(row, [follower])
                table.num_blocks_R[row] = 0
                self.running = np.where(self.running == row, follower, self.running)
        self.blocks.release(table.blocks(row))
        return table.take(row)

    def compact(self) -> None:
        """Remove freed rows from `running`."""
        self.running = self.running[self.table.used_R[self.running]]

    def restart(self, version: int) -> None:
        """Start a policy version: no later request shares keys and values computed before.

        Running requests continue with their keys and values.
        """
        self.version = version
        self.cache.drop_all()
        self.table.caches_R[:] = False
        self._open.clear()

    def _close(self, group: PromptGroup) -> None:
        """Let no more requests join this group."""
        if self._open.get(group.prompt) is group:
            del self._open[group.prompt]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The plan of one forward; the arrays are int64.

    The rows `row_B` of the request table each compute `count_B` positions from `start_B` on. Then
    `sample_row_N` sample a token, from the logits of the last position of the entry `sample_from_N`, an index
    into B; rows of one prompt group have the same. Before, blocks `copy_from_M` are copied to `copy_to_M`; no
    block is in both.
    """

    row_B: np.ndarray
    start_B: np.ndarray
    count_B: np.ndarray
    sample_row_N: np.ndarray
    sample_from_N: np.ndarray
    copy_from_M: np.ndarray
    copy_to_M: np.ndarray


class Scheduler:
    """Plans every step; see the module docstring.

    A step is `schedule`, the forward, `commit`. Requests may be added, ended or preempted at any time, also
    between `schedule` and `commit`. If a plan is never committed (its forward failed), the next `schedule`
    discards it and preempts its rows.

    `max_batch_tokens` is the token budget of one forward, `max_requests` the rows of the table, `max_length`
    the tokens of prompt and completion together that the model allows. Without prefix caching every request
    computes its whole prompt. `experts_of` is that of the table. A number below 1 is a ValueError.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        max_requests: int,
        max_length: int,
        prefix_caching: bool = True,
        experts_of: ExpertsOf | None = None,
    ) -> None:
        check_positive(max_batch_tokens=max_batch_tokens, max_requests=max_requests, max_length=max_length)
        self.allocator = KVAllocator(
            num_blocks=num_blocks,
            block_size=block_size,
            max_requests=max_requests,
            prefix_caching=prefix_caching,
            experts_of=experts_of,
        )
        self.table, self.blocks = self.allocator.table, self.allocator.blocks
        self.cache = self.allocator.cache
        self.paused: Literal["no", "new", "all"] = "no"
        self.num_preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_length = max_length
        self._num_arrived = 0
        # Ascending; arrivals differ, so requests themselves are never compared.
        self._waiting: list[tuple[int, int, Request]] = []
        self._plan: Plan | None = None

    def pause(self, kind: Literal["new", "all"]) -> None:
        """Admit no waiting request until `resume`; with `all`, `schedule` also returns None."""
        self.paused = kind

    def resume(self) -> None:
        """End a pause."""
        self.paused = "no"

    @property
    def num_waiting(self) -> int:
        """Number of queued requests, which have no row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests with a row, followers included."""
        return self.allocator.num_running

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise for a request that could never finish.

        Raises:
            ValueError: the prompt is empty, or with `max_tokens` too long for the model or for the pool.
        """
        num_slots = self.blocks.num_blocks * self.blocks.block_size
        check_lengths(prompt, params, max_length=self._max_length, num_slots=num_slots)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none.

        Raises:
            ValueError: a request is given twice, was added or ended before, or fails `check`.
        """
        for request in requests:
            if request.arrival >= 0 or request.finish_reason is not None:
                raise ValueError(f"request {request.id} was added or ended before; make a new one")
            self.check(request.prompt, request.params)
        if len(set(requests)) < len(requests):
            raise ValueError("a request was given twice in one call; make one for each completion")
        for request in requests:
            request.arrival = self._num_arrived
            self._num_arrived += 1
            insort(self._waiting, (request.priority, request.arrival, request))

    def schedule(self) -> Plan | None:
        """Plan the next forward; None if no request can run."""
        if self._plan is not None:
            rows, self._plan = self._plan.row_B.tolist(), None
            self.preempt([row for row in rows if self.table.used_R[row]])
        if self.paused == "all":
            return None
        num_preemptions = self.num_preemptions
        row_B, count_B = self._shares()
        while (copies := self.allocator.make_room(row_B)) is None:
            self.preempt([self.allocator.last()])
            row_B, count_B = self._shares()
        if self.num_preemptions == num_preemptions and self.paused == "no":
            rows, counts = self._admit(self._max_batch_tokens - int(count_B.sum()))
            row_B = np.append(row_B, np.array(rows, np.int64))
            count_B = np.append(count_B, np.array(counts, np.int64))
        if not len(row_B):
            return None
        start_B = self.table.num_computed_R[row_B]
        sample_from_N = (start_B + count_B == self.table.num_tokens_R[row_B]).nonzero()[0]
        sample_row_N = row_B[sample_from_N]
        if self.allocator.groups:
            pairs = list(zip(sample_from_N.tolist(), sample_row_N.tolist(), strict=True))
            pairs += [(at, follower) for at, row in pairs for follower in self.allocator.followers(row)]
            sample_from_N = np.array([at for at, _ in pairs], np.int64)
            sample_row_N = np.array([row for _, row in pairs], np.int64)
        plan = Plan(row_B, start_B, count_B, sample_row_N, sample_from_N, *copies)
        self._plan = plan
        return plan

    def commit(self, plan: Plan, token_N: np.ndarray, logprob_N: np.ndarray) -> list[Request]:
        """Append the sampled tokens of a forward to their requests; return those that ended.

        There are one token and one log-probability for each of `plan.sample_row_N`. Requests that ended or
        were preempted since `schedule` are skipped.

        Raises:
            ValueError: the plan is not the last one, was committed before, or the number of tokens or
                log-probabilities is not N.
        """
        if plan is not self._plan:
            raise ValueError("this plan is not the one being run; commit each plan once, before the next")
        if not len(token_N) == len(logprob_N) == len(plan.sample_row_N):
            raise ValueError(
                f"{len(plan.sample_row_N)} rows sample, but {len(token_N)} tokens and {len(logprob_N)} "
                "log-probabilities were given; give one of each for every entry of sample_row_N"
            )
        self._plan = None
        table = self.table
        here_B = table.used_R[plan.row_B]
        row_B = plan.row_B[here_B]
        table.num_computed_R[row_B] += plan.count_B[here_B]
        self.allocator.register(row_B)
        valid_N = here_B[plan.sample_from_N] & table.used_R[plan.sample_row_N]
        if self.allocator.groups:
            self.allocator.fork()
        row_N, token_N = plan.sample_row_N[valid_N], token_N[valid_N]
        position_N = table.num_tokens_R[row_N]
        table.num_tokens_R[row_N] += 1
        table.reserve(int(table.num_tokens_R.max()))
        table.token_RL[row_N, position_N] = token_N
        table.logprob_RL[row_N, position_N] = logprob_N[valid_N]
        table.version_RL[row_N, position_N] = self.allocator.version
        stopped_N = (table.stop_RS[row_N] == token_N[:, None]).any(1) & (position_N >= table.min_R[row_N])
        ended_N = stopped_N | (table.num_tokens_R[row_N] == table.limit_R[row_N])
        if not ended_N.any():
            return []
        ended = []
        for row, stopped in zip(row_N[ended_N].tolist(), stopped_N[ended_N].tolist(), strict=True):
            request = self.allocator.free(row)
            request.finish_reason = "stop" if stopped else "length"
            ended.append(request)
        self.allocator.compact()
        return ended

    def finish(self, request: Request, reason: FinishReason, why: str = "") -> None:
        """End a running or queued request; it keeps its tokens. An ended request is not changed."""
        if request.finish_reason is not None:
            return
        if request.row >= 0:
            self.allocator.free(request.row)
            self.allocator.compact()
        elif request.arrival >= 0:
            # The pair sorts before its triple.
            del self._waiting[bisect_left(self._waiting, (request.priority, request.arrival))]
        request.finish_reason, request.reason = reason, why

    def preempt(self, rows: Sequence[int]) -> None:
        """Free these used rows and their blocks, and queue the requests again; they keep their tokens.

        The followers of a leader, which hold no blocks yet, are preempted with it.
        """
        # Followers leave first, or the first of them would become leader.
        preempted = dict.fromkeys(member for row in rows for member in (*self.allocator.followers(row), row))
        requests = [self.allocator.free(row) for row in preempted]
        self.allocator.compact()
        for request in requests:
            insort(self._waiting, (request.priority, request.arrival, request))
        self.num_preemptions += len(requests)

    def preempt_all(self) -> None:
        """Preempt every running request."""
        self.preempt(self.table.used_R.nonzero()[0].tolist())

    def _shares(self) -> tuple[np.ndarray, np.ndarray]:
        """The running rows that compute in this step, with their numbers of tokens."""
        row_B = self.allocator.running
        lack_B = self.table.num_tokens_R[row_B] - self.table.num_computed_R[row_B]
        count_B = np.diff(np.minimum(lack_B.cumsum(), self._max_batch_tokens), prepend=0)
        chosen_B = count_B > 0
        return row_B[chosen_B], count_B[chosen_B]

    def _admit(self, budget: int) -> tuple[list[int], list[int]]:
        """Admit waiting requests; return the rows that compute now, with their numbers of tokens."""
        starts, rows, counts = [], [], []
        for *_, request in self._waiting[: len(self.table.free_rows)]:
            start = self.allocator.start(request, may_compute=budget > 0)
            if start is None:
                break
            starts.append(start)
            if start.blocks is not None:
                lack = len(start.token_L) - start.num_hits * self.blocks.block_size
                counts.append(min(lack, budget))
                rows.append(start.row)
                budget -= counts[-1]
        del self._waiting[: len(starts)]
        if starts:
            self.allocator.fill_rows(starts)
        return rows, counts
