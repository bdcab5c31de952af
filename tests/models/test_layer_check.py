"""One layer of each kind with its own weights: what differs is found relative to the layer's own output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.models import attention, layer_check
from millrace.models.facts import record_facts
from millrace.models.layer_check import compare_layers
from millrace.models.load import (
    LANGUAGE,
    Model,
    ModelError,
    fresh_config,
    fresh_model,
    load_model,
    save_model,
)
from tests.models.tiny import SHAPES, SIZES, VOCABULARY, tiny_model

READING = LANGUAGE.reading


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model_passes(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture, dtype=dtype)
    assert compare_layers(model, READING, whole=True) == ""
    assert compare_layers(model, READING, whole=False) == ""


def test_a_fault_that_hardly_moves_the_logits_of_a_fresh_model_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = fresh_config("qwen3", SIZES | SHAPES["qwen3"], vocab_size=VOCABULARY, eos_token_id=0)
    model = fresh_model(config, seed=0, dtype=torch.float32)
    packed = attention.packed_attention

    def wrong(*heads: Any, **options: Any) -> Tensor:
        return packed(*heads, **options) * 1.005

    monkeypatch.setattr(attention, "packed_attention", wrong)
    assert compare_layers(model, READING, whole=True).startswith(
        "its Qwen3Attention computes something else, by 0.005"
    )


def test_numbers_that_are_none_are_refused_by_name(tmp_path: Any) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    save_model(model, tmp_path)
    with pytest.raises(
        ModelError, match=r"its weight model\.layers\.1\.mlp\.up_proj\.weight holds numbers that"
    ):
        load_model(tmp_path, dtype=torch.float32)


def test_the_forward_ends_behind_the_first_layer_of_each_kind() -> None:
    model: Model = tiny_model("llama")  # both layers are of one kind
    seen: list[int] = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: seen.append(number))
    compare_layers(model, READING, whole=True)
    assert set(seen) == {0}
    compare_layers(model, READING, whole=False)
    assert set(seen) == {0, 1}
    record_facts(model)
    assert layer_check._mixers(model) == [model.model.layers[0].self_attn]
