"""Seconds of a step: sampling from memory bandwidth, training from operations, at a given MFU.

An estimate for choosing a layout, under these assumptions: every completion has the maximum length,
communication overlaps with computation, and rewards and weight updates take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from millrace.planner.flops import TRAINING, forward_operations
from millrace.planner.hardware import Gpu
from millrace.planner.layout import Layout
from millrace.planner.memory import Memory, Workload, cache_bytes_per_token
from millrace.planner.model_shape import ModelShape

# Fraction of the vendor's stated bandwidth that decoding reaches.
BANDWIDTH_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class StepTime:
    """Expected seconds; scoring is forwards without gradient (reference, teacher, proximal, values)."""

    prefill: float
    decode: float
    scoring: float
    training: float

    @property
    def total(self) -> float:
        """One after the other, as at staleness 0."""
        return self.prefill + self.decode + self.scoring + self.training


def step_time(
    shape: ModelShape, layout: Layout, work: Workload, memory: Memory, gpu: Gpu, *, mfu: float
) -> StepTime:
    """Expected time of one batch of reinforcement on all ranks.

    The cache of `memory`, from `memory_per_rank`, limits the number of concurrent sequences. `mfu` is the
    fraction of the peak that products reach, those computed again too; outside of (0, 1] it is a ValueError.
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu is {mfu}; it must be above 0 and at most 1")
    rate = gpu.flops(work.compute_bytes) * mfu
    every = rate * layout.num_ranks
    sampling = gpu.flops(work.weight_bytes) * mfu
    num_tokens = work.num_sequences * work.completion_tokens
    forward = forward_operations(shape, [work.longest] * work.num_sequences, num_tokens)
    num_prompts = ceil(work.num_sequences / work.samples_per_prompt)
    prompts = forward_operations(shape, [work.prompt_tokens] * num_prompts, num_prompts)
    # The backward makes the logits again, and under checkpointing more.
    again = {"none": 0, "selective": forward.experts, "full": forward.layers}[work.checkpointing]
    again += forward.head
    # Without sequence parallel, every rank along tp computes all experts of the same tokens.
    alike = 0 if work.sequence else (layout.tp - 1) * forward.experts
    passes = TRAINING + (work.checkpointing != "none")
    tokens = ceil(work.num_sequences / layout.num_data_ranks) * work.longest
    num_micro_batches = ceil(tokens / work.micro_batch_tokens)
    idle = (layout.pp - 1) / (num_micro_batches * work.num_chunks)
    learning = TRAINING * forward.total + again + passes * alike
    return StepTime(
        # The ranks of one engine compute all experts of the same tokens.
        prefill=(prompts.total + (work.engine_ranks - 1) * prompts.experts) / (sampling * layout.num_ranks),
        decode=_decode(shape, layout, work, memory, gpu, sampling),
        scoring=(forward.total + alike) * (work.num_scorings + work.critic) / every,
        training=learning * (1 + work.critic) * (1 + idle) / every,
    )


def _decode(
    shape: ModelShape, layout: Layout, work: Workload, memory: Memory, gpu: Gpu, rate: float
) -> float:
    per_engine = ceil(work.num_sequences * work.engine_ranks / layout.num_ranks)
    cached = cache_bytes_per_token(shape, work.weight_bytes) // work.engine_ranks
    room = max(1, memory.cache // cached // work.longest)
    at_once = min(per_engine, work.max_requests, room)
    waves = ceil(per_engine / at_once)
    context = work.prompt_tokens + work.completion_tokens // 2
    idle = shape.idle_expert_parameters(at_once) * work.weight_bytes
    read = memory.sampler - idle + at_once * context * cached
    experts = shape.num_expert_layers * shape.experts_per_token * shape.expert_parameters
    sliced = (shape.num_active_parameters - experts) / work.engine_ranks
    products = 2 * at_once * (sliced + experts)
    seconds = max(read / (gpu.bandwidth * BANDWIDTH_SHARE), products / rate)
    return waves * work.completion_tokens * seconds
