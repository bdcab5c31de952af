"""Adapters that cannot be made, read or saved are refused in a sentence, and nothing is changed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.models.adapters import CONFIG, WEIGHTS, adapted_layers, add_adapter, load_adapter, save_adapter
from millrace.models.load import ModelError, load_model, save_model
from tests.models.test_adapters import PEFT, adapted_model
from tests.models.tiny import tiny_model

HAS = "this model has: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rank": 0}, "rank is 0; an adapter's rank must be at least 1"),
        ({"alpha": 0.0}, "alpha is 0.0; an adapter's alpha must be a number above 0"),
        ({"alpha": math.nan}, "alpha is nan; an adapter's alpha must be a number above 0"),
        ({"targets": ()}, "adapter targets are empty; name layers or write all-linear"),
        (
            {"targets": ("q_proj", "proj")},
            "adapter target 'proj' is no layer; " + HAS,
        ),
        (
            {"targets": ("lm_head",)},
            "adapter target 'lm_head' means lm_head, which an adapter cannot stand beside; " + HAS,
        ),
        (
            {"targets": ("embed_tokens",)},
            "adapter target 'embed_tokens' means model.embed_tokens, which an adapter cannot stand beside; "
            + HAS,
        ),
    ],
)
def test_an_adapter_that_cannot_be_made_is_refused_in_a_sentence_and_changes_nothing(more, message):
    model = tiny_model("qwen3")
    with pytest.raises(ModelError) as caught:
        add_adapter(model, **({"rank": 2, "alpha": 1.0, "seed": 0} | more))
    assert str(caught.value) == message
    assert adapted_layers(model) == {}
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_model_has_one_adapter_at_most_and_one_is_needed_to_save_it(tmp_path):
    model = adapted_model()
    with pytest.raises(ModelError, match="the model has an adapter already; merge it first"):
        load_adapter(model, PEFT)
    with pytest.raises(ModelError, match="the model has no adapter to save; set model.adapter"):
        save_adapter(tiny_model("qwen3"), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def damaged(folder: Path, **fields) -> Path:
    """What peft saved, with other fields."""
    shutil.copytree(PEFT, folder)
    config = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


MERGE = "which millrace does not do; merge it with peft into a model folder and set model.path to that"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "adapter {} is of peft_type 'IA3'; millrace trains LORA alone"),
        ({"r": 0}, "adapter {} has r 0; a rank is at least 1"),
        ({"r": None}, "adapter {} has r None; a rank is at least 1"),
        ({"lora_alpha": -1}, "adapter {} has lora_alpha -1; it must be a number above 0"),
        ({"use_dora": True}, "adapter {} sets use_dora to True, " + MERGE),
        ({"bias": "all"}, "adapter {} sets bias to 'all', " + MERGE),
        ({"modules_to_save": ["lm_head"]}, "adapter {} sets modules_to_save to ['lm_head'], " + MERGE),
        ({"rank_pattern": {"q_proj": 4}}, "adapter {} sets rank_pattern to {{'q_proj': 4}}, " + MERGE),
        ({"init_lora_weights": "pissa"}, "adapter {} sets init_lora_weights to 'pissa', " + MERGE),
        (
            {"r": 3},
            "adapter {} was made for another base: lora_A of layer model.layers.0.mlp.down_proj is (2, 48), "
            "and this model makes it (3, 48)",
        ),
    ],
)
def test_an_adapter_of_another_kind_is_refused_in_a_sentence(fields, message, tmp_path):
    folder = damaged(tmp_path / "adapter", **fields)
    model = tiny_model("qwen3")
    with pytest.raises(ModelError) as caught:
        load_adapter(model, folder)
    assert str(caught.value) == message.format(folder)
    assert adapted_layers(model) == {}


def test_harmless_fields_are_passed_over(tmp_path):
    fields = {"init_lora_weights": "gaussian", "target_modules": "all-linear", "layers_to_transform": [0, 1]}
    model = tiny_model("qwen3", seed=5)
    load_adapter(model, damaged(tmp_path / "adapter", **fields))
    assert len(adapted_layers(model)) == 6


def test_an_adapter_for_another_base_is_refused_by_layer_by_shape_and_by_name(tmp_path):
    with pytest.raises(ModelError) as caught:
        load_adapter(tiny_model("gpt_neox"), PEFT)
    key = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    assert str(caught.value) == (
        f"adapter {PEFT} was made for another base: it holds {key}, and this model has no linear layer for "
        "it that an adapter can stand beside"
    )
    with pytest.raises(ModelError) as caught:
        load_adapter(tiny_model("gemma2"), PEFT)
    assert str(caught.value) == (
        f"adapter {PEFT} was made for another base: lora_B of layer model.layers.0.self_attn.q_proj is (64, "
        "2), and this model makes it (32, 2)"
    )
    save_model(tiny_model("qwen3"), tmp_path / "llama")
    with pytest.raises(ModelError) as caught:
        load_adapter(load_model(tmp_path / "llama", dtype=torch.float32), PEFT)
    assert str(caught.value) == (
        f"adapter {PEFT} was made for base gbase and the model is {tmp_path / 'llama'}; if they are the "
        "same, set base_model_name_or_path in adapter_config.json to null"
    )
    shutil.move(tmp_path / "llama", tmp_path / "gbase")
    load_adapter(load_model(tmp_path / "gbase", dtype=torch.float32), PEFT)


def test_a_folder_with_a_missing_or_damaged_file_is_refused_by_name(tmp_path):
    def message() -> str:
        with pytest.raises(ModelError) as caught:
            load_adapter(tiny_model("qwen3"), tmp_path / "adapter")
        return str(caught.value).replace(str(tmp_path), "")

    assert message() == "adapter folder /adapter has no adapter_config.json"
    damaged(tmp_path / "adapter")
    (tmp_path / "adapter" / WEIGHTS).write_bytes(b"nothing")
    assert message().startswith("adapter /adapter: adapter_model.safetensors is damaged: ")
    (tmp_path / "adapter" / WEIGHTS).unlink()
    assert message() == "adapter folder /adapter has no adapter_model.safetensors (pickles are not read)"
    tensors = load_file(PEFT / WEIGHTS)
    save_file({}, tmp_path / "adapter" / WEIGHTS)
    assert message() == "adapter /adapter holds no weights"
    del tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    assert message() == "adapter /adapter lacks lora_B of layer model.layers.1.self_attn.v_proj"
    (tmp_path / "adapter" / CONFIG).write_text("[1]")
    assert message() == "adapter /adapter: adapter_config.json is damaged; it must hold one JSON object"
    (tmp_path / "adapter" / CONFIG).write_text("{")
    assert message() == "adapter /adapter: adapter_config.json is damaged; it must hold one JSON object"
