"""Tiny bold decoders of the families that need more than one window and equal heads, and their truth.

The truth is transformers' own modules with its own eager attention, over each sequence alone and without a
cache.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.models.load import Model, fresh_config, fresh_model
from millrace.models.own_attention import plain_implementation
from tests.models.copies import made_once

VOCABULARY = 40
WINDOW, CHUNK = 6, 8
EIGHT: dict[str, Any] = {"head_dim": 8}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SLIDING = ["sliding_attention", "full_attention"] * 2
# Ratios of widths as DeepSeek released them: keys 8 + 4, values 8.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
OLD: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
# Their sizes have names of their own.
OLD_NAMES = ("bloom", "gpt_bigcode", "gptj", "mpt")
# A name of several shapes of a model type has the shape after an @.
FAMILIES: dict[str, dict[str, Any]] = {
    # Slopes that are no powers of two.
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 6},
    "deepseek_v2": LATENT | EXPERTS,
    "deepseek_v3": LATENT | EXPERTS,
    "diffllama": {},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon@alibi": {"alibi": True, "new_decoder_architecture": False, "multi_query": False},
    "falcon@alibi_one_key": {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
    "gemma3n_text": EIGHT
    | {
        "num_kv_shared_layers": 2,
        "layer_types": SLIDING,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": EIGHT
    | {
        "layer_types": SLIDING,
        "sliding_window": WINDOW,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "glm4_moe_lite": LATENT | EXPERTS | {"v_head_dim": 12},
    "gpt_bigcode": OLD | {"multi_query": True},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
    },
    "gptj": OLD | {"rotary_dim": 4},
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": CHUNK,
        "no_rope_layers": [1, 0, 1, 0],
        "floor_scale": 4,
        "attn_scale": 0.5,
        "head_dim": 8,
    },
    "minicpm3": LATENT,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 256},
    "nemotron": {},
    "phimoe": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": SLIDING,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "stablelm": {},
}


def config_of(family: str) -> Any:
    model_type = family.partition("@")[0]
    known = AutoConfig.for_model(model_type).to_dict()
    if family in OLD_NAMES:
        shape = FAMILIES[family]
    else:
        shape = {key: value for key, value in (SIZES | FAMILIES[family]).items() if key in known}
    return fresh_config(model_type, shape, vocab_size=VOCABULARY, eos_token_id=0)


def bold(model: Model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)


@made_once
def bold_family(family: str, *, seed: int = 0) -> Model:
    model = fresh_model(config_of(family), seed=seed, dtype=torch.float32)
    bold(model, seed)
    return model


def plain_twin(model: Model) -> Model:
    """The same weights in transformers' own modules, with its eager attention."""
    config = copy.deepcopy(model.config)
    implementation = plain_implementation(config)
    twin = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def plain_logprobs(twin: Model, row: Tensor) -> Tensor:
    """Log-probabilities [T, V] of a sequence, by a plain forward without a cache."""
    return twin(row[None], use_cache=False).logits[0].log_softmax(-1)
