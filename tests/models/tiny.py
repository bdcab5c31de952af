"""Eleven small decoders whose weights are bold enough that a wrong token of attention shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from millrace.data.batch import Batch
from millrace.data.packing import pack
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.types import Completion, Outcome, Trajectory, Turn
from tests.models.copies import made_once

VOCABULARY = 40
WINDOW = 6
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": WINDOW},
    "gpt_neox": {},
    "olmo2": {},
    "qwen3_moe": {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
# What an architecture has no field for.
WITHOUT: dict[str, set[str]] = {"gpt_neox": {"num_key_value_heads"}}


@made_once
def tiny_model(architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    shape = {**SIZES, **SHAPES[architecture]}
    shape = {key: value for key, value in shape.items() if key not in WITHOUT.get(architecture, ())}
    config = fresh_config(architecture, shape, vocab_size=VOCABULARY, eos_token_id=0)
    model = fresh_model(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 2 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(noise if parameter.ndim == 2 else parameter + noise)
    return model


def random_trajectories(seed: int, *, num: int = 6) -> list[Trajectory]:
    """Episodes of one or two turns, some longer than the sliding window."""
    numbers = np.random.default_rng(seed)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(numbers.integers(0, VOCABULARY, numbers.integers(1, most + 1)).tolist())

    def turn() -> Turn:
        drawn = tokens(12)
        return Turn(tokens(9), Completion(drawn, np.zeros(len(drawn)), np.zeros(len(drawn), int), "stop", ""))

    return [
        Trajectory(tuple(turn() for _ in range(1 + index % 2)), Outcome("score", 1.0)) for index in range(num)
    ]


def random_batch(seed: int) -> Batch:
    return pack(random_trajectories(seed))
