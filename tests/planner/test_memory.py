"""Memory that is planned is the memory that tensors take, and what papers and model cards state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from millrace.data.batch import Batch
from millrace.data.packing import pack
from millrace.distributed.fsdp import PRODUCTS
from millrace.engines.build_engine import SHARE
from millrace.errors import PlanError
from millrace.kernels import packed_attention, token_logprob
from millrace.kernels.norm import rms_norm_plain
from millrace.models.facts import experts_of
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.models.logprobs import chosen_hidden, output_head
from millrace.planner import memory as planned
from millrace.planner.layout import Layout
from millrace.planner.memory import (
    EIGHT_BIT_MOMENT,
    Workload,
    cache_bytes_per_token,
    memory_per_rank,
    rows_per_chunk,
)
from millrace.planner.model_shape import ModelShape
from millrace.training.optimizer import adamw, start_optimizer
from millrace.types import Completion, Outcome, Trajectory, Turn
from tests.close import close_fp64
from tests.planner import shapes
from tests.planner.alive import Alive

SMALL = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "sliding_window": 64, "final_logit_softcapping": 30.0},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
# A model of 20 million weights.
LARGER = SMALL | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5}
WORK = Workload(
    prompt_tokens=1000,
    completion_tokens=2000,
    num_sequences=128,
    samples_per_prompt=8,
    micro_batch_tokens=16384,
)
LLAMA = ModelShape.of(shapes.LLAMA_8B)


def batch_of(num_segments: int, length: int, vocabulary: int) -> Batch:
    """Segments of one prompt token and a completion, so that almost every token is predicted."""
    numbers = np.random.default_rng(0)

    def trajectory() -> Trajectory:
        drawn = numbers.integers(0, vocabulary, length - 1)
        versions = np.zeros(length - 1, int)
        completion = Completion(tuple(drawn.tolist()), np.zeros(length - 1), versions, "stop", "")
        return Trajectory((Turn((1,), completion),), Outcome("score", 1.0))

    return pack([trajectory() for _ in range(num_segments)])


def measured(model: Model, batch: Batch) -> tuple[int, int]:
    """Bytes alive once hidden states are made, and the most of a forward and backward, gradients apart."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    with Alive(known) as alive:
        hidden_ND, target_N = chosen_hidden(model, batch)
        kept = alive.num_bytes
        logprob_N, _ = token_logprob.token_logprob(hidden_ND, output_head(model), target_N, temperature=1.0)
        del hidden_ND
        logprob_N.sum().backward()
    return kept, alive.peak


def planned_for(model: Model, batch: Batch, **changes: Any) -> planned.Memory:
    # Behind the last token that is read, only a mixture computes what stands there.
    length, number_bytes = int(batch.length_B[0]) - (not experts_of(model)), model.dtype.itemsize
    work = Workload(
        prompt_tokens=1,
        completion_tokens=length - 1,
        num_sequences=batch.num_segments,
        samples_per_prompt=1,
        micro_batch_tokens=batch.num_segments * length,
        weight_bytes=number_bytes,
        compute_bytes=number_bytes,
        moment_bytes=number_bytes,
        fused_norms=True,
    )
    shape = ModelShape.of(model.config.to_dict())
    return memory_per_rank(shape, Layout(), replace(work, **changes), 80e9)


def made(kind: str, sizes: dict[str, Any], vocabulary: int, dtype: torch.dtype = torch.float32) -> Model:
    config = fresh_config(kind, sizes | EXTRA[kind], vocab_size=vocabulary, eos_token_id=0)
    return fresh_model(config, seed=0, dtype=dtype)


@pytest.mark.slow
def test_a_real_update_takes_what_is_planned():
    model = made("qwen3", LARGER, 16384)
    batch = batch_of(4, 192, 16384)
    memory = planned_for(model, batch)
    optimizer = adamw(model, betas=(0.9, 0.99), weight_decay=0.0)
    kept, peak = measured(model, batch)
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    optimizer.step()
    state = [value for held in optimizer.state.values() for value in held.values()]
    close_fp64(memory.weights, sum(parameter.nbytes for parameter in model.parameters()), rtol=1e-6)
    close_fp64(memory.gradients, gradients, rtol=1e-6)
    close_fp64(memory.moments, sum(value.nbytes for value in state), rtol=1e-4)
    close_fp64(memory.activations, kept, rtol=0.02)
    close_fp64(memory.activations + memory.scratch, peak, rtol=0.02)
    # By themselves, without anything besides: all that the device would hold.
    total = memory.weights + memory.moments + memory.gradients + memory.activations + memory.scratch
    held = sum(value.nbytes for value in state) + 2 * gradients + peak
    close_fp64(total, held, rtol=0.02)


@pytest.mark.slow
def test_moments_of_eight_bits_take_what_is_planned():
    model = made("qwen3", LARGER, 16384)
    batch = batch_of(1, 8, 16384)
    optimizer = adamw(model, betas=(0.9, 0.99), weight_decay=0.0, eight_bit=True)
    held = sum(tensor.nbytes for tensor in start_optimizer(optimizer, model).values())
    memory = planned_for(model, batch, moment_bytes=EIGHT_BIT_MOMENT)
    # Vectors keep float32, which is not counted.
    close_fp64(memory.moments, held, rtol=5e-3)
    assert memory.moments < 0.26 * planned_for(model, batch).moments


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", EXTRA)
def test_what_a_forward_keeps_is_planned_for_every_family(kind, dtype):
    model, batch = made(kind, SMALL, 700, dtype), batch_of(4, 96, 700)
    memory = planned_for(model, batch)
    kept, peak = measured(model, batch)
    close_fp64(memory.activations, kept, rtol=0.03)
    close_fp64(memory.activations + memory.scratch, peak, rtol=0.05)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_several_operations_keep_more(kind, dtype, monkeypatch):
    monkeypatch.setattr("millrace.models.fused.rms_norm", rms_norm_plain)
    model, batch = made(kind, SMALL, 700, dtype), batch_of(4, 96, 700)
    memory = planned_for(model, batch, fused_norms=False)
    close_fp64(memory.activations, measured(model, batch)[0], rtol=0.03)


@pytest.mark.slow
def test_short_segments_keep_the_shares_of_all_pairs(monkeypatch):
    # As on a GPU, where our own kernel for them is not.
    monkeypatch.setattr(packed_attention, "DTYPES", ())
    model, batch = made("llama", SMALL, 700), batch_of(16, 32, 700)
    close_fp64(planned_for(model, batch).activations, measured(model, batch)[0], rtol=0.03)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kept", ["full", "selective"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mixtral"])
def test_checkpointing_keeps_what_is_planned(kind, kept):
    model, batch = made(kind, SMALL, 700), batch_of(4, 96, 700)
    options: dict[str, Any] = {}
    if kept == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(PRODUCTS))
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
    memory = planned_for(model, batch, checkpointing=kept)
    alive, peak = measured(model, batch)
    close_fp64(memory.activations, alive, rtol=0.03)
    close_fp64(memory.activations + memory.scratch, peak, rtol=0.06)


@pytest.mark.slow
def test_a_large_head_needs_chunks_of_logits():
    model, batch = made("llama", SMALL | {"num_hidden_layers": 1}, 20_000), batch_of(4, 128, 20_000)
    memory = planned_for(model, batch)
    _, peak = measured(model, batch)
    assert memory.scratch > 2 * memory.activations
    close_fp64(memory.activations + memory.scratch, peak, rtol=0.03)


def test_the_constants_are_those_of_the_kernels():
    assert planned.CHUNK_ELEMENTS == token_logprob.CHUNK_ELEMENTS
    assert planned.SHORT_LENGTH == packed_attention.SHORT_LENGTH
    assert planned.CACHE_SHARE == SHARE
    for vocabulary, width in [(700, 192), (151_936, 4096), (9_000_000, 16)]:
        head = torch.empty(vocabulary, width, device="meta")
        assert rows_per_chunk(vocabulary, width) == token_logprob.rows_per_chunk(head)


def test_keys_and_values_take_what_is_published():
    # huggingface.co/blog/llama31: 1k, 16k and 128k tokens in FP16, "GB" of 2^30 bytes.
    for config, expected in (
        (shapes.LLAMA_8B, [0.125, 1.95, 15.62]),
        (shapes.LLAMA_70B, [0.313, 4.88, 39.06]),
    ):
        each = cache_bytes_per_token(ModelShape.of(config), 2)
        close_fp64([each * tokens / 2**30 for tokens in (1024, 16_000, 128_000)], expected, rtol=3e-3)


def test_sharded_state_is_that_of_the_zero_paper():
    # Rajbhandari et al. 2020, figure 1: 7.5 B weights, 120 GB on one device, 1.9 GB on each of 64.
    for num_ranks, expected in ((1, 120.0), (64, 1.9)):
        memory = memory_per_rank(LLAMA, Layout(dp_shard=num_ranks), WORK, 80e9)
        state = memory.weights + memory.gradients + memory.moments
        close_fp64(state / LLAMA.num_parameters * 7.5, expected, rtol=0.02)


def test_every_rank_together_holds_the_whole_model():
    whole = memory_per_rank(LLAMA, Layout(), WORK, 80e9).weights
    for layout in (Layout(dp_shard=8), Layout(tp=8), Layout(dp_shard=2, tp=4), Layout(dp_shard=2, cp=4)):
        close_fp64(memory_per_rank(LLAMA, layout, WORK, 80e9).weights * 8, whole, rtol=1e-3)
    assert memory_per_rank(LLAMA, Layout(dp_replicate=4), WORK, 80e9).weights == whole
    # The fullest stage has a head, and all layers of a quarter.
    staged = 32 // 4 * (LLAMA.attention_parameters + LLAMA.mlp_parameters + 2 * 4096)
    staged += LLAMA.head_parameters + 4096
    assert memory_per_rank(LLAMA, Layout(pp=4), WORK, 80e9).weights == staged * 4


def test_experts_are_dealt_within_the_ranks_that_share_weights():
    shape = ModelShape.of(shapes.QWEN3_30B)
    plain, dealt = (memory_per_rank(shape, Layout(dp_shard=8, ep=ep), WORK, 80e9) for ep in (1, 8))
    assert plain.weights == dealt.weights
    # Two whole layers, of each 7 of 8 experts less; then the slopes of one, in both dtypes.
    assert plain.gathered - dealt.gathered == 2 * 2 * 112 * shape.expert_parameters
    slopes = (2 + 4) * 112 * shape.expert_parameters
    full = replace(WORK, checkpointing="full")
    plain, dealt = (memory_per_rank(shape, Layout(dp_shard=8, ep=ep), full, 80e9) for ep in (1, 8))
    assert plain.scratch - dealt.scratch == slopes


def test_what_is_offloaded_is_in_the_hosts_memory():
    plain = memory_per_rank(LLAMA, Layout(), replace(WORK, num_frozen=1), 80e9)
    away = memory_per_rank(LLAMA, Layout(), replace(WORK, num_frozen=1, num_away=1), 80e9)
    assert (plain.frozen, plain.host) == (away.host, away.frozen) == (plain.weights, 0)
    one = memory_per_rank(LLAMA, Layout(), replace(WORK, activation_offload=True), 80e9).activations
    # Of 32 layers one computes; the ends are there as before.
    assert plain.activations / 32 < one < plain.activations / 16


def test_ranks_share_activations_as_the_layout_says():
    one = memory_per_rank(LLAMA, Layout(), WORK, 80e9).activations
    assert memory_per_rank(LLAMA, Layout(cp=2), WORK, 80e9).activations == one / 2
    stages = memory_per_rank(LLAMA, Layout(pp=2), WORK, 80e9).activations
    close_fp64(stages, one, rtol=0.01)
    # Interleaved, the first of two ranks has five of its quarters under way, not four.
    quarters = memory_per_rank(LLAMA, Layout(pp=2), replace(WORK, num_chunks=2), 80e9).activations
    close_fp64(quarters, one * 5 / 4, rtol=0.01)
    rows = 16384 * 4096 * (4 * 2 + 2 * 4) * 32
    tensor = memory_per_rank(LLAMA, Layout(tp=2), WORK, 80e9).activations
    close_fp64(tensor - rows, (one - rows) / 2, rtol=0.01)
    shared = memory_per_rank(LLAMA, Layout(tp=2), replace(WORK, sequence=True), 80e9).activations
    close_fp64(shared, one / 2, rtol=0.01)


def test_a_rank_with_few_sequences_has_smaller_micro_batches():
    few = replace(WORK, num_sequences=8)
    assert (WORK.micro_tokens(Layout()), few.micro_tokens(Layout(dp_shard=4))) == (16384, 6000)
    assert few.micro_tokens(Layout(dp_shard=4, cp=4)) == 1500


def test_offload_moves_the_trainers_state_to_the_host():
    rich = replace(WORK, num_frozen=1, critic=True)
    here = memory_per_rank(LLAMA, Layout(dp_shard=8), rich, 80e9)
    there = memory_per_rank(LLAMA, Layout(dp_shard=8), replace(rich, offload=True), 80e9)
    state = here.weights + here.moments + here.critic + here.frozen
    assert (here.host, there.host) == (0, state + here.gradients)
    assert here.training - there.training == there.host
    assert here.sampling - there.sampling == state
    # Layers come to the device one by one, even on a rank that has all of them.
    alone = memory_per_rank(LLAMA, Layout(tp=8), replace(WORK, offload=True, compute_bytes=4), 80e9)
    assert (alone.weights, alone.gathered > 0) == (0, True)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_reference_that_computes_beside_the_policy_is_gathered_beside_what_the_policy_keeps(reshard):
    apart = replace(WORK, num_frozen=1, reshard_after_forward=reshard)
    one, two = (
        memory_per_rank(LLAMA, Layout(dp_shard=8), replace(apart, frozen_beside=beside), 80e9)
        for beside in (False, True)
    )
    # Embedding, head and last norm in bfloat16, or the whole policy.
    ends = 2 * LLAMA.head_parameters + LLAMA.width
    assert two.gathered - one.gathered == 2 * (ends if reshard else LLAMA.num_parameters)
    assert replace(two, gathered=one.gathered) == one
    alone = memory_per_rank(LLAMA, Layout(), replace(apart, frozen_beside=True, compute_bytes=4), 80e9)
    assert alone.gathered == 0


@pytest.mark.parametrize("offload", [False, True])
def test_what_takes_turns_is_counted_one_after_the_other(offload):
    rich = replace(WORK, num_frozen=1, critic=True, offload=offload)
    both = memory_per_rank(LLAMA, Layout(dp_shard=8), rich, 80e9)
    apart = memory_per_rank(LLAMA, Layout(dp_shard=8), replace(rich, colocated=True), 80e9)
    assert apart.parts() == both.parts()
    trained = both.weights + both.moments + both.critic + both.frozen
    assert both.training - apart.training == both.sampler + both.cache
    assert both.sampling - apart.sampling == apart.host - both.host == trained
    meeting = replace(apart, activations=0, gathered=0, scratch=0, gradients=0, cache=0, drawing=0)
    assert meeting.peak == trained + both.sampler
    # What is offloaded does not meet the engine's weights on the device.
    assert (meeting.peak > max(meeting.training, meeting.sampling)) == (not offload)


def test_layers_that_stay_gathered_take_as_much_as_the_whole_stage():
    kept = replace(WORK, reshard_after_forward=False)
    whole = memory_per_rank(LLAMA, Layout(), WORK, 80e9).weights // 4
    assert memory_per_rank(LLAMA, Layout(dp_shard=8), kept, 80e9).gathered == 2 * whole
    layer = LLAMA.attention_parameters + LLAMA.mlp_parameters + 2 * 4096
    passing = memory_per_rank(LLAMA, Layout(dp_shard=8), WORK, 80e9).gathered
    assert passing == 2 * (2 * layer + 2 * LLAMA.head_parameters + 4096)


def test_tensor_parallel_leaves_experts_whole():
    shape = ModelShape.of(shapes.QWEN3_30B)
    one, four = (memory_per_rank(shape, Layout(tp=tp), WORK, 80e9) for tp in (1, 4))
    attention = 48 * shape.attention_parameters + 2 * shape.head_parameters
    close_fp64((one.weights - four.weights) / 4, attention * 3 / 4, rtol=1e-6)
    # Of the activations too, unless tokens are shared.
    kept = 48 * 16384 * 8 * (4 * 768 + 2 * 2048) * 2
    assert four.activations > kept
    shared = memory_per_rank(shape, Layout(tp=4), replace(WORK, sequence=True), 80e9)
    close_fp64(shared.activations, one.activations / 4, rtol=0.02)


def test_other_models_of_a_run_are_counted():
    plain = memory_per_rank(LLAMA, Layout(), WORK, 80e9)
    rich = memory_per_rank(LLAMA, Layout(), replace(WORK, num_frozen=2, critic=True), 80e9)
    assert rich.training - plain.training == 2 * plain.weights + plain.weights + plain.moments


def test_the_cache_is_what_was_asked_for_or_a_quarter_of_what_is_free():
    each = cache_bytes_per_token(LLAMA, 4)
    asked = memory_per_rank(LLAMA, Layout(), replace(WORK, cache_tokens=5000), 80e9)
    assert asked.cache == 5000 * each
    wanted = memory_per_rank(LLAMA, Layout(), replace(WORK, max_requests=2), 200e9)
    assert wanted.cache == 2 * 3016 * each
    little = memory_per_rank(LLAMA, Layout(), WORK, 80e9)
    free = 80e9 - little.weights - little.sampler
    assert little.cache == int(0.25 * free) // each * each
    # It is built beside the whole model, and is a whole one itself.
    shared = memory_per_rank(LLAMA, Layout(dp_shard=2, tp=4), WORK, 80e9)
    assert (shared.cache, shared.sampler) == (little.cache, little.sampler)
    assert memory_per_rank(LLAMA, Layout(), WORK, 1e9).cache == 3016 * each


@pytest.mark.parametrize("described", [shapes.LLAMA_8B, shapes.QWEN3_30B])
def test_ranks_that_share_an_engine_hold_a_slice_of_it(described):
    shape = ModelShape.of(described)
    work = replace(WORK, cache_tokens=5000)
    one, four = (
        memory_per_rank(shape, Layout(dp_shard=8), replace(work, engine_ranks=size), 80e9) for size in (1, 4)
    )
    assert one.sampler == shape.num_parameters * 4
    sliced = shape.num_layers * shape.attention_parameters + (2 - shape.tied) * shape.head_parameters
    sliced += (shape.num_layers - shape.num_expert_layers) * shape.mlp_parameters
    assert one.sampler - four.sampler == sliced * 4 * 3 // 4
    assert four.cache == one.cache // 4
    assert four.drawing < one.drawing
    # Nothing of the trainer changes.
    assert four.training - one.training == four.sampler + four.cache - one.sampler - one.cache


def test_what_the_engine_draws_with_is_logits_and_a_forward():
    memory = memory_per_rank(LLAMA, Layout(), replace(WORK, num_sequences=24), 80e9)
    assert memory.drawing == 8 * 24 * 128_256 + 8192 * (3 * 14336 + 48 * 128 + 3 * 4096) * 4


def test_the_parts_add_up():
    memory = memory_per_rank(LLAMA, Layout(dp_shard=2), WORK, 80e9)
    assert sum(memory.parts().values()) - memory.drawing == memory.training


def test_a_model_that_does_not_divide_is_refused():
    with pytest.raises(PlanError) as refused:
        memory_per_rank(LLAMA, Layout(tp=16), WORK, 80e9)
    sentence = "mesh.tp is 16, which does not divide the model's 8 key heads; choose a tp that divides 8"
    assert str(refused.value) == sentence
