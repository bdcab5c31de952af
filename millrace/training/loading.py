"""Sharded loading of models: from a folder, or from a model that is sharded already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.config.mesh_section import MeshConfig
from millrace.distributed.fsdp import Root
from millrace.distributed.load_sharded import (
    empty_model,
    read_weights,
    stored_weights,
    take_weights,
)
from millrace.distributed.mesh import Mesh
from millrace.distributed.pipeline import Pipeline
from millrace.models.load import LANGUAGE, Model, ModelKind, load_kind, named_weights
from millrace.training.parallel_model import ParallelModel, spread_over


def loaded(
    folder: str | Path,
    mesh: Mesh | None,
    options: MeshConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kind: ModelKind = LANGUAGE,
    prepare: Callable[[Model], object] | None = None,
) -> ParallelModel:
    """A model of a folder, sharded as by `spread_over`; each rank reads only what it keeps.

    A collective call. Whether the folder holds all that is needed is found out before anything is exchanged;
    in the end the ranks try the model together. `prepare` changes the model in place before it is sharded,
    where its weights may have no memory yet.

    Raises:
        ModelError: the folder cannot be loaded as `kind`.
        ValueError: as `spread_over`.
    """
    model = (
        load_kind(kind, folder, dtype=dtype).to(device)
        if mesh is None
        else empty_model(folder, dtype=dtype, kind=kind)
    )
    if prepare is not None:
        prepare(model)
    if mesh is None:
        return spread_over(model, mesh, options)
    with stored_weights(folder, model) as stored:
        spread = spread_over(model, mesh, options)
        read_weights(_roots(spread), model, stored, device=device, offload=options.offload)
    spread.runner.check(kind)
    return spread


def taken(
    model: Model, named: Iterable[tuple[str, Tensor]], mesh: Mesh, options: MeshConfig, device: torch.device
) -> ParallelModel:
    """A model from `models.load_sharded`, sharded as by `spread_over` and given weights of another one.

    `named` are its weights whole, one at a time; all ranks go through them in step.

    Raises:
        ValueError: as `spread_over`, or they are not the model's weights.
    """
    wanted = [name for name, _ in named_weights(model)]
    spread = spread_over(model, mesh, options)
    take_weights(_roots(spread), model, named, wanted, device=device, offload=options.offload)
    spread.runner.check()
    return spread


def _roots(spread: ParallelModel) -> list[Root]:
    runner = spread.runner
    roots: list[Any] = [*runner.runners.values()] if isinstance(runner, Pipeline) else [runner]
    assert all(isinstance(root, Root) for root in roots)
    return roots
