"""Adapters as folders of peft: read and written to the last bit, or refused in a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.models.adapter_folder import CONFIG, WEIGHTS, load_adapter, save_adapter, saved_base
from millrace.models.adapters import adapted_layers, add_adapter, merged, merged_tensors, without_adapter
from millrace.models.load import ModelError, load_model, save_model
from tests.close import close_fp32
from tests.models.test_adapters import adapted_model, logits, shake
from tests.models.tiny import tiny_model

PEFT = Path(__file__).parents[1] / "golden" / "peft"


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


def test_an_adapter_that_peft_saved_says_what_it_said_there():
    said = json.loads((PEFT / "logits.json").read_text())
    model = tiny_model("qwen3", seed=5)
    close_fp32(logits(model, said["token_T"]), said["base_TV"], atol=2e-5)
    load_adapter(model, PEFT)
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert learning == [name for name, _ in model.named_parameters() if ".lora_" in name]
    close_fp32(logits(model, said["token_T"]), said["logit_TV"], atol=2e-5)
    close_fp32(logits(merged(model), said["token_T"]), said["logit_TV"], atol=5e-5)
    with without_adapter(model):
        close_fp32(logits(model, said["token_T"]), said["base_TV"], atol=2e-5)
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"q_proj", "v_proj", "down_proj"}


def test_a_folder_saved_by_us_holds_what_peft_saved(tmp_path):
    model = tiny_model("qwen3", seed=5)
    load_adapter(model, PEFT)
    save_adapter(model, tmp_path)
    ours, theirs = load_file(tmp_path / WEIGHTS), load_file(PEFT / WEIGHTS)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    fields, peft_fields = (json.loads((folder / CONFIG).read_text()) for folder in (tmp_path, PEFT))
    names = ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias", "fan_in_fan_out")
    assert {name: fields[name] for name in names} == {name: peft_fields[name] for name in names}
    assert fields["lora_dropout"] == 0.0  # millrace has none
    assert fields["base_model_name_or_path"] is None
    assert len(fields["target_modules"]) == 2 * 3
    assert set(fields["target_modules"]) == set(adapted_layers(model))


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("stabilised", [False, True])
def test_what_is_saved_is_loaded_to_the_last_bit(tmp_path, stabilised):
    save_model(tiny_model("mistral"), tmp_path / "base")
    model = load_model(tmp_path / "base", dtype=torch.float32)
    add_adapter(model, rank=2, alpha=0.3, seed=0, targets=("o_proj", "layers.1.mlp.up_proj"))
    for layer in adapted_layers(model).values():
        layer.rank_stabilised = stabilised
    shake(model, 4)
    save_adapter(model, tmp_path / "adapter", base="1234")
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )
    again = load_model(tmp_path / "base", dtype=torch.float32)
    load_adapter(again, tmp_path / "adapter")
    names = [f"model.layers.{n}.self_attn.o_proj" for n in range(2)] + ["model.layers.1.mlp.up_proj"]
    assert sorted(adapted_layers(again)) == sorted(names)
    assert torch.equal(logits(again), logits(model))
    for one, two in zip(merged_tensors(again), merged_tensors(model), strict=True):
        assert one[0] == two[0]
        assert torch.equal(one[1], two[1])
    assert (saved_base(tmp_path / "adapter"), saved_base(PEFT)) == ("1234", "")
