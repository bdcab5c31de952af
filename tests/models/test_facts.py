"""What is recorded of a model, and which models are refused for what they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from millrace.models.facts import CacheView, ModelFacts, PoolShape, backbone, facts_of, fit, record_facts
from millrace.models.load import ModelError, fresh_config, fresh_model
from tests.models.families import EXPERTS, LATENT, SIZES, SLIDING, VOCABULARY
from tests.models.tiny import SHAPES, WINDOW, tiny_model

NONE: dict[str, int | None] = {"window": None, "chunk": None}


def chunks(size: int) -> Callable[..., Any]:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("longest", [300, 131_075])
def test_masks_are_recognised_whatever_their_size(longest: int) -> None:
    assert fit(causal_mask_function, longest) == NONE
    for size in (1, 2, 7, 8, 255, longest - 1):
        assert fit(sliding_window_causal_mask_function(size), longest) == NONE | {"window": size}
    for size in (2, 7, 8, 50, 128, longest // 2, longest - 2, longest - 1):
        assert fit(chunks(size), longest) == NONE | {"chunk": size}


def sinks(row: Any, head: Any, query: Any, key: Any) -> Any:
    """A window and the first two tokens."""
    return (key <= query) & ((key > query - 7) | (key < 2))


def growing(row: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (key >= query // 2)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (
            bidirectional_mask_function,
            "its mask does not let token 299 see itself",
        ),
        (sinks, "its mask does not let token 299 see itself and an unbroken run"),
        (growing, "which no window and no chunks do"),
        (packed_sequence_mask_function(torch.zeros(1, 7)), "its mask depends on more than the places of two"),
    ],
)
def test_other_masks_are_refused(mask: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(mask, 300)


@pytest.mark.slow_beyond(5)
@pytest.mark.parametrize("architecture", SHAPES)
def test_the_facts_of_plain_decoders(architecture: str) -> None:
    facts = facts_of(tiny_model(architecture))
    text = tiny_model(architecture).config
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert facts.pools == (PoolShape(key_heads, width, width),) * 2
    assert facts.uniform == facts.pools[0] and facts.token_numbers == 4 * key_heads * width
    assert [layer.pools for layer in facts.layers] == [(0,), (1,)] and not facts.needs_view
    windows = {"mistral": [WINDOW] * 2, "phi3": [WINDOW] * 2}
    windows |= dict.fromkeys(("gemma2", "gemma3_text"), [WINDOW, None])
    assert [layer.window for layer in facts.layers] == windows.get(architecture, [None, None])


def test_a_model_that_was_not_recorded_is_told_how() -> None:
    with pytest.raises(ValueError, match="nothing is known of this Linear; load it by millrace.models.load"):
        facts_of(torch.nn.Linear(1, 1))


def test_the_view_of_a_cache_gives_positions_and_carries_the_context() -> None:
    position_T, key = torch.tensor([4, 5, 0, 1, 9]), torch.zeros(1, 2, 5, 4)
    view = CacheView(position_T, "context")
    assert (torch.arange(5) + view.get_seq_length(3)).tolist() == position_T.tolist()
    assert view.update(key, key, 0)[0] is key and key.millrace_context == "context"  # type: ignore[attr-defined]


def test_a_length_that_is_asked_for_and_does_not_matter_needs_no_view() -> None:
    """OPT makes a mask as long as the cache says, which its attention never sees."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}
    config = fresh_config("opt", shape | {"word_embed_proj_dim": 16}, vocab_size=VOCABULARY, eos_token_id=0)
    assert not facts_of(fresh_model(config, seed=0, dtype=torch.float32)).needs_view


def test_a_model_that_is_its_own_base_has_a_backbone_all_the_same() -> None:
    model = tiny_model("llama")
    assert backbone(model) is model.model and backbone(model.model) is model.model


MIXES = (
    "mixes tokens outside of millrace's attention, as a convolution, a recurrence or an attention of its own"
)
MAMBA: dict[str, Any] = {"mamba_d_state": 4, "mamba_expand": 2, "use_mamba_kernels": False}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
# Fresh weights, so small that logits hardly show what mixes tokens.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2": (
        {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
        f"its Lfm2ShortConv (model.layers.0.conv) {MIXES}",
    ),
    "jamba": (
        MAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1},
        f"its JambaMambaMixer (model.layers.0.mamba) {MIXES}",
    ),
    "falcon_h1": (
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
        f"its FalconH1Mixer (model.layers.0.mamba) {MIXES}",
    ),
    "qwen3_next": (DELTA, f"its Qwen3NextGatedDeltaNet (model.layers.0.linear_attn) {MIXES}"),
    "doge": ({}, "its DogeAttention adds a bias to the attention mask or changes it"),
    "deepseek_v32": (
        LATENT | EXPERTS | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8},
        "DeepseekV32Attention gives attention indices (a choice of keys for each query)",
    ),
    "gpt_oss": (
        {"head_dim": 8, "layer_types": SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
        "GptOssAttention gives attention s_aux (attention sinks)",
    ),
}


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", REFUSED)
def test_what_has_no_kernel_is_refused_by_name(architecture: str) -> None:
    shape, words = REFUSED[architecture]
    known = fresh_config(architecture, {}, vocab_size=VOCABULARY, eos_token_id=0).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    config = fresh_config(architecture, sizes | shape, vocab_size=VOCABULARY, eos_token_id=0)
    with pytest.raises(ModelError) as error:
        fresh_model(config, seed=0, dtype=torch.float32)
    assert str(error.value).startswith(f"model type {architecture} cannot be trained by millrace: {words}")


def test_other_tokens_that_are_looked_up_together_are_noticed() -> None:
    """An embedding that adds the token before: no gradient of another token's embedding tells of it."""
    model = tiny_model("llama")
    own = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda token_1T: own(token_1T) + own(token_1T.roll(1))
    with pytest.raises(ValueError, match="hidden states depend on other tokens outside of attention"):
        record_facts(model)


def test_facts_survive_a_copy() -> None:
    model = copy.deepcopy(tiny_model("mistral"))
    assert isinstance(facts_of(model), ModelFacts)
    assert model.model.layers[1].self_attn.millrace_layer.window == WINDOW
