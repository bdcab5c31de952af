"""Whatever number of ranks write a model's folder, it is the one that transformers writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millrace.models.load import Model, load_model, save_model
from millrace.models.saving import (
    INDEX,
    fixed_numbers,
    own_layers,
    save_config,
    write_index,
    write_weights,
)
from tests.models.mixtures import MIXTURES, mixture
from tests.models.tiny import tiny_model


def made(architecture: str) -> Model:
    return mixture(architecture, seed=1) if architecture in MIXTURES else tiny_model(architecture, seed=1)


def write(model: Model, folder: Path, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """What as many ranks do one after another; what each of them wrote."""
    save_config(model, folder)
    files = []
    for rank in range(num_ranks):
        weights = own_layers(model.named_parameters(), rank=rank, num_ranks=num_ranks)
        if rank == num_ranks - 1:
            weights |= fixed_numbers(model)
        files += write_weights(model, weights, folder, rank=rank, num_ranks=num_ranks)
    if num_ranks > 1:
        write_index(folder)
    return [load_file(path) for path in files]


# Tied and untied heads, experts that are stored one by one, a router whose bias is no weight.
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3", "qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("num_ranks", [1, 3, 9])
def test_the_folder_holds_what_transformers_writes(architecture, num_ranks, tmp_path):
    model = made(architecture)
    save_model(model, tmp_path / "whole")
    files = write(model, tmp_path / "shared", num_ranks)
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    found = {name: tensor for each in files for name, tensor in each.items()}
    assert sum(map(len, files)) == len(found)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("config.json", "generation_config.json"):
        texts = [(tmp_path / folder / name).read_text() for folder in ("whole", "shared")]
        assert texts[0] == texts[1]
    again = load_model(tmp_path / "shared", dtype=torch.float32).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_one_rank_writes_one_file_and_several_an_index(tmp_path):
    model = made("llama")
    write(model, tmp_path / "one", 1)
    write(model, tmp_path / "two", 2)
    assert {path.name for path in (tmp_path / "one").glob("model*")} == {"model.safetensors"}
    files = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert {path.name for path in (tmp_path / "two").glob("model*")} == files | {INDEX}
    placed = json.loads((tmp_path / "two" / INDEX).read_text())["weight_map"]
    assert placed == {
        name: path.name for path in (tmp_path / "two").glob("*.safetensors") for name in load_file(path)
    }


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_layer_stays_together_and_ranks_get_about_as_much(num_ranks):
    named = [("embed.weight", torch.zeros(30))]
    named += [(f"layers.{n}.{m}.weight", torch.zeros(5 + n)) for n in range(12) for m in "abc"]
    shares = [own_layers(named, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    layers = [{name.rpartition(".")[0][:-2] for name in share if "layers" in name} for share in shares]
    assert sum(map(len, layers)) == len(set().union(*layers)) == 12
    num_bytes = [sum(tensor.nbytes for tensor in share.values()) for share in shares]
    assert sum(num_bytes) == sum(tensor.nbytes for _, tensor in named)
    # No rank has more than a layer above another.
    assert max(num_bytes) - min(num_bytes) <= 3 * 16 * 4


def test_what_was_taken_stays_as_it_was():
    model = made("llama")
    held = own_layers(model.named_parameters(), rank=0, num_ranks=1)
    before = {name: tensor.clone() for name, tensor in held.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(held[name], before[name]) for name in held)


def test_a_rank_without_weights_writes_nothing(tmp_path):
    assert write_weights(made("llama"), {}, tmp_path, rank=3, num_ranks=4) == []
    assert list(tmp_path.iterdir()) == []
