from __future__ import annotations

import pytest

from millrace.inference.request import Request
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


def siblings(num: int, length: int, **params: int) -> list[Request]:
    return [
        new_request(range(length), id=str(n), **({"max_tokens": 6, "seed": n} | params)) for n in range(num)
    ]


@pytest.mark.slow_beyond(13)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("num", [1, 2, 7])
def test_a_prompt_is_computed_once_for_all_its_samples(num: int, length: int) -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    requests = siblings(num, length)
    scheduler.add(requests)
    step(scheduler, pool)
    assert pool.num_computed == length
    for request in requests:
        assert scheduler.table.num_tokens_R[request.row] == length + 1
    assert scheduler.blocks.num_free == 500 - -(-length // 4)
    step(scheduler, pool)
    # The last to write keeps the block that is not full; a full one is copied by nobody.
    assert pool.num_copies == (num - 1 if length % 4 else 0)
    run(scheduler, pool)
    assert pool.num_computed == length + 5 * num
    for request in requests:
        check_finished(request)
    check_empty(scheduler)


def test_a_family_waits_for_all_chunks_and_draws_in_one_step() -> None:
    scheduler = new_scheduler(max_batch_tokens=4)
    pool = pool_of(scheduler)
    requests = siblings(3, 10)
    scheduler.add(requests)
    step(scheduler, pool)
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 0)
    late = new_request(range(10), id="late", max_tokens=6, seed=44)
    scheduler.add([late])
    other = new_request(range(9), max_tokens=6, seed=45)
    scheduler.add([other])
    step(scheduler, pool)  # the late one joins, although no budget is left; the other one cannot
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 1)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.count_B.tolist() == [2, 1]  # the prefix of the other one is known by now
    assert plan.sample_row_N.tolist() == [
        plan.row_B[0],
        plan.row_B[1],
        *(r.row for r in [*requests[1:], late]),
    ]
    assert plan.sample_from_N.tolist() == [0, 1, 0, 0, 0]
    scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    run(scheduler, pool)
    for request in [*requests, late, other]:
        check_finished(request)


def test_who_comes_after_the_prompt_is_computed_starts_from_its_prefix() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    scheduler.add(siblings(1, 10))
    step(scheduler, pool)
    late = new_request(range(10), max_tokens=6, seed=44)
    scheduler.add([late])
    step(scheduler, pool)
    assert pool.num_computed == 10 + 1 + 2
    run(scheduler, pool)
    check_finished(late)


def test_a_family_takes_the_rows_there_are_and_the_rest_follows() -> None:
    scheduler = new_scheduler(max_requests=3)
    pool = pool_of(scheduler)
    requests = siblings(8, 7)
    scheduler.add(requests)
    step(scheduler, pool)
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 5)
    run(scheduler, pool)
    for request in requests:
        check_finished(request)
    assert pool.num_computed == 7 + 3 + 3 + 8 * 5  # the second and third time one block of 4 is found


def test_who_wants_logprobs_of_the_prompt_joins_no_family() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    plain, scored = siblings(2, 5), siblings(2, 5, prompt_logprobs=True)
    scheduler.add([plain[0], scored[0], plain[1], scored[1]])
    plan = scheduler.schedule()
    assert plan is not None
    leaders = [plain[0], scored[0], scored[1]]
    assert [scheduler.table.requests[row] for row in plan.row_B.tolist()] == leaders
    assert plan.sample_from_N.tolist() == [0, 1, 2, 0]
    scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    run(scheduler, pool)
    for request in [*plain, *scored]:
        check_finished(request)


@pytest.mark.slow_beyond(11)
@pytest.mark.parametrize("num_chunks", [0, 1, 2])
@pytest.mark.parametrize("gone", [(0,), (0, 1), (1,), (2, 0), (0, 1, 2)])
def test_the_next_sibling_leads_when_the_leader_is_aborted(num_chunks: int, gone: tuple[int, ...]) -> None:
    scheduler = new_scheduler(max_batch_tokens=4)
    pool = pool_of(scheduler)
    requests = siblings(3, 11)
    scheduler.add(requests)
    for _ in range(num_chunks):
        step(scheduler, pool)
    for number in gone:
        scheduler.finish(requests[number], "abort")
        check_scheduler(scheduler)
    joins = new_request(range(11), max_tokens=6, seed=50)
    scheduler.add([joins])
    run(scheduler, pool)
    left = [request for n, request in enumerate(requests) if n not in gone]
    for request in [*left, joins]:
        check_finished(request)
    # Nothing is computed twice: what nobody took over is found in the cache.
    assert pool.num_computed == 11 + 5 * (len(left) + 1)
    check_empty(scheduler)


def test_an_abort_during_the_forward_hands_on_what_was_computed_before_it() -> None:
    scheduler = new_scheduler(max_batch_tokens=4)
    pool = pool_of(scheduler)
    requests = siblings(3, 7)
    scheduler.add(requests)
    step(scheduler, pool)
    plan = scheduler.schedule()
    assert plan is not None and len(plan.sample_row_N) == 3
    drawn = pool.forward(scheduler.table, plan)
    scheduler.finish(requests[0], "abort")
    scheduler.commit(plan, *drawn)
    check_scheduler(scheduler)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.row_B.tolist() == [requests[1].row] and plan.start_B.tolist() == [4]
    assert plan.sample_row_N.tolist() == [requests[1].row, requests[2].row]
    scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    run(scheduler, pool)
    for request in requests[1:]:
        check_finished(request)
    check_cut(requests[0])
    assert len(requests[0].generated) == 0
    check_empty(scheduler)


def test_a_sibling_that_leaves_during_the_forward_is_passed_over() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    requests = siblings(4, 6)
    scheduler.add(requests)
    plan = scheduler.schedule()
    assert plan is not None
    drawn = pool.forward(scheduler.table, plan)
    scheduler.finish(requests[1], "abort")
    scheduler.preempt([requests[2].row])
    scheduler.commit(plan, *drawn)
    check_scheduler(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    run(scheduler, pool)
    for number in (0, 2, 3):
        check_finished(requests[number])
    assert len(requests[1].generated) == 0


def test_a_preempted_leader_takes_its_family_back_into_the_queue() -> None:
    scheduler = new_scheduler(max_batch_tokens=4)
    pool = pool_of(scheduler)
    requests = siblings(3, 7)
    scheduler.add(requests)
    step(scheduler, pool)
    scheduler.preempt([requests[1].row])
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (2, 1, 1)
    scheduler.preempt([requests[0].row])
    check_scheduler(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (0, 3, 3)
    assert scheduler.blocks.num_free == 500
    run(scheduler, pool)
    for request in requests:
        check_finished(request)
    assert pool.num_computed == 7 + 3 * 5  # its first block is found again


def test_siblings_that_find_no_blocks_of_their_own_are_preempted_and_lose_nothing() -> None:
    scheduler = new_scheduler(num_blocks=4)
    pool = pool_of(scheduler)
    requests = siblings(6, 6)
    scheduler.add(requests)
    step(scheduler, pool)
    assert scheduler.num_running == 6
    plan = scheduler.schedule()
    assert plan is not None
    # Two blocks are free: three can write, two of them to a copy.
    assert len(plan.row_B) == 3 and len(plan.copy_from_M) == 2
    assert [request.row >= 0 for request in requests] == [True] * 3 + [False] * 3
    assert [len(request.generated) for request in requests[3:]] == [1, 1, 1]
    scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    run(scheduler, pool)
    for request in requests:
        check_finished(request)
    check_empty(scheduler)


def test_a_sibling_whose_turn_comes_later_still_finds_the_block_it_shares() -> None:
    scheduler = new_scheduler(max_batch_tokens=2)
    pool = pool_of(scheduler)
    requests = siblings(5, 2, max_tokens=5)
    scheduler.add(requests)
    step(scheduler, pool)
    copies = []
    while scheduler.num_running:
        before = pool.num_copies
        step(scheduler, pool)
        copies.append(pool.num_copies - before)
    # Two write at a time; the fifth, and last, keeps what is left.
    assert copies[0] == 2 and sum(copies) == 4
    for request in requests:
        check_finished(request)


def test_a_sibling_that_ends_with_its_first_token_copies_nothing() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    requests = siblings(5, 6, max_tokens=1)
    requests[2] = new_request(range(6), max_tokens=3, seed=2)
    scheduler.add(requests)
    run(scheduler, pool)
    for request in requests:
        check_finished(request)
    assert pool.num_copies == 0
    check_empty(scheduler)


def test_new_weights_close_a_family_to_newcomers() -> None:
    scheduler = new_scheduler(max_batch_tokens=4)
    pool = pool_of(scheduler)
    requests = siblings(2, 7)
    scheduler.add(requests)
    step(scheduler, pool)
    scheduler.allocator.restart(1)
    late = siblings(2, 7)
    scheduler.add(late)
    scheduler.finish(requests[0], "abort")  # its sibling goes on with the old keys
    run(scheduler, pool)
    for request in [requests[1], *late]:
        check_finished(request)
    assert pool.num_computed == 7 + 5 + 7 + 2 * 5
    check_empty(scheduler)


def test_a_request_that_resumes_joins_no_family() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    first = new_request(range(7), max_tokens=6, seed=70)
    scheduler.add([first])
    step(scheduler, pool)
    scheduler.preempt([first.row])
    requests = siblings(2, 7)
    scheduler.add(requests)
    plan = scheduler.schedule()
    assert plan is not None
    # First comes back with its drawn token; the siblings find its prefix, and the second follows the first.
    assert plan.count_B.tolist() == [4, 3]
    assert [scheduler.table.requests[row] for row in plan.row_B.tolist()] == [first, requests[0]]
    scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    run(scheduler, pool)
    for request in [first, *requests]:
        check_finished(request)
