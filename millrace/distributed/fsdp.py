"""Weights shared out among data ranks (FSDP2), and what a training step needs of them.

Each rank keeps one part of every weight, of its gradient and of its optimizer state. A decoder layer's
weights are gathered for its forward and its backward, and its gradients are summed over the ranks and dealt
out again. They are sums and never means, since each token's weight is its share of the loss over all ranks.

The output head is read outside of any module's forward (`models.logprobs.output_head`), so all that is
computed from a model runs within the forward of its `Root`, which gathers embedding, final norm and head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from millrace.distributed.mesh import Mesh
from millrace.models.load import Model

Checkpointing = Literal["none", "selective", "full"]
# What selective checkpointing keeps: results that are dear to compute again for the memory they take.
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.mkldnn._linear_pointwise.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How memory is saved.

    Attributes:
        precision: forward and backward compute in it, over weights and sums of gradients that stay float32;
            None computes in the weights' own.
        reshard_after_forward: whether a layer's weights are dropped after its forward and gathered again for
            its backward: less memory, more traffic.
        offload: whether weights, gradients and optimizer states live in the host's memory.
        checkpointing: what of a layer is computed again in the backward instead of kept: nothing, all but
            the results of matrix products, or all.
    """

    precision: torch.dtype | None
    reshard_after_forward: bool
    offload: bool
    checkpointing: Checkpointing


class Root(nn.Module):
    """A model, and the forward within which all its weights may be read.

    Attributes:
        model: names, and the weights that this rank keeps of it.
    """

    def __init__(self, model: Model) -> None:
        """Made by `shard`."""
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[Model], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What a function computes from the model; its results may carry a gradient.

        Gathering and summing are done by all ranks together, so each of them must call it equally often, and
        backward too: one that has nothing to compute runs some tokens that weigh nothing.
        """
        return compute(self.model)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a model is a stack of, from first to last.

    Raises:
        ValueError: there are none that transformers marks as such.
    """
    layers: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers that could be sharded one by one")
    return layers


def shard(model: Model, mesh: Mesh, sharding: Sharding) -> Root:
    """Share out a model's weights in place: each layer's on its own, all others together.

    A model alone on its ranks, computing in its own dtype on its own device, stays as it is. Experts that are
    dealt over `ep` already (`models.expert`) are shared out among the ranks that hold the same ones.

    Args:
        model: the same weights on every rank, or none yet (on the meta device).
        mesh: who shares them, and over whom gradients are summed.
        sharding: how memory is saved.

    Raises:
        ValueError: a precision is asked for and the weights are not float32, or precision or offload are and
            there is no process group.
    """
    if sharding.precision is not None and any(p.dtype != torch.float32 for p in model.parameters()):
        raise ValueError(
            f"precision is {sharding.precision}, over weights that must be float32 and are not; "
            f"load the model in float32"
        )
    layers = decoder_layers(model)
    if sharding.checkpointing != "none":
        for layer in layers:
            _recompute(layer, sharding.checkpointing)
    root = Root(model)
    asked = sharding.precision is not None or sharding.offload
    if mesh.weights is None and asked:
        raise ValueError("precision and offload need a process group, even of one rank; start one first")
    if mesh.weights is None or (mesh.weights.size() == 1 and not asked):
        return root
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=sharding.precision, reduce_dtype=sharding.precision and torch.float32
        ),
        # Pages can be pinned only where there is an accelerator to read them.
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if sharding.offload
        else OffloadPolicy(),
    }
    again = sharding.reshard_after_forward
    for module in _dealt(model):
        fully_shard(module, mesh=mesh.expert_weights, reshard_after_forward=again, **options)
    for layer in layers:
        fully_shard(layer, mesh=mesh.weights, reshard_after_forward=again, **options)
    # The backward begins with the head: dropping it after the forward would only gather it twice.
    fully_shard(root, mesh=mesh.weights, reshard_after_forward=False, **options)
    for part in _sharded(root):
        part.set_gradient_divide_factor(1.0)
        # Otherwise it multiplies while it sums, which gloo cannot.
        part.set_force_sum_reduction_for_comms(True)
    root.register_forward_hook(_drop_unless_recorded)
    return root


def _dealt(model: nn.Module) -> list[nn.Module]:
    """The modules whose own weights are experts dealt over `ep`."""
    return [
        module
        for module in model.modules()
        if any(
            isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("ep",)
            for parameter in module.parameters(recurse=False)
        )
    ]


def _sharded(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _drop_unless_recorded(root: nn.Module, *_: Any) -> None:
    """After a forward without a backward, which would do it, put each rank's own part back into place."""
    if not torch.is_grad_enabled():
        for module in _sharded(root):
            module.reshard()


def _recompute(layer: nn.Module, checkpointing: Checkpointing) -> None:
    # In the layer's own forward, so that its weights are gathered once for what is computed again too.
    layer.forward = partial(_recomputed, layer.forward, checkpointing)


def _recomputed(forward: Callable[..., Any], checkpointing: Checkpointing, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    options: dict[str, Any] = {}
    if checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(PRODUCTS))
    # No layer draws random numbers: dropout is off.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def gradient_norms(
    groups: Iterable[Iterable[nn.Parameter]], mesh: Mesh, *, elsewhere: Collection[nn.Parameter] = ()
) -> list[float]:
    """sqrt(sum of g^2) over all ranks for each group of weights, each weight counted once however it is held.

    All ranks call it in step, with as many groups, and get the same numbers.

    Args:
        groups: of weights that this rank holds, whole or in part (DTensor); each has a gradient.
        mesh: the layout; other pipeline stages hold other weights.
        elsewhere: weights whose equal on another pipeline stage is counted there (a tied head).
    """
    rows = [list(group) for group in groups]
    skipped = {id(parameter) for parameter in elsewhere}
    # By the ranks that squares are summed over, in an order that is the same on all of them.
    found: dict[tuple[dist.ProcessGroup, ...], list[list[Tensor]]] = {}
    for index, row in enumerate(rows):
        for parameter in row:
            counted = found.setdefault(_groups(parameter), [[] for _ in rows])[index]
            if id(parameter) not in skipped:
                counted.append(_norm(parameter.grad))
    total_G = torch.zeros(len(rows), dtype=torch.float64, device=mesh.device)
    for over, parts in found.items():
        square_G = torch.zeros_like(total_G)
        for index, part in enumerate(parts):
            if part:
                square_G[index] = torch.stack(part).to(total_G).square().sum()
        for group in over:
            dist.all_reduce(square_G, group=group)
        total_G += square_G
    norm_G: list[float] = mesh.sum_over(total_G, "pp").sqrt().tolist()
    return norm_G


def _norm(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    near = local(gradient)
    # The norm of a narrow dtype is not rounded to it.
    return torch.linalg.vector_norm(near, dtype=torch.promote_types(near.dtype, torch.float32))


def _groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Over whom the squares of a parameter's parts are summed."""
    if not isinstance(parameter, DTensor):
        return ()
    over: DeviceMesh = parameter.device_mesh
    return tuple(
        over.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and over.size(dim) > 1
    )


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
