"""One engine over several ranks of a run, by tensor parallelism.

Neighbouring ranks share an engine (`engine.tensor_parallel_size`). Each holds its slice of every large weight
and the keys and values of its own heads, by the plan of the trainer (`distributed.tensor`). All of them run
the same scheduler over the same requests in lockstep; logits are all-gathered, and all take the tokens that
the first one samples. Experts are whole on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from millrace.distributed import tensor
from millrace.distributed.collectives import local
from millrace.distributed.fsdp import Root
from millrace.distributed.load_sharded import empty_model, own_part, read_weights, stored_weights
from millrace.distributed.mesh import Mesh, make_mesh, sizes_of
from millrace.errors import SetupError
from millrace.models.load import LANGUAGE, Model, named_weights
from millrace.planner.layout import Layout, tensor_misfit
from millrace.protocols import RankGroup

SETTING = "engine.tensor_parallel_size"


def engine_mesh(size: int, num_ranks: int, device: torch.device) -> Mesh | None:
    """Build the groups of `size` neighbouring ranks that share an engine; None for 1. A collective call."""
    return None if size == 1 else make_mesh(Layout(dp_shard=num_ranks // size, tp=size), device.type)


def shard_model(model: Model, mesh: Mesh) -> None:
    """Slice an engine's model in place, the same on every rank of its group. A collective call.

    Raises:
        SetupError: the group does not divide the model, or its architecture cannot be sliced.
    """
    _slice(model, mesh)
    Root(model).check()


def load_shards(folder: str | Path, mesh: Mesh, *, dtype: torch.dtype, device: torch.device) -> Model:
    """Load an engine's model from a folder, each rank its own slices. A collective call.

    Raises:
        ModelError: the folder cannot be loaded.
        SetupError: as `shard_model`.
    """
    model = empty_model(folder, dtype=dtype)
    root = Root(model)
    with stored_weights(folder, model) as stored:
        _slice(model, mesh)
        read_weights([root], model, stored, device=device)
    root.check(LANGUAGE)
    return model


def own_shards(model: Model, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shard of each whole weight, in memory of its own.

    A weight of another name or shape than the engine's passes unchanged; the engine refuses it.
    """
    held = dict(named_weights(model))
    for name, weight in named:
        own = held.get(name)
        if own is None or own.shape != weight.shape or local(own).shape == own.shape:
            yield name, weight
        else:
            # A view would keep the whole weight in memory.
            yield name, weight[own_part(own)].clone(memory_format=torch.contiguous_format)


def first_problem(ranks: RankGroup) -> Callable[[str], str]:
    """Return a collective function: given each rank's problem or an empty text, the first problem."""

    def first(problem: str) -> str:
        told = [one.decode() for one in ranks.all_gather(problem.encode())]
        return next((f"on rank {rank}, {one}" for rank, one in enumerate(told) if one), "")

    return first


def _slice(model: Model, mesh: Mesh) -> None:
    reason = tensor_misfit(mesh.size("tp"), sizes_of(model.config), SETTING)
    if reason is not None:
        raise SetupError(reason)
    try:
        tensor.apply(model, mesh, sequence=False, setting=SETTING)
    except ValueError as error:
        raise SetupError(str(error)) from None
