"""A model and a KV pool small enough for the scheduler's tests.

A slot holds a hash of every token up to its own, computed from the slot before it, which is found through the
block table. So one slot that is missing, stale, overwritten or another's changes every token drawn from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.inference.request import Request, RequestTable
from millrace.inference.scheduler import Plan, Scheduler
from millrace.types import SamplingParams
from tests.inference.invariants import check_scheduler

VOCABULARY = 50
LIMIT = 1 << 61


def mixed(*numbers: int) -> int:
    value = 7
    for number in numbers:
        value = (value * 6364136223846793005 + number + 1442695040888963407) % LIMIT
        value ^= value >> 29
    return value


def next_token(hashed: int, params: SamplingParams, position: int) -> tuple[int, float]:
    """The token drawn at this position of the completion, and its log-probability."""
    value = mixed(hashed, params.seed, position)
    return value % VOCABULARY, -float(value % 1000) / 128


def expected(request: Request) -> tuple[list[int], list[float], str]:
    """What the request draws when nobody else is there: tokens, log-probabilities, why it ends."""
    hashed = 0
    for token in request.prompt:
        hashed = mixed(hashed, token)
    tokens: list[int] = []
    logprobs: list[float] = []
    params = request.params
    while True:
        token, logprob = next_token(hashed, params, len(tokens))
        tokens.append(token)
        logprobs.append(logprob)
        if token in params.stop_token_ids and len(tokens) > params.min_tokens:
            return tokens, logprobs, "stop"
        if len(tokens) == params.max_tokens:
            return tokens, logprobs, "length"
        hashed = mixed(hashed, token)


class Pool:
    """Runs plans; `num_computed` counts the tokens it had to compute."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.block_size = block_size
        self.num_computed = 0
        self.num_copies = 0

    def read(self, table: RequestTable, row: int, position: int) -> int:
        if position < 0:
            return 0
        block, slot = divmod(position, self.block_size)
        return self.slots[table.block_RC[row, block]][slot]

    def forward(self, table: RequestTable, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Copy, compute, draw: tokens and log-probabilities of `plan.sample_row_N`."""
        assert not set(plan.copy_from_M.tolist()) & set(plan.copy_to_M.tolist())
        self.num_copies += len(plan.copy_from_M)
        for source, target in zip(plan.copy_from_M.tolist(), plan.copy_to_M.tolist(), strict=True):
            self.slots[target] = list(self.slots[source])
        for row, start, count in zip(
            plan.row_B.tolist(), plan.start_B.tolist(), plan.count_B.tolist(), strict=True
        ):
            self.num_computed += count
            for position in range(start, start + count):
                hashed = mixed(self.read(table, row, position - 1), int(table.token_RL[row, position]))
                block, slot = divmod(position, self.block_size)
                self.slots[table.block_RC[row, block]][slot] = hashed
        drawn = []
        for row, at in zip(plan.sample_row_N.tolist(), plan.sample_from_N.tolist(), strict=True):
            last = int(plan.start_B[at] + plan.count_B[at]) - 1
            request = table.requests[row]
            assert request is not None
            hashed = self.read(table, int(plan.row_B[at]), last)
            drawn.append(
                next_token(hashed, request.params, int(table.num_tokens_R[row]) - len(request.prompt))
            )
        return np.array([t for t, _ in drawn], np.int64), np.array([p for _, p in drawn], np.float32)


def new_scheduler(**numbers: Any) -> Scheduler:
    """Room for everything, unless the test says otherwise."""
    defaults = {
        "num_blocks": 500,
        "block_size": 4,
        "max_batch_tokens": 1000,
        "max_requests": 100,
        "max_length": 10_000,
    }
    return Scheduler(**(defaults | numbers))


def pool_of(scheduler: Scheduler) -> Pool:
    return Pool(scheduler.blocks.num_blocks, scheduler.blocks.block_size)


def step(scheduler: Scheduler, pool: Pool) -> list[Request] | None:
    """One whole step; those that ended, or None where there was nothing to do."""
    plan = scheduler.schedule()
    if plan is None:
        return None
    check_scheduler(scheduler)
    ended = scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    check_scheduler(scheduler)
    return ended


def run(scheduler: Scheduler, pool: Pool, limit: int = 10_000) -> int:
    """Steps until nothing is left to do; how many."""
    for num_steps in range(limit):
        if step(scheduler, pool) is None:
            return num_steps
    raise AssertionError(f"still at work after {limit} steps")


def new_request(prompt: Any, id: str = "", **params: Any) -> Request:
    """A request; its priority may be among the parameters."""
    priority = params.pop("priority", 0)
    return Request(id or str(prompt), tuple(prompt), SamplingParams(**params), priority=priority)


def check_finished(request: Request) -> None:
    """It ended by itself, with the tokens it would have drawn alone."""
    tokens, logprobs, reason = expected(request)
    assert request.generated.tolist() == tokens
    assert request.logprobs.tolist() == logprobs
    assert request.finish_reason == reason
    assert len(request.versions) == len(tokens)
    assert request.row == -1


def check_cut(request: Request) -> None:
    """It was ended, or is on its way, with the first of the tokens that it would have drawn alone."""
    tokens, logprobs, _ = expected(request)
    num = len(request.generated)
    assert request.generated.tolist() == tokens[:num]
    assert request.logprobs.tolist() == logprobs[:num]


def check_empty(scheduler: Scheduler) -> None:
    """Nobody is left, and every block is free."""
    check_scheduler(scheduler)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
