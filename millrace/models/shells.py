"""A model without its weights: enough for another process to build it before the weights arrive."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from millrace.models.load import Model, fresh_model, read_config, sentences
from millrace.models.saving import fixed_numbers, save_config

FIXED = "fixed.safetensors"


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
