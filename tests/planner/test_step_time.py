"""The expected time of a step follows from operations and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.planner.flops import forward_operations
from millrace.planner.hardware import GPUS
from millrace.planner.layout import Layout
from millrace.planner.memory import Workload, cache_bytes_per_token, memory_per_rank
from millrace.planner.model_shape import ModelShape
from millrace.planner.step_time import StepTime, step_time
from tests.close import close_fp64
from tests.planner import shapes

LLAMA = ModelShape.of(shapes.LLAMA_8B)
GPU = GPUS["H200"]
WORK = Workload(
    prompt_tokens=300,
    completion_tokens=700,
    num_sequences=96,
    samples_per_prompt=8,
    micro_batch_tokens=8000,
    weight_bytes=2,
    max_requests=32,
    num_scorings=2,
)


def timed(work: Workload, layout: Layout, shape: ModelShape = LLAMA) -> StepTime:
    memory = memory_per_rank(shape, layout, work, GPU.memory_bytes)
    return step_time(shape, layout, work, memory, GPU, mfu=0.4)


def test_training_is_operations_over_the_reached_rate():
    forward = forward_operations(LLAMA, [1000] * 96, 96 * 700)
    rate = 0.4 * 989e12 * 2
    times = timed(WORK, Layout(dp_shard=2))
    close_fp64(times.training, (3 * forward.total + forward.head) / rate)
    close_fp64(times.scoring, 2 * forward.total / rate)
    full = timed(replace(WORK, checkpointing="full"), Layout(dp_shard=2))
    close_fp64(full.training, 4 * forward.total / rate)
    selective = timed(replace(WORK, checkpointing="selective"), Layout(dp_shard=2))
    close_fp64(selective.training, times.training)
    close_fp64(times.total, times.prefill + times.decode + times.scoring + times.training)


def test_a_critic_is_scored_and_trained_too():
    plain, rich = timed(WORK, Layout(dp_shard=2)), timed(replace(WORK, critic=True), Layout(dp_shard=2))
    close_fp64(rich.training, 2 * plain.training)
    close_fp64(rich.scoring, 1.5 * plain.scoring)


def test_a_prompt_is_read_once_for_its_group():
    prompts = forward_operations(LLAMA, [300] * 12, 12)
    close_fp64(timed(WORK, Layout(dp_shard=2)).prefill, prompts.total / (0.4 * 989e12 * 2))


def test_decoding_reads_weights_and_cache_for_every_token():
    # 48 sequences for each of two engines, 32 at once: two waves.
    cached = cache_bytes_per_token(LLAMA, 2)
    read = 2 * LLAMA.num_parameters + 32 * (300 + 350) * cached
    close_fp64(timed(WORK, Layout(dp_shard=2)).decode, 2 * 700 * read / (0.7 * 4.8e12))
    # With room for 5 sequences there are ten.
    tight = timed(replace(WORK, cache_tokens=5999), Layout(dp_shard=2))
    read = 2 * LLAMA.num_parameters + 5 * (300 + 350) * cached
    close_fp64(tight.decode, 10 * 700 * read / (0.7 * 4.8e12))


def test_decoding_of_many_at_once_is_bound_by_products():
    short = replace(
        WORK, prompt_tokens=1, completion_tokens=9, num_sequences=4096, max_requests=4096, cache_tokens=10**6
    )
    expected = 9 * 2 * 4096 * LLAMA.num_parameters / (0.4 * 989e12)
    close_fp64(timed(short, Layout()).decode, expected)


def test_experts_that_no_token_chose_are_not_read():
    shape = ModelShape.of(shapes.QWEN3_30B)
    few = replace(WORK, num_sequences=2, samples_per_prompt=2, cache_tokens=2000)
    missed = (1 - 8 / 128) ** 2
    read = 2 * (shape.num_parameters - missed * shape.num_expert_parameters)
    read += 2 * (300 + 350) * cache_bytes_per_token(shape, 2)
    close_fp64(timed(few, Layout(), shape).decode, 700 * read / (0.7 * 4.8e12))


def test_the_engine_computes_in_the_weights_dtype_and_the_trainer_in_its_own():
    few = replace(WORK, num_sequences=8, cache_tokens=8000)
    narrow, wide = timed(few, Layout()), timed(replace(few, weight_bytes=4), Layout())
    close_fp64([wide.training, wide.scoring], [narrow.training, narrow.scoring])
    close_fp64(wide.prefill, narrow.prefill * 989 / 67)
    close_fp64(wide.decode, 2 * narrow.decode)


def test_tensor_parallel_computes_the_same_experts_on_each_rank():
    shape = ModelShape.of(shapes.QWEN3_30B)
    forward = forward_operations(shape, [1000] * 96, 96 * 700)
    rate = 0.4 * 989e12 * 4
    sliced = timed(WORK, Layout(tp=4), shape)
    close_fp64(sliced.training, (3 * forward.total + forward.head + 3 * 3 * forward.experts) / rate)
    close_fp64(sliced.scoring, 2 * (forward.total + 3 * forward.experts) / rate)
    full = timed(replace(WORK, checkpointing="full"), Layout(tp=4), shape)
    close_fp64(full.training, 4 * (forward.total + 3 * forward.experts) / rate)
    shared = timed(replace(WORK, sequence=True), Layout(tp=4), shape)
    close_fp64(shared.training, (3 * forward.total + forward.head) / rate)


def test_ranks_that_share_an_engine_read_a_slice_each_for_all_of_its_sequences():
    memory = memory_per_rank(LLAMA, Layout(dp_shard=4), replace(WORK, engine_ranks=2), GPU.memory_bytes)
    times = timed(replace(WORK, engine_ranks=2), Layout(dp_shard=4))
    # 2 engines with 48 sequences each, 32 at once: two waves.
    cached = cache_bytes_per_token(LLAMA, 2) // 2
    read = memory.sampler + 32 * (300 + 350) * cached
    close_fp64(times.decode, 2 * 700 * read / (GPU.bandwidth * 0.7))
    alone = timed(WORK, Layout(dp_shard=4))
    close_fp64(times.prefill, alone.prefill)
    shape = ModelShape.of(shapes.QWEN3_30B)
    prompts = forward_operations(shape, [300] * 12, 12)
    mixed = timed(replace(WORK, engine_ranks=2), Layout(dp_shard=4), shape)
    close_fp64(mixed.prefill, (prompts.total + prompts.experts) / (0.4 * 989e12 * 4))


def test_selective_checkpointing_computes_experts_again():
    shape = ModelShape.of(shapes.QWEN3_30B)
    forward = forward_operations(shape, [1000] * 96, 96 * 700)
    again = timed(replace(WORK, checkpointing="selective"), Layout(dp_shard=4), shape)
    close_fp64(again.training, (3 * forward.total + forward.head + forward.experts) / (0.4 * 989e12 * 4))


def test_a_pipeline_idles_while_it_fills():
    # 96 000 tokens in micro-batches of 8000: 12, of which 3 stages wait for 2.
    one, three = timed(WORK, Layout(dp_shard=3)), timed(WORK, Layout(pp=3))
    close_fp64(three.training, one.training * (1 + 2 / 12))
    interleaved = timed(replace(WORK, num_chunks=2), Layout(pp=3))
    close_fp64(interleaved.training, one.training * (1 + 2 / 24))


@pytest.mark.parametrize("mfu", [0.0, 1.1])
def test_an_mfu_that_cannot_be_is_refused(mfu):
    memory = memory_per_rank(LLAMA, Layout(), WORK, GPU.memory_bytes)
    with pytest.raises(ValueError) as refused:
        step_time(LLAMA, Layout(), WORK, memory, GPU, mfu=mfu)
    assert str(refused.value) == f"mfu is {mfu}; it must be above 0 and at most 1"
