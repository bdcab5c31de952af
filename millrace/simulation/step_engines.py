"""An engine on a virtual clock that runs the real scheduler; its steps take what a model says. No torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from millrace.inference.engine_sizes import EngineSizes
from millrace.inference.kv_blocks import KvLeases, LeaseEnded
from millrace.inference.next_plan import next_plan
from millrace.inference.prefix_cache import root
from millrace.inference.request import Request
from millrace.inference.scheduler import Plan, Scheduler
from millrace.planner.engine_cost import EngineCost, step_load
from millrace.types import Completion, SamplingParams

# Tokens that no prompt has, so that nothing is found in the prefix cache that a real engine might not.
FIRST_TOKEN = 1 << 30
# Longer than any simulated transfer waits.
LEASE_S = 1e12
# Seconds of a step with this plan.
StepSeconds = Callable[[Plan], float]
# So many tokens that a step samples, int32.
Sample = Callable[[int], np.ndarray]


def step_seconds(cost: EngineCost) -> StepSeconds:
    """Return the seconds of a step as a cost model predicts them."""
    return lambda plan: cost.seconds(step_load(plan.count_B, plan.start_B))


class StepResult(NamedTuple):
    """A step: its seconds, the requests that got a token, and those of them that ended with it."""

    seconds: float
    sampled: list[Request]
    ended: list[Request]


class StepEngine(Protocol):
    """An engine that a simulation advances step by step, real or not."""

    def add(self, id: str, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        """Queue a request."""
        ...

    def step(self) -> StepResult | None:
        """Run a step; None if no request can run."""
        ...


class ModelledEngine:
    """The real scheduler with steps of given seconds, and tokens of `sample`; else all tokens differ.

    Requests end at `max_tokens`. `leases` pin blocks of prompts that another engine is to get.
    """

    def __init__(self, sizes: EngineSizes, seconds: StepSeconds, sample: Sample | None = None) -> None:
        self.scheduler = Scheduler(
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_batch_tokens=sizes.max_batch_tokens,
            max_requests=sizes.max_requests,
            max_length=sizes.max_length,
        )
        self.leases = KvLeases(self.scheduler.blocks, lambda: 0.0)
        self.block_bytes, self._seconds = sizes.block_bytes, seconds
        numbers = count(FIRST_TOKEN)
        self._sample = sample or (lambda num: np.fromiter(numbers, np.int32, num))

    @property
    def num_slots(self) -> int:
        """Tokens of the KV pool."""
        return self.scheduler.blocks.num_blocks * self.scheduler.blocks.block_size

    def add(
        self, id: str, prompt: tuple[int, ...], params: SamplingParams, *, first_token: int | None = None
    ) -> Request:
        """Queue a request, of which another engine may have sampled the first token."""
        request = Request(id, prompt, params)
        if first_token is not None:
            one = np.zeros(1, np.float32), np.zeros(1, np.int32)
            request.resume(Completion((first_token,), *one, finish_reason="abort", text=""))
        self.scheduler.add([request])
        return request

    def step(self) -> StepResult | None:
        """Plan a step and commit its tokens; the caller's clock decides when they are there."""
        plan = next_plan(self.scheduler, self.leases)
        if plan is None:
            return None
        sampled = [self.scheduler.table.request(row) for row in plan.sample_row_N.tolist()]
        token_N = self._sample(len(sampled))
        ended = self.scheduler.commit(plan, token_N, np.zeros(len(sampled), np.float32))
        return StepResult(self._seconds(plan), sampled, ended)

    def export_prefix(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """Pin the cached blocks of a prompt as `PagedEngine` does; return the lease and how many they are."""
        found = self.scheduler.cache.match(prompt, self.scheduler.allocator.version)
        pinned, rest = found[: self.leases.room], found[self.leases.room :]
        self.scheduler.blocks.release(rest)
        return self.leases.open(pinned, LEASE_S), len(pinned)

    def end_lease(self, number: int) -> int:
        """End a lease; return its blocks, 0 if the engine needed them and it had ended before."""
        try:
            num_blocks = len(self.leases.blocks(number))
        except LeaseEnded:
            return 0
        self.leases.end(number)
        return num_blocks

    def num_cached(self, prompt: tuple[int, ...]) -> int:
        """Return how many blocks at the beginning of a prompt are cached."""
        found = self.scheduler.cache.match(prompt, self.scheduler.allocator.version)
        self.scheduler.blocks.release(found)
        return len(found)

    def has_room(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens could start now, by the rule of the KV allocator."""
        needed = -(-num_tokens // self.scheduler.blocks.block_size)
        return needed + self.scheduler.num_running <= self.scheduler.blocks.num_free

    def import_prefix(self, prompt: tuple[int, ...], num_blocks: int) -> int:
        """Add so many blocks of a prompt to the prefix cache, as `PagedEngine` does; return how many."""
        scheduler, version = self.scheduler, self.scheduler.allocator.version
        size = scheduler.blocks.block_size
        token_ids = np.array(prompt[: num_blocks * size], np.int32)
        held = scheduler.cache.match(np.append(token_ids, np.int32(0)), version)
        room = max(0, scheduler.blocks.num_free - scheduler.num_running)
        fresh = scheduler.blocks.allocate(max(0, min(room, num_blocks - len(held)))) or []
        digest = scheduler.cache.digest(held[-1]) if held else root(version)
        for index, block in enumerate(fresh, len(held)):
            digest = scheduler.cache.register(block, digest, token_ids[index * size : (index + 1) * size])
        scheduler.blocks.release(held + fresh)
        return len(fresh)
