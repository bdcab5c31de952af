"""Seconds of a step: sampling from memory bandwidth, training from operations, at stated shares of the peak.

An estimate for choosing a layout, not a promise: every completion is as long as it may be, communication
hides behind computation, rewards and the hand-over of weights take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from millrace.planner.flops import TRAINING, forward_operations
from millrace.planner.hardware import Gpu
from millrace.planner.layout import Split
from millrace.planner.memory import Memory, Workload, cache_bytes_per_token
from millrace.planner.model_shape import ModelShape

# Of the bandwidth that a maker states, what decoding reaches.
BANDWIDTH_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class StepTime:
    """Expected seconds.

    Attributes:
        prefill: reading the prompts, each once for its group.
        decode: drawing the completions.
        scoring: forwards without gradient (reference, teacher, proximal log-probabilities, values).
        training: forwards and backwards of policy and critic.
    """

    prefill: float
    decode: float
    scoring: float
    training: float

    @property
    def total(self) -> float:
        """One after the other, as at staleness 0."""
        return self.prefill + self.decode + self.scoring + self.training


def step_time(
    shape: ModelShape, split: Split, work: Workload, memory: Memory, gpu: Gpu, *, mfu: float
) -> StepTime:
    """Expected time of one batch of reinforcement on all ranks.

    Args:
        shape: the model's.
        split: how ranks share it.
        work: what they do.
        memory: of `memory_per_rank`; its cache says how many sequences are drawn at once.
        gpu: each rank's.
        mfu: the share of the peak that products reach, above 0 and at most 1.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"mfu is {mfu}; it must be above 0 and at most 1")
    rate = gpu.flops(work.compute_bytes) * mfu
    every = rate * split.num_ranks
    num_tokens = work.num_sequences * work.completion_tokens
    forward = forward_operations(shape, [work.longest] * work.num_sequences, num_tokens)
    num_prompts = ceil(work.num_sequences / work.samples_per_prompt)
    prompts = forward_operations(shape, [work.prompt_tokens] * num_prompts, num_prompts)
    # The backward makes the logits again, and under checkpointing more.
    again = (
        forward.head
        + {
            "none": 0,
            "selective": 0 if shape.num_experts == 0 else forward.mlp,
            "full": forward.layers,
        }[work.checkpointing]
    )
    idle = (split.pp - 1) / _num_micro_batches(split, work)
    learning = (TRAINING * forward.total + again) * (1 + work.critic) * (1 + idle)
    return StepTime(
        prefill=prompts.total / every,
        decode=_decode(shape, split, work, memory, gpu, rate),
        scoring=forward.total * (work.num_scorings + work.critic) / every,
        training=learning / every,
    )


def _num_micro_batches(split: Split, work: Workload) -> int:
    tokens = ceil(work.num_sequences / split.num_data_ranks) * work.longest
    return ceil(tokens / work.micro_batch_tokens)


def _decode(shape: ModelShape, split: Split, work: Workload, memory: Memory, gpu: Gpu, rate: float) -> float:
    """Each round draws a token for every sequence at hand: weights are read, and all keys and values."""
    num_engines = max(1, split.num_ranks // work.sampler_tp)
    share = ceil(work.num_sequences / num_engines)
    cached = cache_bytes_per_token(shape, work.compute_bytes) / work.sampler_tp
    room = max(1, int(memory.cache / cached) // work.longest)
    at_once = min(share, work.max_requests, room)
    waves = ceil(share / at_once)
    context = work.prompt_tokens + work.completion_tokens // 2
    missed = (1 - shape.experts_per_token / max(shape.num_experts, 1)) ** at_once
    idle = shape.num_expert_parameters * missed * work.compute_bytes / work.sampler_tp
    read = memory.sampler - idle + at_once * context * cached
    products = 2 * at_once * shape.num_active_parameters / work.sampler_tp
    seconds = max(read / (gpu.bandwidth * BANDWIDTH_SHARE), products / rate)
    return waves * work.completion_tokens * seconds
