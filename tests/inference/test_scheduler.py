from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from millrace.inference.request import Request
from millrace.types import SamplingParams
from tests.inference.invariants import check_scheduler
from tests.inference.pool import (
    check_cut,
    check_empty,
    check_finished,
    expected,
    new_request,
    new_scheduler,
    pool_of,
    run,
    step,
)


def plans(**numbers: Any) -> Any:
    """A scheduler, and what draws token 9 for everybody and commits; it gives plan and ended."""
    scheduler = new_scheduler(**numbers)

    def advance() -> Any:
        plan = scheduler.schedule()
        assert plan is not None
        num = len(plan.sample_row_N)
        ended = scheduler.commit(plan, np.full(num, 9), np.full(num, -0.5, np.float32))
        check_scheduler(scheduler)
        return plan, ended

    return scheduler, advance


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("numbers", [{}, {"max_batch_tokens": 5}, {"num_blocks": 20}, {"max_requests": 3}])
def test_every_request_draws_what_it_would_draw_alone(seed: int, numbers: dict[str, int]) -> None:
    rng = random.Random(seed)
    scheduler = new_scheduler(**numbers)
    pool = pool_of(scheduler)
    prompts = [[rng.randrange(9) for _ in range(rng.randrange(1, 40))] for _ in range(5)]
    requests = [
        new_request(
            rng.choice(prompts),
            max_tokens=rng.randrange(1, 30),
            stop_token_ids=rng.choice([(), (3, 4)]),
            seed=rng.randrange(1000),
            priority=rng.randrange(-1, 2),
        )
        for _ in range(25)
    ]
    scheduler.add(requests)
    run(scheduler, pool)
    for request in requests:
        check_finished(request)
    check_empty(scheduler)
    assert {request.finish_reason for request in requests} == {"stop", "length"}


def test_running_requests_come_first_and_waiting_ones_take_what_is_left_of_the_budget() -> None:
    scheduler, advance = plans(max_batch_tokens=10)
    scheduler.add([new_request(range(7), max_tokens=5), new_request(range(20, 28), max_tokens=5)])
    plan, _ = advance()
    assert plan.start_B.tolist() == [0, 0] and plan.count_B.tolist() == [7, 3]
    assert plan.sample_row_N.tolist() == plan.row_B.tolist()[:1] and plan.sample_from_N.tolist() == [0]
    scheduler.add([new_request(range(40, 49), max_tokens=5)])
    plan, _ = advance()
    assert plan.start_B.tolist() == [7, 3, 0] and plan.count_B.tolist() == [1, 5, 4]
    assert plan.sample_row_N.tolist() == plan.row_B.tolist()[:2] and plan.sample_from_N.tolist() == [0, 1]
    plan, _ = advance()
    assert plan.start_B.tolist() == [8, 8, 4] and plan.count_B.tolist() == [1, 1, 5]
    assert plan.sample_from_N.tolist() == [0, 1, 2]
    for array in (plan.row_B, plan.start_B, plan.count_B, plan.sample_row_N, plan.sample_from_N):
        assert array.dtype == np.int64
    assert plan.copy_from_M.dtype == plan.copy_to_M.dtype == np.int64


def test_a_budget_that_is_spent_starts_nobody() -> None:
    scheduler, advance = plans(max_batch_tokens=3)
    scheduler.add([new_request([number], max_tokens=3) for number in range(5)])
    plan, _ = advance()
    assert plan.count_B.tolist() == [1, 1, 1] and scheduler.num_waiting == 2
    plan, _ = advance()
    assert plan.count_B.tolist() == [1, 1, 1] and scheduler.num_waiting == 2
    _, ended = advance()
    assert len(ended) == 3 and scheduler.num_running == 0


def test_a_row_beyond_the_budget_waits_for_its_turn() -> None:
    scheduler, advance = plans(max_batch_tokens=4)
    scheduler.add([new_request([1, 2], seed=seed, max_tokens=3) for seed in range(6)])
    plan, _ = advance()  # one computes the prompt for all
    assert plan.count_B.tolist() == [2] and len(plan.sample_row_N) == 6
    plan, _ = advance()
    assert plan.count_B.tolist() == [1, 1, 1, 1]
    assert advance()[0].row_B.tolist() == plan.row_B.tolist()
    plan, _ = advance()
    assert plan.count_B.tolist() == [1, 1] and scheduler.num_running == 2


def test_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler, advance = plans(max_batch_tokens=4)
    scheduler.add([new_request(range(9), max_tokens=2), new_request(range(20, 30), max_tokens=2)])
    counts = [advance()[0].count_B.tolist() for _ in range(6)]
    assert counts == [[4], [4], [1, 3], [1, 3], [4], [1]]


def test_requests_start_by_priority_and_then_by_arrival() -> None:
    scheduler, advance = plans(max_requests=1)
    names = {"late": 0, "low": 2, "first": -3, "later": 0, "second": -1}
    for name, priority in names.items():
        scheduler.add([new_request([len(name)], id=name, max_tokens=1, priority=priority)])
    order = [advance()[1][0].id for _ in names]
    assert order == ["first", "second", "late", "later", "low"]


def test_nobody_overtakes_a_request_that_must_wait_for_blocks() -> None:
    scheduler, advance = plans(num_blocks=5)
    scheduler.add([new_request(range(8), max_tokens=8)])
    advance()
    scheduler.add([new_request(range(20, 29), max_tokens=2), new_request([1], max_tokens=2)])
    assert len(advance()[0].row_B) == 1 and scheduler.num_waiting == 2


def test_a_running_request_keeps_a_free_block_to_grow_into() -> None:
    scheduler, advance = plans(num_blocks=7)
    scheduler.add([new_request([number] * 4, max_tokens=4) for number in range(5)])
    # One each, and with the fourth there would be none to grow into: 4 + 3 <= 7 < 5 + 4.
    assert len(advance()[0].row_B) == 4
    scheduler, advance = plans(num_blocks=6)
    scheduler.add([new_request([number] * 4, max_tokens=4) for number in range(5)])
    assert len(advance()[0].row_B) == 3


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_one_request_may_fill_the_whole_pool(num_blocks: int) -> None:
    scheduler = new_scheduler(num_blocks=num_blocks)
    requests = [
        new_request(range(3), max_tokens=num_blocks * 4 - 3, seed=4),
        new_request(range(num_blocks * 4 - 1), max_tokens=1, seed=5),
    ]
    scheduler.add(requests)
    run(scheduler, pool_of(scheduler))
    for request in requests:
        check_finished(request)
    check_empty(scheduler)


def test_a_stop_token_ends_a_completion_and_is_kept() -> None:
    alone = expected(new_request([1, 2], max_tokens=40, seed=8))[0]
    stop = alone[6]
    request = new_request([1, 2], max_tokens=40, seed=8, stop_token_ids=(99, stop))
    scheduler = new_scheduler()
    scheduler.add([request])
    run(scheduler, pool_of(scheduler))
    assert request.finish_reason == "stop" and request.generated.tolist() == alone[: alone.index(stop) + 1]


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens", "num_drawn", "reason"),
    [(0, 5, 1, "stop"), (1, 5, 2, "stop"), (3, 5, 4, "stop"), (4, 5, 5, "stop"), (5, 5, 5, "length")],
)
def test_no_stop_token_ends_a_completion_before_min_tokens(
    min_tokens: int, max_tokens: int, num_drawn: int, reason: str
) -> None:
    scheduler, advance = plans()
    request = new_request([1, 2], min_tokens=min_tokens, max_tokens=max_tokens, stop_token_ids=(9,))
    scheduler.add([request])
    while request.finish_reason is None:
        advance()
    assert (len(request.generated), request.finish_reason) == (num_drawn, reason)


def test_tokens_carry_the_version_that_drew_them() -> None:
    scheduler = new_scheduler()
    pool = pool_of(scheduler)
    request = new_request([1, 2, 3], max_tokens=6, seed=3)
    scheduler.add([request])
    for version in (0, 0, 4, 4, 4, 7):
        if version != scheduler.allocator.version:
            scheduler.allocator.restart(version)
        step(scheduler, pool)
    check_finished(request)
    assert request.versions.tolist() == [0, 0, 4, 4, 4, 7]


def test_nothing_to_do_is_no_plan() -> None:
    scheduler, advance = plans()
    assert scheduler.schedule() is None
    scheduler.add([])
    assert scheduler.schedule() is None
    scheduler.add([new_request([1], max_tokens=1)])
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)
    advance()
    assert scheduler.schedule() is None


def test_a_pause_of_all_stops_everything_and_one_of_new_lets_the_others_finish() -> None:
    scheduler, advance = plans()
    scheduler.add([new_request([1], max_tokens=3)])
    advance()
    scheduler.add([new_request([2], max_tokens=3)])
    scheduler.pause("all")
    assert scheduler.schedule() is None and (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.pause("new")
    assert [len(advance()[0].row_B) for _ in range(2)] == [1, 1]
    assert scheduler.schedule() is None and (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    scheduler.resume()
    assert len(advance()[0].row_B) == 1


def test_prefixes_are_found_in_running_and_in_ended_requests() -> None:
    scheduler, advance = plans()
    scheduler.add([new_request(range(10), max_tokens=2)])
    advance()
    scheduler.add([new_request([*range(9), 77], max_tokens=1)])
    plan, _ = advance()
    assert plan.start_B.tolist() == [10, 8] and plan.count_B.tolist() == [1, 2]
    assert (scheduler.cache.num_queries, scheduler.cache.num_hits) == (20, 8)
    # What was drawn is part of a prefix too: the last token drawn was never computed.
    scheduler.add([new_request([*range(10), 9, 9, 9, 9], max_tokens=1)])
    assert advance()[0].start_B.tolist() == [8]
    assert (scheduler.cache.num_queries, scheduler.cache.num_hits) == (34, 16)


def test_drawn_tokens_are_registered_when_they_fill_a_block() -> None:
    scheduler, advance = plans()
    scheduler.add([new_request(range(5), max_tokens=4)])
    for _ in range(4):
        advance()
    scheduler.add([new_request([*range(5), 9, 9, 9, 9], max_tokens=1)])
    assert advance()[0].start_B.tolist() == [8]


def test_without_prefix_caching_every_prompt_is_computed() -> None:
    scheduler, advance = plans(prefix_caching=False)
    scheduler.add([new_request(range(10), max_tokens=1) for _ in range(3)])
    assert advance()[0].count_B.tolist() == [10, 10, 10]
    scheduler.add([new_request(range(10), max_tokens=1)])
    assert advance()[0].count_B.tolist() == [10]
    assert (scheduler.cache.num_queries, scheduler.cache.num_hits, len(scheduler.cache)) == (0, 0, 0)


def test_new_weights_find_no_old_prefix() -> None:
    scheduler, advance = plans()
    scheduler.add([new_request(range(10), max_tokens=1)])
    advance()
    scheduler.allocator.restart(0)  # the same number, but other weights
    running = new_request(range(10), max_tokens=9)
    scheduler.add([running])
    assert advance()[0].count_B.tolist() == [10]
    scheduler.allocator.restart(3)
    for _ in range(3):
        advance()  # a block fills up, but it holds keys of two versions
    scheduler.add([new_request([*range(10), 9, 9, 9], max_tokens=1)])
    assert advance()[0].count_B.tolist() == [1, 13]
    scheduler.add([new_request(range(10), max_tokens=2)])
    assert advance()[0].count_B.tolist() == [1, 2]


def test_a_request_that_wants_logprobs_of_its_prompt_computes_all_of_it() -> None:
    scheduler, advance = plans()
    scheduler.add([new_request(range(10), max_tokens=1)])
    advance()
    scheduler.add([new_request(range(10), max_tokens=1, prompt_logprobs=True) for _ in range(2)])
    plan, _ = advance()
    assert plan.start_B.tolist() == [0, 0] and plan.count_B.tolist() == [10, 10]
    assert scheduler.cache.num_queries == 10


def test_more_stop_tokens_than_any_before_are_understood() -> None:
    scheduler, advance = plans()
    scheduler.add([new_request([1], max_tokens=9, stop_token_ids=(3,))])
    advance()
    scheduler.add([new_request([2], max_tokens=9, stop_token_ids=(5, 4, 9))])
    assert [request.prompt for request in advance()[1]] == [(2,)]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "sentence"),
    [
        (0, 1, "the prompt is empty; a completion needs at least one token to follow"),
        (9, 12, "the prompt has 9 tokens and max_tokens is 12; the model allows 20 in all: shorten"),
        (
            9,
            9,
            r"the prompt has 9 tokens and max_tokens is 9; the whole KV pool holds 16: make the pool larger",
        ),
    ],
)
def test_a_request_that_can_never_finish_is_refused(num_prompt: int, max_tokens: int, sentence: str) -> None:
    scheduler = new_scheduler(num_blocks=4, max_length=20)
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        scheduler.check(range(num_prompt), params)
    good, bad = new_request([1]), Request("", (1,) * num_prompt, params)
    good = Request("", (1,), SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match=f"^{sentence}"):
        scheduler.add([good, bad])
    assert scheduler.num_waiting == 0 and good.arrival == -1


def test_a_request_that_just_fits_is_taken() -> None:
    scheduler = new_scheduler(num_blocks=4, max_length=16)
    scheduler.add([new_request([1] * 9, max_tokens=7), new_request([1], max_tokens=15)])
    assert scheduler.num_waiting == 2
    scheduler = new_scheduler(num_blocks=4, max_length=15)
    with pytest.raises(ValueError, match="the model allows 15 in all"):
        scheduler.check([1] * 9, SamplingParams(max_tokens=7))


def test_a_request_is_added_once() -> None:
    scheduler, advance = plans()
    request = new_request([1], id="a", max_tokens=1)
    with pytest.raises(ValueError, match="^a request was given twice in one call; make one for each"):
        scheduler.add([request, request])
    scheduler.add([request])
    assert request.arrival == 0
    for _ in range(2):
        with pytest.raises(ValueError, match="^request a was added or ended before; make a new one$"):
            scheduler.add([request])
        if scheduler.num_waiting:
            advance()
    ended = new_request([1], id="b")
    scheduler.finish(ended, "abort")
    with pytest.raises(ValueError, match="^request b was added or ended before; make a new one$"):
        scheduler.add([ended])


@pytest.mark.parametrize(
    "name",
    ["num_blocks", "block_size", "max_batch_tokens", "max_requests", "max_length"],
)
def test_a_scheduler_of_nothing_is_refused(name: str) -> None:
    assert new_scheduler(**{name: 1}).num_waiting == 0
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1$"):
        new_scheduler(**{name: 0})


def test_a_plan_is_committed_once_and_whole() -> None:
    scheduler = new_scheduler()
    scheduler.add([new_request([1], max_tokens=5)])
    plan = scheduler.schedule()
    assert plan is not None
    one, none = np.array([3]), np.zeros(0, np.float32)
    with pytest.raises(
        ValueError, match="^1 rows sample, but 1 tokens and 0 log-probabilities were given; gi"
    ):
        scheduler.commit(plan, one, none)
    with pytest.raises(
        ValueError, match="^1 rows sample, but 0 tokens and 1 log-probabilities were given; gi"
    ):
        scheduler.commit(plan, none, one)
    assert scheduler.commit(plan, one, one) == []
    with pytest.raises(
        ValueError, match="^this plan is not the one being run; commit each plan once, before"
    ):
        scheduler.commit(plan, one, one)


@pytest.mark.slow
def test_a_thousand_requests_finish_on_a_pool_for_ten() -> None:
    rng = random.Random(5)
    scheduler = new_scheduler(num_blocks=60, max_batch_tokens=64)
    requests = [
        new_request([rng.randrange(50) for _ in range(rng.randrange(1, 20))], max_tokens=6, seed=number)
        for number in range(1000)
    ]
    scheduler.add(requests)
    pool = pool_of(scheduler)
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan, *pool.forward(scheduler.table, plan))
    for request in requests:
        check_finished(request)
        check_cut(request)
    check_empty(scheduler)
