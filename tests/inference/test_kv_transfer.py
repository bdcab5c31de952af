"""Export and import between two engines: what is taken, what is refused, and how long blocks are pinned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.inference.engine import PagedEngine, Tag
from millrace.inference.kv_blocks import KvBlock, KvPrefix, LeaseEnded
from millrace.models.load import Model
from millrace.types import SamplingParams
from tests.inference.fresh import paged, same
from tests.inference.invariants import check_engine
from tests.inference.test_engine import weights
from tests.models.tiny import tiny_model

ONE = SamplingParams(max_tokens=1)
SOME = SamplingParams(max_tokens=12, seed=4)
PROMPT = tuple(range(1, 31))  # seven blocks of four and two tokens


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def mixture() -> Model:
    return tiny_model("qwen3_moe")


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def exported(engine: PagedEngine, prompt: tuple[int, ...] = PROMPT, **options: Any) -> Any:
    """Compute a prompt; return the description of its blocks, and the blocks."""
    engine.generate([prompt], [ONE])
    lease = engine.export_prefix(prompt, **options)
    assert lease is not None
    check_engine(engine)
    with lease:
        blocks = list(lease.blocks())
    check_engine(engine)
    return lease.prefix, blocks


def taken(engine: PagedEngine, prefix: KvPrefix, blocks: Any, *, alarm: bool = False) -> tuple[int, int, str]:
    """Blocks imported and refused, and the reason; the state is checked, and whether the engine warns."""
    warned = pytest.warns(UserWarning, match="KV transfers brought") if alarm else nullcontext()
    with warned:
        done = engine.import_prefix(prefix, blocks)
    check_engine(engine)
    return done.num_imported, done.num_refused, done.reason


def damaged(block: KvBlock) -> KvBlock:
    data = block.data.copy()
    data[len(data) // 2] ^= 1
    return replace(block, data=data)


def test_a_prompt_is_handed_over_and_not_computed_again(llama: Model) -> None:
    prefix, blocks = exported(paged(llama))
    engine = paged(llama)
    assert engine.num_cached_blocks(PROMPT) == 0
    assert taken(engine, prefix, blocks) == (7, 0, "")
    assert engine.num_cached_blocks(PROMPT) == 7
    params = [replace(SOME, seed=seed) for seed in range(5)]
    # What is there is not copied again: the iterator is not even started.
    assert taken(engine, prefix, iter(lambda: 1 / 0, None)) == (0, 0, "")
    assert same(engine.generate([PROMPT] * 5, params), paged(llama).generate([PROMPT] * 5, params))
    stats = engine.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_imported, stats.prefix_hits) == (2, 28, 28)
    assert (stats.blocks_refused, stats.imported_fraction) == (0, 1.0)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("arrive", [0, 3, 6])
def test_what_does_not_arrive_is_computed_here(llama: Model, arrive: int) -> None:
    prefix, blocks = exported(paged(llama))
    engine = paged(llama)
    missing = f"missing: {7 - arrive} of 7 blocks did not arrive"
    assert taken(engine, prefix, blocks[:arrive], alarm=True) == (arrive, 0, missing)
    assert same(engine.generate([PROMPT], [SOME]), paged(llama).generate([PROMPT], [SOME]))
    stats = engine.stats()
    assert stats.prompt_tokens_computed == 30 - 4 * arrive
    assert stats.imported_fraction == arrive / 7


@pytest.mark.parametrize("bad", [0, 4])
def test_a_block_with_one_flipped_bit_is_refused_with_all_behind_it(llama: Model, bad: int) -> None:
    prefix, blocks = exported(paged(llama))
    engine = paged(llama)
    blocks[bad] = damaged(blocks[bad])
    reason = f"checksum: the bytes of block {bad} are not those that were exported"
    assert taken(engine, prefix, blocks, alarm=True) == (bad, 7 - bad, reason)
    assert same(engine.generate([PROMPT], [SOME]), paged(llama).generate([PROMPT], [SOME]))
    assert engine.stats().prompt_tokens_computed == 30 - 4 * bad


def test_blocks_of_other_engines_are_refused_by_name(llama: Model, mixture: Model) -> None:
    prefix, blocks = exported(paged(llama))
    newer = paged(llama)
    newer.update_weights(weights(llama), 1)
    for engine, reason in (
        (newer, "version: its policy version is 0, the engine's 1"),
        (paged(llama, block_size=8), "layout: its block_size is 4, the engine's 8"),
        (paged(copy.deepcopy(llama).bfloat16()), "layout: its dtype is float32, the engine's bfloat16"),
        (paged(mixture), "layout: its model_type is llama, the engine's qwen3_moe"),
        (paged(llama, prefix_caching=False), "off: the engine has no prefix cache"),
    ):
        num, refused, why = taken(engine, prefix, blocks, alarm=True)
        assert (num, refused, why[: len(reason)]) == (0, 7, reason)
        assert engine.num_cached_blocks(PROMPT) == 0 and engine.stats().blocks_refused == 7
    prefix, blocks = exported(paged(mixture))
    reason = "layout: its experts is None, the engine's (2, 2)"
    assert taken(paged(mixture, record_experts=True), prefix, blocks, alarm=True) == (0, 7, reason)


def test_recorded_experts_travel_with_their_blocks(mixture: Model) -> None:
    (whole,) = paged(mixture, record_experts=True).generate([PROMPT], [SOME])
    prefix, blocks = exported(paged(mixture, record_experts=True))
    engine = paged(mixture, record_experts=True)
    assert taken(engine, prefix, blocks) == (7, 0, "")
    (completion,) = engine.generate([PROMPT], [SOME])
    assert engine.stats().prompt_tokens_computed == 2
    assert whole.experts is not None and completion.experts is not None
    assert np.array_equal(completion.experts, whole.experts) and whole.experts[:28].min() >= 0
    assert same([completion], [whole])


def test_blocks_that_the_other_engine_has_are_not_sent(llama: Model) -> None:
    sender, engine = paged(llama), paged(llama)
    engine.generate([PROMPT[:14]], [ONE])
    skip = engine.num_cached_blocks(PROMPT)
    prefix, blocks = exported(sender, skip=skip)
    assert (skip, [block.index for block in blocks]) == (3, [3, 4, 5, 6])
    assert taken(engine, prefix, blocks) == (4, 0, "")
    empty, reason = paged(llama), "order: block 3 arrived where block 0 must follow"
    assert taken(empty, prefix, blocks, alarm=True) == (0, 4, reason)
    prefix, blocks = exported(sender)
    out_of_order = [*blocks[:2], blocks[3], blocks[2]]
    reason = "order: block 3 arrived where block 2 must follow"
    assert taken(paged(llama), prefix, out_of_order, alarm=True) == (2, 5, reason)
    assert sender.export_prefix(PROMPT, skip=7) is None and sender.export_prefix((1, 2)) is None
    check_engine(sender)


def test_an_error_of_the_carrier_reaches_the_caller_and_whole_blocks_stay(llama: Model) -> None:
    prompt = tuple(np.random.default_rng(0).integers(1, 40, 90).tolist())
    prefix, blocks = exported(paged(llama, max_cache_tokens=2048), prompt)

    def broken() -> Iterator[KvBlock]:
        yield from blocks[:20]
        raise ConnectionError("the other end has gone")

    engine = paged(llama)
    with pytest.warns(UserWarning, match="error: while blocks arrived"), pytest.raises(ConnectionError):
        engine.import_prefix(prefix, broken())
    check_engine(engine)
    assert (engine.num_cached_blocks(prompt), engine.stats().blocks_refused) == (16, 0)
    assert same(engine.generate([prompt], [SOME]), paged(llama).generate([prompt], [SOME]))


def test_requests_that_run_keep_their_blocks_and_one_more_each(llama: Model) -> None:
    prefix, blocks = exported(paged(llama))
    engine = paged(llama, max_cache_tokens=48)
    (request,) = engine.add(tuple(range(31, 39)) * 3, [SOME])
    engine.step()
    check_engine(engine)
    # Of twelve blocks the request has six; one stays free for it.
    assert taken(engine, prefix, blocks, alarm=True) == (5, 2, "room: only 5 blocks of the pool are free")
    while request.finish_reason is None:
        engine.step()
    assert engine.stats().num_preemptions == 0


@pytest.mark.slow
def test_leased_blocks_outlive_the_pressure_of_requests(llama: Model) -> None:
    clock = Clock()
    engine = paged(llama, max_cache_tokens=64, clock=clock)
    engine.generate([PROMPT], [ONE])
    lease = engine.export_prefix(PROMPT, lease_s=10.0)
    assert lease is not None and engine.stats().leased_blocks == 7
    before = [block.checksum for block in lease.blocks()]
    others = [tuple(numbers) for numbers in np.random.default_rng(1).integers(1, 40, (6, 14)).tolist()]
    engine.generate(others, [SOME] * 6)
    check_engine(engine)
    assert [block.checksum for block in lease.blocks()] == before
    clock.now_s = 9.0
    lease.renew(10.0)
    clock.now_s = 18.0
    assert taken(paged(llama), lease.prefix, lease.blocks()) == (7, 0, "")
    clock.now_s = 19.0
    engine.generate([(1, 2)], [ONE])  # a step ends what is due
    assert engine.stats().leased_blocks == 0
    check_engine(engine)
    engine.generate(others, [SOME] * 6)
    reason = (
        "lease: the lease has ended: it was released, its deadline passed, or the engine needed the blocks, "
    )
    num, refused, why = taken(paged(llama), lease.prefix, lease.blocks(), alarm=True)
    assert (num, refused, why[: len(reason)]) == (0, 0, reason)


@pytest.mark.parametrize("asleep", [None, "weights", "kv_cache"])
def test_leases_end_before_new_weights_and_sleep(llama: Model, asleep: Tag | None) -> None:
    engine = paged(tiny_model("llama"))
    engine.generate([PROMPT], [ONE])
    lease = engine.export_prefix(PROMPT)
    assert lease is not None
    if asleep is None:
        engine.update_weights(weights(llama), 1)
    else:
        engine.sleep([asleep])
        with pytest.raises(RuntimeError, match="asleep"):
            engine.export_prefix(PROMPT)
        with pytest.raises(RuntimeError, match="asleep"):
            engine.import_prefix(lease.prefix, ())
        engine.wake([asleep])
        engine.update_weights(weights(llama), 0)
    check_engine(engine)
    with pytest.raises(LeaseEnded):
        list(lease.blocks())
    lease.release()
    check_engine(engine)
    assert engine.stats().leased_blocks == 0 and engine.export_prefix(PROMPT) is None


def test_leases_pin_half_of_the_pool_and_stop_no_request(llama: Model) -> None:
    engine = paged(llama, max_cache_tokens=48, clock=Clock())
    engine.generate([PROMPT], [ONE])
    first = engine.export_prefix(PROMPT)
    assert first is not None and first.prefix.num_blocks == 6
    assert engine.export_prefix(PROMPT) is None
    # A request for ten of the twelve blocks: it is not refused, so it must run.
    long = tuple(range(1, 31))[::-1]
    assert same(
        engine.generate([long], [replace(SOME, max_tokens=10)]),
        paged(llama).generate([long], [replace(SOME, max_tokens=10)]),
    )
    check_engine(engine)
    with pytest.raises(LeaseEnded):
        list(first.blocks())


def test_numbers_that_make_no_lease_are_refused(llama: Model) -> None:
    engine = paged(llama)
    wrong: list[dict[str, Any]] = [{"skip": -1}, {"lease_s": 0.0}]
    for options in wrong:
        with pytest.raises(ValueError, match="they must be at least 0 and above 0"):
            engine.export_prefix(PROMPT, **options)
