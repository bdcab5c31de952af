"""Low-rank adapters as folders in peft's format, read and written.

A = a pair's matrix of R rows, B = the one of R columns; see `models.adapters`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.models.adapters import Adapted, adapted_layers, linears
from millrace.models.fused import Linear
from millrace.models.load import Model, ModelError, Weights
from millrace.models.saving import host_copy, whole
from millrace.observability.files import FileError, read_json, read_tensor_header, read_text

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Our own file, which peft ignores; a second entry in the weights' header would have random order.
BASE = "base.sha256"
# What peft writes before the name that a weight has in the adapted model.
_PREFIX = "base_model.model."
# Of peft's fields, those read here, and those that do not change what a trained adapter computes.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "base_model_name_or_path"}
_IDLE = {
    *("auto_mapping", "peft_version", "revision", "task_type", "inference_mode", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "qalora_group_size"),
}
# Ways to begin that leave the base as it is.
_INITS = (True, False, "gaussian", "eva", "orthogonal")


def load_adapter(model: Model, folder: str | Path) -> None:
    """Put the adapter of a peft folder into the base that it was made for, and freeze all the rest.

    The folder's weights determine which layers are adapted. Its dropout is ignored, as all dropout is.

    Raises:
        ModelError: a file is missing or damaged, the adapter is of another kind than plain LoRA, or it was
            made for another base; nothing is changed then.
    """
    path = Path(folder)
    fields = _read_config(path, str(model.name_or_path or ""))
    layers = linears(model)
    if not (path / WEIGHTS).is_file():
        raise ModelError(f"adapter folder {path} has no {WEIGHTS} (pickles are not read)")
    try:
        read_tensor_header(path / WEIGHTS)
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError, FileError) as error:
        raise ModelError(f"adapter {path}: {WEIGHTS} is damaged: {error}") from None
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, which = key.removeprefix(_PREFIX).rpartition(".lora_")
        if name not in layers or which not in ("A.weight", "B.weight"):
            raise ModelError(
                f"adapter {path} was made for another base: it holds {key}, and this model has no linear "
                "layer for it that an adapter can stand beside"
            )
        pairs.setdefault(name, {})[which[0]] = tensor
    if not pairs:
        raise ModelError(f"adapter {path} holds no weights")
    for name, pair in pairs.items():
        _check_pair(path, name, pair, layers[name], fields["r"])
    model.requires_grad_(False)
    alpha, stabilised = fields["lora_alpha"], bool(fields.get("use_rslora"))
    for name, pair in pairs.items():
        layer = Adapted.widen(layers[name], fields["r"], alpha=alpha, rank_stabilised=stabilised)
        with torch.no_grad():
            layer.lora_A.weight.copy_(pair["A"])
            layer.lora_B.weight.copy_(pair["B"])


def save_adapter(model: Model, folder: Path, *, base: str = "", weights: bool = True) -> None:
    """Write a model's adapter as a folder that peft and `load_adapter` read; ModelError without an adapter.

    `base` is a checksum of the base's weights for `saved_base`; empty writes none. With `weights` the pairs
    are written too; they must be unsharded on this rank.
    """
    layers = adapted_layers(model)
    if not layers:
        raise ModelError("the model has no adapter to save; set model.adapter")
    first = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.name_or_path) or None,
        "r": first.rank,
        "lora_alpha": int(first.alpha) if first.alpha == int(first.alpha) else first.alpha,
        "lora_dropout": 0.0,
        "use_rslora": first.rank_stabilised,
        "target_modules": sorted(layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    if weights:
        write_pairs(adapter_pairs(model), folder)
    if base:
        (folder / BASE).write_text(base, encoding="utf-8")


def adapter_pairs(model: Model) -> dict[str, Tensor]:
    """Copy an adapter's matrices, all-gathered, to host memory, by peft's names; empty without an adapter."""
    return {
        f"{_PREFIX}{name}.lora_{which}.weight": host_copy(whole(pair.weight.detach()))
        for name, layer in adapted_layers(model).items()
        for which, pair in (("A", layer.lora_A), ("B", layer.lora_B))
    }


def write_pairs(pairs: Weights, folder: Path) -> Path:
    """Write `adapter_pairs` to an existing folder."""
    path = folder / WEIGHTS
    save_file(pairs, path, metadata={"format": "pt"})
    return path


def saved_base(folder: Path) -> str:
    """Return the checksum written by `save_adapter`; empty if there is none."""
    path = folder / BASE
    return read_text(path) if path.is_file() else ""


def _read_config(path: Path, base: str) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        raise ModelError(f"adapter folder {path} has no {CONFIG}")
    try:
        fields = read_json(path / CONFIG, dict[str, Any])
    except FileError:
        raise ModelError(f"adapter {path}: {CONFIG} is damaged; it must hold one JSON object") from None
    if fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type")
        raise ModelError(f"adapter {path} is of peft_type {kind!r}; millrace trains LORA alone")
    if type(fields.get("r")) is not int or fields["r"] < 1:
        raise ModelError(f"adapter {path} has r {fields.get('r')!r}; a rank is at least 1")
    alpha = fields.get("lora_alpha")
    if not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise ModelError(f"adapter {path} has lora_alpha {alpha!r}; it must be a number above 0")
    others = {key: value for key, value in fields.items() if key not in _READ | _IDLE and value}
    harmless = {"init_lora_weights": _INITS, "bias": ("none",)}
    others = {key: value for key, value in others.items() if value not in harmless.get(key, ())}
    if others:
        key, value = min(others.items())
        raise ModelError(
            f"adapter {path} sets {key} to {value!r}, which millrace does not do; merge it with peft into a "
            "model folder and set model.path to that"
        )
    made_for = fields.get("base_model_name_or_path") or ""
    if made_for and base and PurePath(made_for).name != PurePath(base).name:
        raise ModelError(
            f"adapter {path} was made for base {made_for} and the model is {base}; if they are the same, set "
            f"base_model_name_or_path in {CONFIG} to null"
        )
    return fields


def _check_pair(path: Path, name: str, pair: dict[str, Tensor], layer: Linear, rank: int) -> None:
    for which, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
        if which not in pair:
            raise ModelError(f"adapter {path} lacks lora_{which} of layer {name}")
        if tuple(pair[which].shape) != shape:
            raise ModelError(
                f"adapter {path} was made for another base: lora_{which} of layer {name} is "
                f"{tuple(pair[which].shape)}, and this model makes it {shape}"
            )
