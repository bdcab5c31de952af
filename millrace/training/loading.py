"""Models whose weights come to ranks in parts: from a folder, or from a model that is shared out already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from millrace.config.mesh import MeshConfig
from millrace.models.fsdp import Root
from millrace.models.load import LANGUAGE, Model, ModelKind, load_kind
from millrace.models.load_sharded import empty_model, read_weights, take_weights
from millrace.models.mesh import Mesh
from millrace.training.spread import Spread, spread_over


def loaded(
    folder: str | Path,
    mesh: Mesh | None,
    options: MeshConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kind: ModelKind = LANGUAGE,
    prepare: Callable[[Model], object] | None = None,
) -> Spread:
    """A model of a folder, dealt as `spread_over` does it; each rank reads only what it keeps.

    The stages of a pipeline are tried against the whole model, so with `pp` each rank reads all of it first.

    Args:
        folder: a Hugging Face folder (safetensors) that every rank can read.
        mesh: from `mesh_of`.
        options: of the recipe.
        dtype: of the weights.
        device: of this rank.
        kind: as what the folder is loaded.
        prepare: changes the model in place before it is dealt, where its weights may have no memory yet.

    Raises:
        ModelError: the folder cannot be loaded as `kind`.
        ValueError: as `spread_over`.
    """
    whole = mesh is None or mesh.size("pp") > 1
    model = (
        load_kind(kind, folder, dtype=dtype).to(device)
        if whole
        else empty_model(folder, dtype=dtype, kind=kind)
    )
    if prepare is not None:
        prepare(model)
    spread = spread_over(model, mesh, options)
    if not whole:
        assert isinstance(spread.runner, Root)
        read_weights(spread.runner, folder, device=device, offload=options.offload, kind=kind)
    return spread


def taken(
    model: Model, named: Iterable[tuple[str, Tensor]], mesh: Mesh, options: MeshConfig, device: torch.device
) -> Spread:
    """A model without memory, dealt as `spread_over` does it, and given weights of another one.

    Args:
        model: from `models.load_sharded`.
        named: its weights whole, one at a time; all ranks go through them in step.
        mesh: from `mesh_of`; it has no pipeline.
        options: of the recipe.
        device: of this rank.

    Raises:
        ValueError: as `spread_over`, or they are not the model's weights.
    """
    spread = spread_over(model, mesh, options)
    assert isinstance(spread.runner, Root)
    take_weights(spread.runner, named, device=device, offload=options.offload)
    return spread
