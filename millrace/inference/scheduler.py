"""Which requests compute in the next forward, over which blocks. No torch, no text.

One budget of tokens a step and no phases: running requests first, each with the tokens it lacks, then waiting
ones by (priority, arrival) while budget, rows and blocks last. Steady decoding is numpy over all rows; Python
objects are touched when a request starts, forks, fills a block, is preempted or ends.

Requests with one prompt that are admitted before it is computed are a family: the first leads and computes
it, the others hold a row but no blocks until then, share its blocks afterwards and draw their first tokens
from its logits. The last block, where it is not full, is copied by each before its first write to it, and the
last to write keeps it.

B = rows that compute, N = rows that draw.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from millrace.inference.holdings import Holdings
from millrace.inference.request import FinishReason, Request
from millrace.types import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One forward; the arrays are int64.

    Attributes:
        row_B: rows of the request table that compute, each once.
        start_B: the first position each computes.
        count_B: how many positions each computes, at least 1.
        draw_row_N: rows that draw a token afterwards.
        draw_from_N: index into B; the logits after its last position are those that the row draws from. Rows
            that fork from one prompt name the same one.
        copy_from_M: blocks to copy before the forward, M in all.
        copy_to_M: where to; no block is in both.
    """

    row_B: np.ndarray
    start_B: np.ndarray
    count_B: np.ndarray
    draw_row_N: np.ndarray
    draw_from_N: np.ndarray
    copy_from_M: np.ndarray
    copy_to_M: np.ndarray


class Scheduler:
    """Decides every step; see the top of the file.

    `schedule`, the forward, `commit`, and again. Between these two, and at any other moment, requests may be
    added, ended or preempted; a plan that is never committed (its forward failed) is taken back by the next
    `schedule`, which lets its rows begin again.

    Attributes:
        table: the running requests.
        blocks: the blocks of the pool.
        cache: prefixes that blocks hold.
        paused: `new`: nothing that waits is admitted; `all`: `schedule` returns None.
        num_preemptions: requests that lost their row so far.
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
    ) -> None:
        """Nothing waits and nothing runs; the weights are at version 0.

        Args:
            num_blocks: blocks of the KV pool.
            block_size: tokens of a block.
            max_batch_tokens: tokens of one forward.
            max_requests: requests that run at once, the rows of the table.
            max_length: tokens of prompt and completion that the model allows.
            prefix_caching: share the keys and values of equal prefixes; without it every request computes
                its whole prompt.

        Raises:
            ValueError: a number is below 1.
        """
        for name, value in (
            ("max_batch_tokens", max_batch_tokens),
            ("max_requests", max_requests),
            ("max_length", max_length),
        ):
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self._holdings = Holdings(
            num_blocks=num_blocks,
            block_size=block_size,
            max_requests=max_requests,
            prefix_caching=prefix_caching,
        )
        self.table, self.blocks = self._holdings.table, self._holdings.blocks
        self.cache = self._holdings.cache
        self.paused: Literal["no", "new", "all"] = "no"
        self.num_preemptions = 0
        self._max_batch_tokens = max_batch_tokens
        self._max_length = max_length
        self._num_arrived = 0
        # Ascending; arrivals differ, so requests themselves are never compared.
        self._waiting: list[tuple[int, int, Request]] = []
        self._plan: Plan | None = None

    @property
    def version(self) -> int:
        """Of the weights in force: tokens that are committed carry it."""
        return self._holdings.version

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row, those that wait for the leader of their family included."""
        return self._holdings.num_running

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuse a request that could never finish.

        Raises:
            ValueError: the prompt is empty, or with `max_tokens` too long for the model or for the pool.
        """
        if not len(prompt):
            raise ValueError("the prompt is empty; a completion needs at least one token to follow")
        asked = f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}"
        total = len(prompt) + params.max_tokens
        if total > self._max_length:
            raise ValueError(
                f"{asked}; the model allows {self._max_length} in all: shorten the prompt or lower max_tokens"
            )
        slots = self.blocks.num_blocks * self.blocks.block_size
        if total > slots:
            raise ValueError(
                f"{asked}; the whole KV pool holds {slots}: make the pool larger, shorten the prompt or "
                "lower max_tokens"
            )

    def add(self, requests: Sequence[Request]) -> None:
        """Put requests into the queue, all or none.

        Raises:
            ValueError: one is given twice, was added or ended before, or is refused by `check`.
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
        """What the next forward does; None where nothing can run or need run now."""
        if self._plan is not None:
            rows, self._plan = self._plan.row_B.tolist(), None
            self.preempt([row for row in rows if self.table.used_R[row]])
        if self.paused == "all":
            return None
        num_preemptions = self.num_preemptions
        row_B, count_B = self._shares()
        while (copies := self._holdings.make_room(row_B)) is None:
            self.preempt([self._holdings.last()])
            row_B, count_B = self._shares()
        if self.num_preemptions == num_preemptions and self.paused == "no":
            rows, counts = self._admit(self._max_batch_tokens - int(count_B.sum()))
            row_B = np.append(row_B, np.array(rows, np.int64))
            count_B = np.append(count_B, np.array(counts, np.int64))
        if not len(row_B):
            return None
        start_B = self.table.num_computed_R[row_B]
        draw_from_N = (start_B + count_B == self.table.num_tokens_R[row_B]).nonzero()[0]
        draw_row_N = row_B[draw_from_N]
        if self._holdings.families:
            pairs = list(zip(draw_from_N.tolist(), draw_row_N.tolist(), strict=True))
            pairs += [(at, heir) for at, row in pairs for heir in self._holdings.heirs(row)]
            draw_from_N = np.array([at for at, _ in pairs], np.int64)
            draw_row_N = np.array([row for _, row in pairs], np.int64)
        plan = Plan(row_B, start_B, count_B, draw_row_N, draw_from_N, *copies)
        self._plan = plan
        return plan

    def commit(self, plan: Plan, token_N: np.ndarray, logprob_N: np.ndarray) -> list[Request]:
        """Take in what a forward gave.

        Requests that left since the plan was made are passed over.

        Args:
            plan: what the last `schedule` returned.
            token_N: the token each of `plan.draw_row_N` drew.
            logprob_N: its log-probability.

        Returns:
            the requests that ended: by a stop token, or because they are long enough.

        Raises:
            ValueError: the plan is not the last one, or was committed before, or the number of tokens or
                log-probabilities is not that of the rows that draw.
        """
        if plan is not self._plan:
            raise ValueError("this plan is not the one being run; commit each plan once, before the next")
        if not len(token_N) == len(logprob_N) == len(plan.draw_row_N):
            raise ValueError(
                f"{len(plan.draw_row_N)} rows draw, but {len(token_N)} tokens and {len(logprob_N)} "
                "log-probabilities were given; give one of each for every entry of draw_row_N"
            )
        self._plan = None
        table = self.table
        here_B = table.used_R[plan.row_B]
        row_B = plan.row_B[here_B]
        table.num_computed_R[row_B] += plan.count_B[here_B]
        self._holdings.register(row_B)
        valid_N = here_B[plan.draw_from_N] & table.used_R[plan.draw_row_N]
        if self._holdings.families:
            self._holdings.fork()
        row_N, token_N = plan.draw_row_N[valid_N], token_N[valid_N]
        position_N = table.num_tokens_R[row_N]
        table.num_tokens_R[row_N] += 1
        table.reserve(int(table.num_tokens_R.max()))
        table.token_RL[row_N, position_N] = token_N
        table.logprob_RL[row_N, position_N] = logprob_N[valid_N]
        table.version_RL[row_N, position_N] = self.version
        stopped_N = (table.stop_RS[row_N] == token_N[:, None]).any(1) & (position_N >= table.min_R[row_N])
        ended_N = stopped_N | (table.num_tokens_R[row_N] == table.limit_R[row_N])
        if not ended_N.any():
            return []
        ended = []
        for row, stopped in zip(row_N[ended_N].tolist(), stopped_N[ended_N].tolist(), strict=True):
            request = self._holdings.leave(row)
            request.finish_reason = "stop" if stopped else "length"
            ended.append(request)
        self._holdings.sweep()
        return ended

    def finish(self, request: Request, reason: FinishReason, why: str = "") -> None:
        """End a request, wherever it is; it keeps what it has drawn. One that ended before stays as it is."""
        if request.finish_reason is not None:
            return
        if request.row >= 0:
            self._holdings.leave(request.row)
            self._holdings.sweep()
        elif request.arrival >= 0:
            # The pair sorts before its triple.
            del self._waiting[bisect_left(self._waiting, (request.priority, request.arrival))]
        request.finish_reason, request.reason = reason, why

    def preempt(self, rows: Sequence[int]) -> None:
        """Take these rows, each of which somebody has, and their blocks; the requests wait and lose no token.

        The family of a leader, which holds nothing yet, waits with it.
        """
        # Heirs go first, or they would take over.
        leaving = dict.fromkeys(member for row in rows for member in (*self._holdings.heirs(row), row))
        requests = [self._holdings.leave(row) for row in leaving]
        self._holdings.sweep()
        for request in requests:
            insort(self._waiting, (request.priority, request.arrival, request))
        self.num_preemptions += len(requests)

    def preempt_all(self) -> None:
        """Preempt every running request."""
        self.preempt(self.table.used_R.nonzero()[0].tolist())

    def restart_prefix(self, version: int) -> None:
        """Other weights are in force: what was computed so far is no prefix of what starts from now on.

        Running requests go on with the keys and values they have, but share them with nobody new.
        """
        self._holdings.restart(version)

    def check_invariants(self) -> None:
        """Prove that blocks, tables, families and queue agree.

        Raises:
            AssertionError: they do not; the sentence says where.
        """
        self._holdings.check([request for *_, request in self._waiting])

    def _shares(self) -> tuple[np.ndarray, np.ndarray]:
        """The running rows that compute in this step, and how many tokens each."""
        row_B = self._holdings.running
        lack_B = self.table.num_tokens_R[row_B] - self.table.num_computed_R[row_B]
        count_B = np.diff(np.minimum(lack_B.cumsum(), self._max_batch_tokens), prepend=0)
        chosen_B = count_B > 0
        return row_B[chosen_B], count_B[chosen_B]

    def _admit(self, budget: int) -> tuple[list[int], list[int]]:
        """Start waiting requests; the rows that compute now, and how many tokens each."""
        starts, rows, counts = [], [], []
        for *_, request in self._waiting[: len(self.table.free_rows)]:
            start = self._holdings.start(request, may_compute=budget > 0)
            if start is None:
                break
            starts.append(start)
            if start.held is not None:
                lack = len(start.token_L) - start.num_hits * self.blocks.block_size
                counts.append(min(lack, budget))
                rows.append(start.row)
                budget -= counts[-1]
        del self._waiting[: len(starts)]
        if starts:
            self._holdings.seat(starts)
        return rows, counts
