"""A model as a Hugging Face folder that several ranks write together, each some whole layers; or as a shell.

Whatever the layout, what ranks hold parts of is gathered weight by weight (as for the sampler), so that the
folder is an ordinary one and no file has to be put together afterwards. A shell is a model without its
weights: enough for another process to build it before the weights arrive.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.core_model_loading import revert_weight_conversion

from millrace.models.load import Model, Weights, fresh_model, named_weights, read_config, sentences

INDEX = "model.safetensors.index.json"
FIXED = "fixed.safetensors"
# The part of a weight's name that identifies its layer.
_LAYER = re.compile(r".*?\.\d+\.")


def save_config(model: Model, folder: Path) -> None:
    """Write all of the folder but weights."""
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def host_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory of its own."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def own_layers(named: Iterable[tuple[str, Tensor]], *, rank: int, num_ranks: int) -> Weights:
    """Copy the weights that this rank writes to host memory.

    All ranks iterate the same complete weights in the same order. A layer stays together, because a file may
    hold weights that are made of several of a layer's. Each goes to the rank with the fewest bytes so far.
    """
    num_bytes = [0] * num_ranks
    writers: dict[str, int] = {}
    kept: Weights = {}
    for name, tensor in named:
        found = _LAYER.match(name)
        layer = found[0] if found else name
        if layer not in writers:
            writers[layer] = min(range(num_ranks), key=num_bytes.__getitem__)
        num_bytes[writers[layer]] += tensor.nbytes
        if writers[layer] == rank:
            kept[name] = host_copy(tensor)
    return kept


def fixed_numbers(model: Model) -> Weights:
    """Copy what a folder holds besides parameters: the buffers that are not computed from the config."""
    return {name: host_copy(x) for name, x in named_weights(model) if not isinstance(x, nn.Parameter)}


def save_shell(model: Model, folder: Path) -> None:
    """Write a model's config, and the numbers that are neither weights nor follow from the config."""
    save_config(model, folder)
    save_file(fixed_numbers(model), folder / FIXED)


def load_shell(folder: Path, *, dtype: torch.dtype) -> Model:
    """Build the model of `save_shell` with random weights; ModelError if it cannot run packed."""
    with sentences(folder):
        config = read_config(folder)
    model = fresh_model(config, seed=0, dtype=dtype)
    for name, tensor in load_file(folder / FIXED).items():
        module, _, leaf = name.rpartition(".")
        # Not copied into the existing one: its dtype may be narrower.
        model.get_submodule(module)._buffers[leaf] = tensor
    return model


def write_weights(model: Model, weights: Weights, folder: Path, *, rank: int, num_ranks: int) -> list[Path]:
    """Write one rank's file of weights in the form of the model's hub; none without weights."""
    ignored = set(model._keys_to_ignore_on_save or ())
    weights = {name: tensor for name, tensor in weights.items() if name not in ignored}
    if not weights:
        return []
    number = f"-{rank + 1:05d}-of-{num_ranks:05d}" if num_ranks > 1 else ""
    path = folder / f"model{number}.safetensors"
    stored = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, weights).items()}
    save_file(stored, path, metadata={"format": "pt"})
    return [path]


def write_index(folder: Path) -> None:
    """Write the index of weights to files, after all ranks have written theirs."""
    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def whole(tensor: Tensor) -> Tensor:
    """All-gather a tensor that may be sharded; all ranks with shards of it call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    # An offloaded shard is in host memory, where the ranks cannot all-gather it.
    near: Any = tensor.to(tensor.device_mesh.device_type)
    placements = list(near.placements)
    for dim in range(len(placements)):
        # One dimension at a time, the last sharded one first; torch warns for two at once.
        placements[dim] = Replicate()
        near = near.redistribute(placements=placements)
    full: Tensor = near.to_local()
    return full


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight unsharded under its Hugging Face name, tied ones once.

    A collective: all ranks with shards iterate together, and each gets every weight; at any moment a rank
    holds one whole weight besides its own shards.
    """
    for name, weight in named_weights(model):
        yield name, whole(weight.detach())
