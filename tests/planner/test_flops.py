"""Operations counted from a shape are those that torch counts and papers state."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.planner.flops import TRAINING, forward_operations, training_operations, utilization
from millrace.planner.model_shape import ModelShape
from tests.close import close_fp64
from tests.planner import shapes

FIELDS = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 72,
}
GPT3 = ModelShape(
    width=12288,
    num_layers=96,
    num_heads=96,
    num_key_heads=96,
    head_width=128,
    vocabulary=51200,
    tied=True,
    # Two matrices of 4 D in the paper, three of 8 D / 3 here: the same operations.
    mlp_width=8 * 12288 // 3,
)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("kind", "extra"), [("llama", {}), ("qwen3", {"head_dim": 20}), ("gemma2", {"head_dim": 12})]
)
def test_products_are_those_that_torch_counts(kind, extra):
    config = AutoConfig.for_model(kind, **FIELDS, **extra)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 17, dtype=torch.int64), use_cache=False)
    shape = ModelShape.of(config.to_dict())
    ours = forward_operations(shape, [17], 17)
    # Their attention computes the whole square.
    square = 3 * 4 * shape.num_heads * shape.head_width * 17 * 17
    assert counter.get_total_flops() == ours.projections + ours.mlp + ours.head + square


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_scores_are_counted_pair_by_pair(window):
    shape = ModelShape.of(shapes.MISTRAL_7B | {"sliding_window": window, "num_hidden_layers": 2})
    lengths = [1, 5, 0, 12]
    pairs = sum(min(place + 1, window or length) for length in lengths for place in range(length))
    assert forward_operations(shape, lengths, 3).scores == 2 * 4 * 32 * 128 * pairs


def test_a_mixture_counts_the_experts_a_token_goes_through():
    shape = ModelShape.of(shapes.QWEN3_30B)
    ours = forward_operations(shape, [1], 1)
    assert (ours.mlp, ours.experts) == (0, 48 * (8 * 6 * 2048 * 768 + 2 * 2048 * 128))
    # Twice the active weights but for those that multiply nothing: embedding and norms.
    still = shape.head_parameters + 48 * (2 * 2048 + 2 * 128) + 2048
    assert ours.total - ours.scores == 2 * (shape.num_active_parameters - still)


def test_training_is_the_formula_of_megatron():
    # 72 B s l h^2 (1 + s / 6 h + V / 12 l h) without recomputation (with it, 96 and 16); the whole square.
    batch, length, width, layers, vocabulary = 3, 2048, 12288, 96, 51200
    expected = 72 * batch * length * layers * width**2
    expected *= 1 + length / (6 * width) + vocabulary / (12 * layers * width)
    ours = forward_operations(GPT3, [length] * batch, batch * length)
    seen = ours.scores * 2 * length / (length + 1)
    close_fp64(TRAINING * (ours.total - ours.scores + seen), expected)
    assert training_operations(GPT3, [length] * batch, batch * length) == 3 * ours.total


def test_only_predicted_tokens_cost_a_head():
    shape = ModelShape.of(shapes.LLAMA_8B)
    more, less = forward_operations(shape, [9, 4], 13), forward_operations(shape, [9, 4], 2)
    assert (more.head, less.head) == (2 * 4096 * 128256 * 13, 2 * 4096 * 128256 * 2)
    assert more.layers == less.layers


def test_utilization_is_a_fraction_of_the_peak():
    close_fp64(utilization(3e15, seconds=2.5, peak_flops=4e15), 0.3)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: forward_operations(GPT3, [3, -1], 1),
            "length_B [3, -1] and num_predicted 1 must be 0 or more",
        ),
        (
            lambda: forward_operations(GPT3, [3], -2),
            "length_B [3] and num_predicted -2 must be 0 or more",
        ),
        (
            lambda: utilization(1.0, seconds=0.0, peak_flops=1.0),
            "seconds 0.0 and peak_flops 1.0 must be above 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, sentence):
    with pytest.raises(ValueError) as refused:
        call()
    assert str(refused.value) == sentence
