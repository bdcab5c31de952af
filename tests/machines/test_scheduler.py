"""Random operations on the scheduler: whatever happens, tokens are those that each request draws alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millrace.inference.request import Request
from millrace.inference.scheduler import Plan
from tests.inference.invariants import check_scheduler
from tests.inference.pool import (
    check_cut,
    check_empty,
    check_finished,
    new_request,
    new_scheduler,
    pool_of,
    run,
)

MAX_WAITING = 30


class World:
    """A scheduler, the pool that runs its plans, and every request so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.choice([1, 2, 3, 4, 8])
        self.num_slots = rng.choice([8, 24, 100, 400]) // self.size * self.size
        self.scheduler = new_scheduler(
            num_blocks=self.num_slots // self.size,
            block_size=self.size,
            max_batch_tokens=rng.choice([1, 3, 7, 20, 100]),
            max_requests=rng.choice([1, 2, 5, 16]),
            prefix_caching=rng.random() < 0.85,
        )
        self.pool = pool_of(self.scheduler)
        longest = max(2, min(30, self.num_slots // 2))
        self.prompts = [[rng.randrange(5) for _ in range(rng.randrange(1, longest))] for _ in range(4)]
        self.prompts.append([*self.prompts[0], 1, 2])
        self.requests: list[Request] = []
        self.recent: list[Request] = []
        self.flying: tuple[Plan, np.ndarray, np.ndarray] | None = None

    def add(self) -> None:
        if self.scheduler.num_waiting > MAX_WAITING:
            return
        rng, added = self.rng, []
        prompt = rng.choice(self.prompts)
        for _ in range(rng.choice([1, 1, 2, 5])):
            max_tokens = rng.choice([1, 2, 5, 12])
            if len(prompt) + max_tokens <= self.num_slots:
                params: dict[str, Any] = {
                    "max_tokens": max_tokens,
                    "min_tokens": rng.choice([0, 0, min(2, max_tokens)]),
                    "stop_token_ids": rng.choice([(), (1, 2, 3), (4,)]),
                    "seed": rng.randrange(99),
                    "prompt_logprobs": rng.random() < 0.1,
                    "priority": rng.choice([0, 0, 0, 1, -1]),
                }
                added.append(new_request(prompt, **params))
        self.scheduler.add(added)
        self.requests += added
        self.recent = self.requests[-30:]

    def finish(self) -> None:
        if self.recent:
            request = self.rng.choice(self.recent)
            self.scheduler.finish(request, self.rng.choice(["abort", "stop", "error"]), "x")
            assert request.finish_reason is not None
            check_cut(request)

    def preempt(self) -> None:
        running = [request for request in self.recent if request.row >= 0]
        if running:
            request = self.rng.choice(running)
            self.scheduler.preempt([request.row])
            assert request.row == -1
            check_cut(request)

    def preempt_all(self) -> None:
        self.scheduler.preempt_all()
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks

    def restart(self) -> None:
        self.scheduler.allocator.restart(self.scheduler.allocator.version + self.rng.choice([0, 1]))

    def pause(self) -> None:
        kind = self.rng.choice(["no", "no", "new", "all"])
        self.scheduler.resume() if kind == "no" else self.scheduler.pause(kind)

    def schedule(self) -> None:
        """Also where the last plan was not committed; one forward in ten fails."""
        self.flying = None
        plan = self.scheduler.schedule()
        if plan is not None and self.rng.random() < 0.9:
            self.flying = plan, *self.pool.forward(self.scheduler.table, plan)

    def commit(self) -> None:
        if self.flying is not None:
            plan, token_N, logprob_N = self.flying
            self.flying = None
            for request in self.scheduler.commit(plan, token_N, logprob_N):
                check_finished(request)

    def settle(self) -> None:
        """Everything ends, and nothing is left behind."""
        self.scheduler.resume()
        run(self.scheduler, self.pool)
        for request in self.requests:
            check_cut(request)
            if request.finish_reason == "length":
                check_finished(request)
            assert request.finish_reason is not None
        check_empty(self.scheduler)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 10**6))
    def start(self, seed: int) -> None:
        self.world = World(random.Random(seed))

    @rule()
    def add(self) -> None:
        self.world.add()

    @rule(kind=st.sampled_from(["finish", "preempt", "preempt_all", "restart", "pause"]))
    def disturb(self, kind: str) -> None:
        getattr(self.world, kind)()

    @rule()
    def schedule(self) -> None:
        self.world.schedule()

    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule(num=st.integers(1, 5))
    def step(self, num: int) -> None:
        for _ in range(num):
            self.world.schedule()
            self.world.commit()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            check_scheduler(self.world.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=30, stateful_step_count=30)

OPERATIONS = ("add", "finish", "preempt", "preempt_all", "restart", "pause", "schedule", "commit")
SHARES = (12, 6, 4, 1, 2, 3, 36, 36)


def random_life(seed: int, num_operations: int) -> World:
    world = World(random.Random(seed))
    for kind in world.rng.choices(OPERATIONS, SHARES, k=num_operations):
        getattr(world, kind)()
        check_scheduler(world.scheduler)
    world.settle()
    return world


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(10))
def test_random_lives_end_well(seed: int) -> None:
    assert all(request.finish_reason for request in random_life(seed, 150).requests)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 150))
def test_a_hundred_thousand_operations_break_nothing(seed: int) -> None:
    world = random_life(seed, 2000)
    assert len(world.requests) > 20
