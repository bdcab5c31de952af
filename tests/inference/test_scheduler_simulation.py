"""The scheduler on a virtual clock: a workload of rollouts in a pool that is far too small for it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace.inference.request import Request
from millrace.inference.scheduler import Scheduler
from tests.inference.pool import check_empty, check_finished, new_request, new_scheduler, pool_of

NUM_GROUPS, GROUP = 25, 8
STEP_S, TOKEN_S = 0.010, 0.0005


def rollouts(seed: int) -> list[Request]:
    """Groups of samples whose lengths have a long tail."""
    rng = random.Random(seed)
    requests = []
    for _ in range(NUM_GROUPS):
        prompt = [rng.randrange(50) for _ in range(rng.randrange(10, 60))]
        for _ in range(GROUP):
            length = min(1 + int(rng.lognormvariate(3.0, 1.0)), 150)
            requests.append(new_request(prompt, max_tokens=length, seed=rng.randrange(10**6)))
    return requests


def simulate(scheduler: Scheduler, requests: list[Request], every: int = 0) -> float:
    """Run to the end; the seconds it took. Each `every` steps the last request that runs is preempted."""
    pool = pool_of(scheduler)
    scheduler.add(requests)
    num_steps, now_s = 0, 0.0
    while (plan := scheduler.schedule()) is not None:
        drawn = pool.forward(scheduler.table, plan)
        now_s += STEP_S + TOKEN_S * int(plan.count_B.sum())
        scheduler.commit(plan, *drawn)
        num_steps += 1
        if every and num_steps % every == 0 and scheduler.num_running:
            scheduler.preempt(scheduler.table.used_R.nonzero()[0][-1:].tolist())
    check_empty(scheduler)
    return now_s


def small(**numbers: bool) -> Scheduler:
    """Blocks for ten requests of 100 tokens."""
    sizes = {"num_blocks": 125, "block_size": 8, "max_batch_tokens": 64, "max_requests": 64}
    return new_scheduler(**sizes, **numbers)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_rollouts_finish_in_a_pool_for_ten(seed: int) -> None:
    scheduler, requests = small(), rollouts(seed)
    simulate(scheduler, requests)
    for request in requests:
        check_finished(request)
    assert scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(3))
def test_sharing_prompts_shortens_the_makespan(seed: int) -> None:
    makespan_s = {}
    for caching in (True, False):
        requests = rollouts(seed)
        makespan_s[caching] = simulate(small(prefix_caching=caching), requests)
        for request in requests:
            check_finished(request)
    assert makespan_s[True] < 0.8 * makespan_s[False]


@pytest.mark.slow
def test_preemption_costs_time_and_changes_no_token() -> None:
    requests, disturbed = rollouts(7), rollouts(7)
    calm_s = simulate(small(), requests)
    scheduler = small()
    assert simulate(scheduler, disturbed, every=5) > calm_s
    for one, other in zip(requests, disturbed, strict=True):
        assert np.array_equal(one.generated, other.generated)
        assert np.array_equal(one.logprobs, other.logprobs)
    assert scheduler.num_preemptions > 40
