"""Small mixtures of experts of three kinds: softmax over all, over the chosen, sigmoids with a bias."""

from __future__ import annotations

from typing import Any

import torch

from millrace.models.load import Model, fresh_config, fresh_model
from millrace.models.routing import BIAS
from tests.models.copies import made_once
from tests.models.tiny import SIZES, VOCABULARY

NUM_EXPERTS = 8
NUM_CHOICES = 2
EXPERTS: dict[str, Any] = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOICES}
# A dense layer, then one with experts in two groups, of which one is chosen, and an expert that all share.
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOICES,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    # Narrower than keys, as released.
    "v_head_dim": 8,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 24},
    "mixtral": EXPERTS,
    "deepseek_v3": DEEPSEEK,
}


@made_once
def mixture(architecture: str, *, seed: int = 0) -> Model:
    """A model whose routers, experts and biases are bold enough to matter."""
    shape = SIZES | MIXTURES[architecture]
    config = fresh_config(architecture, shape, vocab_size=VOCABULARY, eos_token_id=0)
    model = fresh_model(config, seed=seed, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim > 1 or name.endswith(BIAS):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model
