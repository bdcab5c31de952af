"""Weights counted from a config are those that transformers makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.errors import PlanError
from millrace.planner.model_shape import FAMILIES, ModelShape
from tests.planner import shapes

PUBLISHED = {
    "Qwen3-0.6B": (shapes.QWEN3_600M, 596_049_920),
    "Qwen3-8B": (shapes.QWEN3_8B, 8_190_735_360),
    "Qwen3-30B-A3B": (shapes.QWEN3_30B, 30_532_122_624),
    "Llama-3.1-8B": (shapes.LLAMA_8B, 8_030_261_248),
    "Llama-3.1-70B": (shapes.LLAMA_70B, 70_553_706_496),
    "Mistral-7B": (shapes.MISTRAL_7B, 7_241_732_096),
    "Mixtral-8x7B": (shapes.MIXTRAL, 46_702_792_704),
    "Gemma-2-2B": (shapes.GEMMA2_2B, 2_614_341_888),
}
ODD = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 72,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
EXTRA = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 20, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 12},
    "gemma3_text": {"head_dim": 12},
    "qwen3_moe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}


def real_count(kind: str, fields: dict) -> int:
    """Parameters of transformers' own module, built without memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_of_a_small_model_are_those_transformers_makes(kind):
    fields = ODD | EXTRA.get(kind, {})
    shape = ModelShape.of(AutoConfig.for_model(kind, **fields).to_dict())
    assert shape.num_parameters == real_count(kind, fields)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_a_published_model_are_those_of_its_folder(name):
    config, expected = PUBLISHED[name]
    assert ModelShape.of(config).num_parameters == expected


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_weights_of_a_published_model_are_those_transformers_makes(name):
    config = dict(PUBLISHED[name][0])
    assert real_count(config.pop("model_type"), config) == PUBLISHED[name][1]


def test_a_token_goes_through_the_published_share_of_a_mixture():
    # The model card: 30.5 B in total and 3.3 B activated; Mixtral's paper: 47 B and 13 B.
    assert round(ModelShape.of(shapes.QWEN3_30B).num_active_parameters / 1e9, 2) == 3.35
    assert round(ModelShape.of(shapes.MIXTRAL).num_active_parameters / 1e9, 2) == 12.88
    dense = ModelShape.of(shapes.QWEN3_8B)
    assert dense.num_active_parameters == dense.num_parameters


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "gemma2"}, (4, 3)),
        ({"model_type": "gemma3_text", "num_hidden_layers": 13}, (4, 11)),
        ({"model_type": "mistral"}, (4, 5)),
        ({"model_type": "mistral", "sliding_window": None}, (None, 0)),
        ({"model_type": "qwen3"}, (None, 0)),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, (4, 2)),
    ],
)
def test_windowed_layers_are_counted(changes, window):
    shape = ModelShape.of(ODD | {"sliding_window": 4} | changes)
    assert (shape.window, shape.num_windowed_layers) == window


def test_the_text_part_of_a_larger_model_is_read():
    assert ModelShape.of({"model_type": "gemma3", "text_config": shapes.GEMMA2_2B}) == ModelShape.of(
        shapes.GEMMA2_2B
    )


def test_what_a_config_leaves_out_is_the_architectures():
    bare = {key: value for key, value in shapes.LLAMA_8B.items() if key != "num_key_value_heads"}
    assert ModelShape.of(bare) == replace(ModelShape.of(shapes.LLAMA_8B), num_key_heads=32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": "gpt_neox"},
            f"model type gpt_neox cannot be planned for; there are: {', '.join(FAMILIES)}",
        ),
        ({"hidden_size": None}, "the model's config lacks hidden_size"),
        (
            {"num_hidden_layers": 0},
            "num_hidden_layers is 0 in the model's config; it must be a whole number above 0",
        ),
        (
            {"vocab_size": "many"},
            "vocab_size is 'many' in the model's config; it must be a whole number above 0",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(changes, sentence):
    with pytest.raises(PlanError) as refused:
        ModelShape.of(shapes.LLAMA_8B | changes)
    assert str(refused.value) == sentence
