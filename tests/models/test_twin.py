"""Twins: small, of the same kinds of layers, with the same equalities of widths, and bold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from millrace.models.load import LANGUAGE
from millrace.models.twin import TwinError, chosen_layers, decoder_stack, embolden, layer_kinds, twin_of

MAKE = LANGUAGE.reading.make


def twin(architecture: str, **shape: Any) -> Any:
    return twin_of(AutoConfig.for_model(architecture, **shape), MAKE)


@pytest.mark.parametrize(
    ("kinds", "runs", "chosen"),
    [
        ([0] * 32, True, [0, 1]),
        ([0], True, [0]),
        # Two of a kind in a row stand for any number of them; each pair of neighbours is there.
        ([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1], True, [0, 1, 5, 6, 11]),
        ([0, 0, 0, 0, 0, 1, 0, 0], False, [0, 1, 2, 3, 4, 5, 6]),
        ([0, 1, 0, 1], True, [0, 1, 2, 3]),
        ([0, 1, 2], True, [0, 1, 2]),
    ],
)
def test_layers_hold_each_kind_each_pair_and_a_repeat(
    kinds: list[int], runs: bool, chosen: list[int]
) -> None:
    assert chosen_layers(kinds, runs=runs) == chosen


def test_a_twin_of_a_large_model_is_small_and_has_short_windows() -> None:
    small = twin("gemma3_text")
    assert (small.hidden_size, small.num_hidden_layers, small.vocab_size) == (64, 4, 96)
    assert small.layer_types == ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
    assert small.sliding_window == 5
    assert sum(p.numel() for p in MAKE(small).parameters()) < 300_000


def test_a_twin_has_tokens_enough_for_a_trial_however_few_the_model_has() -> None:
    assert [twin("qwen3", vocab_size=size).vocab_size for size in (2, 4, 5)] == [96, 96, 96]


@pytest.mark.slow
def test_widths_that_differ_stay_different_and_equal_ones_equal() -> None:
    deepseek = twin("deepseek_v3")
    assert deepseek.v_head_dim == deepseek.qk_nope_head_dim
    lite = twin("glm4_moe_lite")  # there values are as wide as keys
    assert lite.v_head_dim == lite.qk_nope_head_dim + lite.qk_rope_head_dim
    llama = twin("llama", num_attention_heads=32, num_key_value_heads=1)
    assert (llama.num_attention_heads, llama.num_key_value_heads) == (4, 1)
    wide = twin("qwen3", hidden_size=1024, num_attention_heads=16, head_dim=128)
    assert wide.head_dim * wide.num_attention_heads > wide.hidden_size


@pytest.mark.slow
def test_layers_that_share_keys_still_do() -> None:
    small = twin("gemma3n_text")
    assert 0 < small.num_kv_shared_layers < small.num_hidden_layers <= 16
    assert len(small.layer_types) == len(small.activation_sparsity_pattern) == small.num_hidden_layers


def test_the_kinds_of_layers_are_those_of_the_model() -> None:
    config = AutoConfig.for_model("deepseek_v3")
    with torch.device("meta"):
        kinds = layer_kinds(MAKE(config))
    assert set(layer_kinds(MAKE(twin("deepseek_v3")))) == set(kinds) == {0, 1}


def test_models_of_other_sizes_have_the_same_twin() -> None:
    sizes: list[dict[str, Any]] = [
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
        {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16},
    ]
    twins = [twin("llama", intermediate_size=5 * size["hidden_size"], **size).to_dict() for size in sizes]
    assert twins[0] == twins[1]


def test_bold_weights_are_all_new_and_depend_on_the_seed_alone() -> None:
    small = twin("qwen3")
    models = [MAKE(small) for _ in range(3)]
    before = [p.clone() for p in models[0].parameters()]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        embolden(model, seed)
    first, second, other = (list(model.parameters()) for model in models)
    assert not any(torch.equal(old, new) for old, new in zip(before, first, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_a_model_without_layers_has_no_twin() -> None:
    assert decoder_stack(torch.nn.Linear(2, 2)) is None
    with pytest.raises(TwinError, match=r"^it has no list of layers$"):
        twin_of(AutoConfig.for_model("llama"), lambda config: torch.nn.Linear(2, 2))  # type: ignore[arg-type,return-value]
