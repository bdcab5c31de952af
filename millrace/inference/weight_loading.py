"""In-place weight update of an engine's model, all weights or none.

Of a sharded model they are this rank's shards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from millrace.distributed.collectives import local
from millrace.models.load import named_weights


@torch.no_grad()
def load_in_place(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every weight (`models.load.named_weights`) into the model's parameters.

    All are checked before the first copy. A name that is missing, unknown or given twice, or another shape or
    dtype, is a ValueError, and no weight is changed.
    """
    weights = {name: local(weight) for name, weight in named_weights(model)}
    sent: dict[str, Tensor] = {}
    for name, tensor in named_tensors:
        held = weights.get(name)
        if held is None:
            raise ValueError(f"weight {name} is not one of the engine's")
        if name in sent:
            raise ValueError(f"weight {name} was sent twice")
        if held.shape != tensor.shape or held.dtype != tensor.dtype:
            theirs, ours = f"{tuple(tensor.shape)} {tensor.dtype}", f"{tuple(held.shape)} {held.dtype}"
            raise ValueError(f"weight {name} was sent as {theirs}; the engine holds {ours}")
        sent[name] = tensor
    missing = weights.keys() - sent.keys()
    if missing:
        raise ValueError(f"{len(missing)} weights were not sent, the first being {min(missing)}")
    for name, tensor in sent.items():
        weights[name].copy_(tensor)


@torch.no_grad()
def release_weights(model: nn.Module) -> dict[str, torch.Size]:
    """Free the memory of every weight and return the shapes of whole ones; the parameters stay."""
    shapes = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            # A shard is reached as a view only; its storage is its own.
            local(parameter).untyped_storage().resize_(0)
            continue
        shapes[name] = parameter.shape
        parameter.data = parameter.data.new_empty(0)
    return shapes


@torch.no_grad()
def restore_weights(model: nn.Module, shapes: dict[str, torch.Size]) -> None:
    """Allocate every weight again, filled with zeros until a weight update."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            shard = local(parameter)
            shard.untyped_storage().resize_(shard.nbytes)
            shard.zero_()
            continue
        parameter.data = parameter.data.new_zeros(shapes[name])
