from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.inference.request import Request
from millrace.inference.scheduler import Scheduler
from tests.inference.invariants import check_scheduler
from tests.inference.pool import (
    check_cut,
    check_empty,
    check_finished,
    new_request,
    new_scheduler,
    pool_of,
    run,
    step,
)


def crowd(priorities: list[int], **numbers: Any) -> tuple[Scheduler, list[Request]]:
    """Requests of one block each that will need four, in a pool of two for each."""
    scheduler = new_scheduler(**({"num_blocks": 2 * len(priorities)} | numbers))
    requests = [
        new_request([number] * 4, id=str(number), max_tokens=12, seed=number, priority=priority)
        for number, priority in enumerate(priorities)
    ]
    scheduler.add(requests)
    return scheduler, requests


@pytest.mark.parametrize(
    ("priorities", "first"), [([0, 0, 0], "2"), ([5, 0, 0], "0"), ([0, 3, 1], "1"), ([1, 1, 0], "1")]
)
def test_the_request_of_highest_priority_and_arrival_makes_room(priorities: list[int], first: str) -> None:
    scheduler, requests = crowd(priorities)
    pool = pool_of(scheduler)
    while True:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, *pool.forward(scheduler.table, plan))
        if scheduler.num_preemptions:
            break
    assert [request.id for request in requests if request.row < 0] == [first]
    assert scheduler.num_preemptions == 1 and scheduler.num_running == 2 and scheduler.num_waiting == 1
    run(scheduler, pool)
    for request in requests:
        check_finished(request)
    check_empty(scheduler)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler, requests = crowd([0, 0, 1])
    pool = pool_of(scheduler)
    for _ in range(5):
        step(scheduler, pool)
    late = new_request([50], max_tokens=1, priority=-1)
    while not scheduler.num_preemptions:
        assert scheduler.num_running == 3
        if scheduler.blocks.num_free == 0 and late.arrival < 0:
            scheduler.add([late])
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    assert late.row == -1 and scheduler.num_waiting == 2
    run(scheduler, pool)
    for request in [*requests, late]:
        check_finished(request)


def test_a_preempted_request_goes_on_where_it_was_and_finds_its_own_prefix() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    request = new_request(range(6), max_tokens=9, seed=2)
    scheduler.add([request])
    for _ in range(4):
        step(scheduler, pool)
    scheduler.preempt([request.row])
    check_scheduler(scheduler)
    assert (request.row, len(request.generated)) == (-1, 4)
    check_cut(request)
    plan = scheduler.schedule()
    assert plan is not None
    # 10 tokens are known and 9 were computed: two full blocks of 4.
    assert plan.start_B.tolist() == [8] and plan.count_B.tolist() == [2]
    scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    run(scheduler, pool)
    check_finished(request)
    assert scheduler.num_preemptions == 1


def test_preempt_all_empties_the_pool_and_keeps_the_order() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    requests = [new_request([number] * 3, id=str(number), max_tokens=5, seed=number) for number in range(7)]
    scheduler.add(requests)
    step(scheduler, pool)
    step(scheduler, pool)
    scheduler.preempt_all()
    check_scheduler(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (0, 7, 7)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert [len(request.generated) for request in requests] == [2] * 7
    plan = scheduler.schedule()
    assert plan is not None
    in_order = [scheduler.table.requests[row] for row in plan.row_B.tolist()]
    assert in_order == requests
    run(scheduler, pool)
    for request in requests:
        check_finished(request)


@pytest.mark.parametrize("state", ["new", "waiting", "running", "preempted", "planned", "ended"])
def test_a_request_can_be_ended_in_any_state_and_only_once(state: str) -> None:
    scheduler = new_scheduler(max_requests=2)
    pool = pool_of(scheduler)
    other = new_request([9], max_tokens=9, seed=1)
    request = new_request(range(6), max_tokens=5, seed=2)
    scheduler.add([other])
    if state != "new":
        scheduler.add([request])
    num_steps = {"running": 3, "preempted": 2, "ended": 5}.get(state, 0)
    for _ in range(num_steps):
        step(scheduler, pool)
    plan = scheduler.schedule() if state == "planned" else None
    if state == "preempted":
        scheduler.preempt([request.row])
    scheduler.finish(request, "abort", "the client left")
    check_scheduler(scheduler)
    if plan is not None:
        assert len(plan.sample_row_N) == 2
        assert scheduler.commit(plan, *_drawn(scheduler, pool, plan)) == []
    if state == "ended":
        check_finished(request)
        assert request.reason == ""
    else:
        check_cut(request)
        assert (request.finish_reason, request.reason) == ("abort", "the client left")
        assert len(request.generated) == num_steps
    scheduler.finish(request, "error", "again")
    assert request.finish_reason in ("abort", "length") and request.reason != "again"
    run(scheduler, pool)
    check_finished(other)
    check_empty(scheduler)


def _drawn(scheduler: Scheduler, pool: Any, plan: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the rows that are still there draw; 0 for those that left."""
    there_N = scheduler.table.used_R[plan.sample_row_N]
    num = len(there_N)
    token_N, logprob_N = np.zeros(num, np.int64), np.zeros(num, np.float32)
    part = type(plan)(
        *(plan.row_B, plan.start_B, plan.count_B),
        *(plan.sample_row_N[there_N], plan.sample_from_N[there_N]),
        *(plan.copy_from_M, plan.copy_to_M),
    )
    token_N[there_N], logprob_N[there_N] = pool.forward(scheduler.table, part)
    return token_N, logprob_N


def test_an_aborted_request_leaves_the_middle_of_the_queue() -> None:
    scheduler = new_scheduler(max_requests=1)
    requests = [new_request([n], id=str(n), max_tokens=1, priority=n % 2) for n in range(6)]
    scheduler.add(requests)
    assert [request.arrival for request in requests] == list(range(6))
    scheduler.finish(requests[2], "abort")
    scheduler.finish(requests[3], "abort")
    check_scheduler(scheduler)
    pool = pool_of(scheduler)
    order: list[str] = []
    while (ended := step(scheduler, pool)) is not None:
        order += [request.id for request in ended]
    assert order == ["0", "4", "1", "5"]


def test_a_plan_whose_forward_failed_is_taken_back() -> None:
    scheduler = new_scheduler(num_blocks=50)
    pool = pool_of(scheduler)
    requests = [new_request([1, 2, 3], max_tokens=4, seed=seed) for seed in range(3)]
    requests += [new_request(range(5), max_tokens=6)]
    scheduler.add(requests)
    assert scheduler.schedule() is not None
    for _ in range(3):
        step(scheduler, pool)
        assert scheduler.schedule() is not None  # copies are planned here, and never made
    scheduler.pause("all")
    assert scheduler.schedule() is None
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 4)
    check_scheduler(scheduler)
    scheduler.resume()
    run(scheduler, pool)
    for request in requests:
        check_finished(request)
    check_empty(scheduler)


def test_what_leaves_during_a_forward_does_not_disturb_its_commit() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    requests = [new_request([number], max_tokens=3, seed=number) for number in range(4)]
    scheduler.add(requests)
    step(scheduler, pool)
    plan = scheduler.schedule()
    assert plan is not None
    drawn = pool.forward(scheduler.table, plan)
    scheduler.finish(requests[1], "error", "no number")
    scheduler.preempt([requests[2].row])
    scheduler.commit(plan, *drawn)
    check_scheduler(scheduler)
    assert [len(request.generated) for request in requests[1:3]] == [1, 1]
    run(scheduler, pool)
    for number in (0, 2, 3):
        check_finished(requests[number])
    check_cut(requests[1])
    scheduler.add([new_request([5], max_tokens=2)])
    plan = scheduler.schedule()
    assert plan is not None
    drawn = pool.forward(scheduler.table, plan)
    scheduler.preempt_all()
    assert scheduler.commit(plan, *drawn) == []
    assert run(scheduler, pool) == 2
    check_empty(scheduler)
