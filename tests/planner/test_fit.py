"""The simplest layout that fits is chosen, and advice leads to one that does."""

from __future__ import annotations

from dataclasses import replace

from millrace.planner.fit import Fit, advice, choose, fits, gigabytes
from millrace.planner.layout import Split
from millrace.planner.memory import Workload, memory_per_rank
from millrace.planner.model_shape import ModelShape
from tests.planner import shapes

QWEN = ModelShape.of(shapes.QWEN3_8B)
MIXTURE = ModelShape.of(shapes.QWEN3_30B)
WORK = Workload(
    prompt_tokens=1024,
    completion_tokens=2048,
    num_sequences=1024,
    samples_per_prompt=8,
    micro_batch_tokens=16384,
    max_requests=256,
)


def test_sharding_alone_is_chosen_where_it_fits():
    fit = choose(QWEN, replace(WORK, checkpointing="full"), 8, 141e9)
    assert (fit.split, fit.fits, fit.why) == (Split(dp_shard=8), True, "the simplest layout there is")
    assert fit.memory == memory_per_rank(QWEN, fit.split, replace(WORK, checkpointing="full"), 141e9)


def test_as_little_tensor_parallel_as_is_needed_is_added():
    fit = choose(QWEN, WORK, 8, 141e9)
    one, two = (memory_per_rank(QWEN, Split(dp_shard=8 // tp, tp=tp), WORK, 141e9) for tp in (1, 2))
    assert fit.split == Split(dp_shard=2, tp=4) and fits(fit.memory, 141e9)
    assert not fits(one, 141e9) and not fits(two, 141e9)
    assert fit.why == f"the simplest that fits: dp_shard=8 would take {gigabytes(one.peak)} GB"


def test_where_nothing_fits_the_layout_that_takes_least_is_named():
    fit = choose(QWEN, WORK, 2, 24e9)
    rivals = [Split(dp_shard=2), Split(tp=2), Split(cp=2), Split(pp=2)]
    peaks = {split: memory_per_rank(QWEN, split, WORK, 24e9).peak for split in rivals}
    assert (fit.split, fit.fits) == (min(peaks, key=peaks.get), False)
    assert fit.why == "none of 4 layouts fits, this one takes least"


def test_layouts_that_do_not_divide_the_model_are_passed_over():
    odd = ModelShape.of(shapes.QWEN3_8B | {"num_attention_heads": 7, "num_key_value_heads": 7})
    assert choose(odd, WORK, 8, 100e9).split.tp == 1


def test_experts_are_shared_before_sequences_are():
    lean = replace(WORK, checkpointing="full", offload=True, sampler_tp=8, micro_batch_tokens=WORK.longest)
    tensor = memory_per_rank(MIXTURE, Split(dp_shard=2, tp=4), lean, 80e9)
    assert choose(MIXTURE, lean, 8, tensor.peak / 0.95 + 1).split == Split(dp_shard=2, tp=4)
    assert choose(MIXTURE, lean, 8, tensor.peak / 0.95 - 1).split == Split(dp_shard=2, tp=4, ep=2)


def test_advice_is_cumulative_and_ends_where_it_fits():
    given = choose(QWEN, WORK, 8, 60e9)
    assert not given.fits
    changes = advice(QWEN, WORK, given, 60e9, free=True)
    assert [change.text for change in changes] == ["--checkpointing full"]
    assert changes[0].fit == choose(QWEN, replace(WORK, checkpointing="full"), 8, 60e9)
    assert changes[0].fit.fits


def test_advice_keeps_a_layout_that_was_asked_for():
    memory = memory_per_rank(QWEN, Split(dp_shard=2), WORK, 48e9)
    changes = advice(QWEN, WORK, Fit(Split(dp_shard=2), memory, False, ""), 48e9, free=False)
    assert [change.text for change in changes] == [
        "--checkpointing full",
        "policy.tokens_per_micro_batch=3072",
        "--offload",
    ]
    peaks = [memory.peak, *(change.fit.memory.peak for change in changes)]
    assert peaks == sorted(peaks, reverse=True)
    assert {change.fit.split for change in changes} == {Split(dp_shard=2)}
    last = replace(WORK, checkpointing="full", micro_batch_tokens=3072, offload=True)
    assert changes[-1].fit.memory == memory_per_rank(QWEN, Split(dp_shard=2), last, 48e9)


def test_what_fits_needs_no_advice():
    fit = choose(QWEN, replace(WORK, checkpointing="full"), 8, 141e9)
    assert advice(QWEN, WORK, fit, 141e9, free=True) == []


def test_only_a_share_of_the_device_may_be_used():
    memory = memory_per_rank(QWEN, Split(dp_shard=8), WORK, 80e9)
    assert fits(memory, memory.peak / 0.95 + 1) and not fits(memory, memory.peak / 0.95 - 1)


def test_small_numbers_keep_two_places():
    assert [gigabytes(size) for size in (1234567890, 999e6, 4.2e6)] == ["1.2", "1.00", "0.00"]
