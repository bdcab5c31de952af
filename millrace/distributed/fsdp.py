"""Weights sharded over data-parallel ranks (FSDP2), and gradient norms of sharded weights.

Each rank keeps one shard of every weight, gradient and optimizer state. A decoder layer's weights are
all-gathered for its forward and its backward, and its gradients are reduce-scattered. Gradients are summed
and never averaged, because token weights are normalized over all ranks.

The output head is read outside of any module's forward (`models.logprobs.output_head`). Therefore everything
that is computed from a model runs within the forward of its `Root`, which gathers embedding, final norm and
head.
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

from millrace.distributed.collectives import local
from millrace.distributed.mesh import Mesh
from millrace.models.facts import record_facts
from millrace.models.load import Model, ModelKind

Checkpointing = Literal["none", "selective", "full"]
# Operations with outputs that selective checkpointing saves: costly to recompute for their memory.
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
    """Options for mixed precision and for saving memory.

    Attributes:
        precision: dtype of forward and backward; weights and gradient reduction stay float32. None uses the
            dtype of the weights.
        reshard_after_forward: less memory, more communication: weights are gathered again for the backward.
        offload: whether weights, gradients and optimizer states are in host memory.
        checkpointing: what a layer recomputes in the backward: nothing, all but matrix products, or all.
        activation_offload: whether what a layer keeps for the backward is in host memory.
    """

    precision: torch.dtype | None
    reshard_after_forward: bool
    offload: bool
    checkpointing: Checkpointing
    activation_offload: bool = False


class Root(nn.Module):
    """Wrapper of a model; within its forward all weights of the model are available.

    Outside the forward, parameters of `model` are this rank's shards.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[Model], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Call a function of the model and return its results, which may require gradients.

        It runs collectives, so all ranks must call it equally often, and backward too. A rank without work
        runs a few tokens with weight 0.
        """
        return compute(self.model)

    @torch.no_grad()
    def check(self, kind: ModelKind | None = None) -> None:
        """Record the model's facts; with `kind` run the self-check of an ordinary load, with its ModelError.

        All ranks call it in step.
        """

        def run(model: Model) -> tuple[Tensor, ...]:
            if kind is None:
                record_facts(model)
            else:
                kind.tried(model, whole=False)
            return ()

        self(run)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers in order; ValueError if transformers marks none as such."""
    layers: list[nn.Module] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers that could be sharded one by one")
    return layers


def spare_activations(model: nn.Module, checkpointing: Checkpointing, *, offload: bool) -> None:
    """Change decoder layers in place so that they keep less on the device for the backward.

    A forward without gradient is as before. A ValueError if transformers marks no layers.

    Args:
        model: before it is sharded.
        checkpointing: what a layer recomputes in the backward.
        offload: whether what it keeps is moved to host memory until then.
    """
    if checkpointing == "none" and not offload:
        return
    for layer in decoder_layers(model):
        if checkpointing != "none":
            # Inside the layer's forward, so that recomputation needs no further all-gather.
            layer.forward = partial(_recomputed, layer.forward, checkpointing)
        if offload:
            layer.forward = partial(_kept_on_host, layer, layer.forward)


def shard(model: Model, mesh: Mesh, sharding: Sharding) -> Root:
    """Shard a model's weights in place: one FSDP unit per layer, and one for all other weights.

    The model has the same weights on every rank, or is on the meta device. With a single data-parallel rank,
    and without precision or offload, it is unchanged. Experts that are already sharded over `ep`
    (`expert.apply`) are sharded further over the ranks with the same experts.

    Raises:
        ValueError: a precision is set and the weights are not float32, or precision or offload is set without
            a process group.
    """
    if sharding.precision is not None and any(p.dtype != torch.float32 for p in model.parameters()):
        raise ValueError(
            f"precision is {sharding.precision}, over weights that must be float32 and are not; "
            f"load the model in float32"
        )
    layers = decoder_layers(model)
    spare_activations(model, sharding.checkpointing, offload=sharding.activation_offload)
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
        # Pinned memory needs an accelerator.
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if sharding.offload
        else OffloadPolicy(),
    }
    again = sharding.reshard_after_forward
    for module in _dealt(model):
        fully_shard(module, mesh=mesh.expert_weights, reshard_after_forward=again, **options)
    for layer in layers:
        fully_shard(layer, mesh=mesh.weights, reshard_after_forward=again, **options)
    # The backward starts with the head: freeing it after the forward would gather it twice.
    fully_shard(root, mesh=mesh.weights, reshard_after_forward=False, **options)
    for part in _sharded(root):
        part.set_gradient_divide_factor(1.0)
        # Otherwise it uses a premultiplied sum, which gloo does not support.
        part.set_force_sum_reduction_for_comms(True)
    root.register_forward_hook(_drop_unless_recorded)
    return root


def _dealt(model: nn.Module) -> list[nn.Module]:
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
    """Reshard the weights after a forward without a backward, which would do it otherwise."""
    if not torch.is_grad_enabled():
        for module in _sharded(root):
            module.reshard()


def _recomputed(forward: Callable[..., Any], checkpointing: Checkpointing, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    options: dict[str, Any] = {}
    if checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(PRODUCTS))
    # No layer uses random numbers: dropout is off.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _kept_on_host(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Gathered by now. A copy of a weight would save nothing, since the device keeps the weight.
    weights = {local(weight).untyped_storage().data_ptr() for weight in layer.parameters()}

    def pack(kept: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if isinstance(kept, DTensor) or kept.untyped_storage().data_ptr() in weights:
            return kept
        # From pinned memory, copies in both directions stay in the order of the device's work.
        copy = torch.empty(kept.shape, dtype=kept.dtype, pin_memory=kept.is_cuda)
        return kept.device, copy.copy_(kept, non_blocking=kept.is_cuda)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, copy = packed
        return copy.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


def grad_norms(
    groups: Iterable[Iterable[nn.Parameter]], mesh: Mesh, *, elsewhere: Collection[nn.Parameter] = ()
) -> list[float]:
    """Compute sqrt(sum of g^2) over all ranks for each group of weights, counting each weight once.

    All ranks call it in step with equally many groups and get the same numbers. All weights have gradients.
    Weights in `elsewhere` are counted on another pipeline stage, which has a copy (a tied head).
    """
    rows = [list(group) for group in groups]
    skipped = {id(parameter) for parameter in elsewhere}
    # By the groups over which squares are summed, in the same order on all ranks.
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
    # At least float32, so that the norm is not rounded to a narrow dtype.
    return torch.linalg.vector_norm(near, dtype=torch.promote_types(near.dtype, torch.float32))


def _groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    over: DeviceMesh = parameter.device_mesh
    return tuple(
        over.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and over.size(dim) > 1
    )
