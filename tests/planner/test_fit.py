"""The simplest layout that fits is chosen, and advice leads to one that does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.errors import PlanError
from millrace.planner.fit import advice, choose, fits, gigabytes, judge
from millrace.planner.layout import Layout
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
    weight_bytes=2,
    moment_bytes=2,
    max_requests=256,
)
LEAN = replace(WORK, checkpointing="full")


def refuse(layout: Layout) -> str | None:
    return None


def unsliced(layout: Layout) -> str | None:
    return "no slices" if layout.tp > 1 else None


def test_sharding_alone_is_chosen_where_it_fits():
    fit = choose(QWEN, LEAN, 8, 141e9, refuse=refuse)
    assert (fit.layout, fit.fits, fit.why) == (Layout(dp_shard=8), True, "the simplest layout there is")
    assert fit.memory == memory_per_rank(QWEN, fit.layout, LEAN, 141e9)


def test_as_little_tensor_parallel_as_is_needed_is_added():
    fit = choose(QWEN, WORK, 8, 141e9, refuse=refuse)
    one, two = (memory_per_rank(QWEN, Layout(dp_shard=8 // tp, tp=tp), WORK, 141e9) for tp in (1, 2))
    assert fit.layout == Layout(dp_shard=2, tp=4) and fits(fit.memory, 141e9)
    assert not fits(one, 141e9) and not fits(two, 141e9)
    assert fit.why == f"the simplest that fits: dp_shard=8 would take {gigabytes(one.peak)} GB"


def test_where_nothing_fits_the_layout_that_takes_least_is_named():
    fit = choose(QWEN, WORK, 2, 24e9, refuse=refuse)
    rivals = [Layout(dp_shard=2), Layout(tp=2), Layout(cp=2), Layout(pp=2)]
    peaks = {layout: memory_per_rank(QWEN, layout, WORK, 24e9).peak for layout in rivals}
    assert (fit.layout, fit.fits) == (min(peaks, key=peaks.get), False)
    assert fit.why == "none of 4 layouts fits, this one takes least"


def test_layouts_that_cannot_be_used_are_passed_over():
    odd = ModelShape.of(shapes.QWEN3_8B | {"num_attention_heads": 7, "num_key_value_heads": 7})
    assert choose(odd, WORK, 8, 100e9, refuse=refuse).layout.tp == 1
    rest = choose(QWEN, WORK, 8, 141e9, refuse=unsliced)
    assert (rest.layout, rest.fits) == (Layout(dp_shard=4, cp=2), True)


def test_ranks_that_no_layout_can_use_are_an_error_with_the_reason():
    with pytest.raises(PlanError) as refused:
        choose(QWEN, WORK, 8, 141e9, refuse=lambda layout: f"{layout} is not for adapters")
    assert str(refused.value) == "no layout of 8 ranks can be used: dp_shard=8 is not for adapters"


def test_experts_are_shared_before_sequences_are():
    lean = replace(LEAN, offload=True, micro_batch_tokens=WORK.longest, cache_tokens=100_000)
    sharded = memory_per_rank(MIXTURE, Layout(dp_shard=8), lean, 200e9).training / 0.95
    first, then = (choose(MIXTURE, lean, 8, sharded + more, refuse=unsliced) for more in (1, -1))
    assert first.layout == Layout(dp_shard=8)
    assert (then.layout, then.fits) == (Layout(dp_shard=8, ep=2), True)


def test_advice_is_cumulative_and_ends_where_it_fits():
    given = choose(QWEN, WORK, 2, 60e9, refuse=refuse)
    assert not given.fits
    changes = advice(QWEN, WORK, given, 60e9, refuse=refuse)
    assert [change.text for change in changes] == ["mesh.activation_checkpointing=full", "mesh.offload=true"]
    assert changes[0].fit == choose(QWEN, LEAN, 2, 60e9, refuse=refuse)
    assert changes[1].fit == choose(QWEN, replace(LEAN, offload=True), 2, 60e9, refuse=refuse)
    assert [change.fit.fits for change in changes] == [False, True]


def test_another_layout_is_advised_before_any_setting():
    given = judge(QWEN, Layout(dp_shard=8), WORK, 141e9)
    changes = advice(QWEN, WORK, given, 141e9, refuse=refuse)
    assert [change.text for change in changes] == ["another layout"]
    assert changes[0].fit == choose(QWEN, WORK, 8, 141e9, refuse=refuse)


def test_a_rank_alone_is_not_told_to_change_how_weights_are_shared():
    given = choose(QWEN, WORK, 1, 80e9, refuse=refuse)
    changes = advice(QWEN, WORK, given, 80e9, refuse=refuse)
    texts = [
        "policy.tokens_per_micro_batch=3072",
        "mesh.activation_checkpointing=full",
        "policy.optimizer.kind=adamw_8bit",
    ]
    assert [change.text for change in changes] == texts
    shorter = replace(WORK, micro_batch_tokens=3072)
    assert changes[0].fit == choose(QWEN, shorter, 1, 80e9, refuse=refuse)
    # Moments of bfloat16 become codes of one byte, and a scale of four for 256 of them.
    coded = replace(shorter, checkpointing="full", moment_bytes=1 + 4 / 256)
    assert changes[2].fit == choose(QWEN, coded, 1, 80e9, refuse=refuse)


def test_a_narrower_forward_is_advised_where_weights_are_wide():
    wide = replace(LEAN, weight_bytes=4, compute_bytes=4, moment_bytes=4, cache_tokens=10_000)
    given = choose(QWEN, wide, 8, 60e9, refuse=refuse)
    changes = advice(QWEN, wide, given, 60e9, refuse=refuse)
    assert not given.fits and changes[0].text == "mesh.compute_dtype=bfloat16"
    assert changes[0].fit == choose(QWEN, replace(wide, compute_bytes=2), 8, 60e9, refuse=refuse)


def test_what_fits_needs_no_advice():
    fit = choose(QWEN, LEAN, 8, 141e9, refuse=refuse)
    assert advice(QWEN, LEAN, fit, 141e9, refuse=refuse) == []


def test_only_a_fraction_of_the_device_may_be_used():
    memory = memory_per_rank(QWEN, Layout(dp_shard=8), WORK, 80e9)
    assert fits(memory, memory.peak / 0.95 + 1) and not fits(memory, memory.peak / 0.95 - 1)


def test_small_numbers_keep_two_places():
    assert [gigabytes(size) for size in (1234567890, 999e6, 4.2e6)] == ["1.2", "1.00", "0.00"]
