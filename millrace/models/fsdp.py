"""Weights shared out among data ranks (FSDP2), and what a training step needs of them.

Each rank keeps one part of every weight, of its gradient and of its optimizer state. A decoder layer's
weights are gathered for its forward and its backward, and its gradients are summed over the ranks and dealt
out again. They are sums and never means, since each token's weight is its share of the loss over all ranks.

The output head is read outside of any module's forward (`models.logprobs.output_head`), so all that is
computed from a model runs within the forward of its `Root`, which gathers embedding, final norm and head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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

from millrace.kernels.norm import rms_norm
from millrace.models.fused import RMSNorm
from millrace.models.load import Model
from millrace.models.mesh import Mesh

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
# As torch's own clipping, so that a norm of 0 divides nothing by 0.
NORM_EPS = 1e-6


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

    def sum_gradients(self, wanted: bool) -> None:
        """Whether the backwards to come sum gradients over the ranks, as they do at first.

        Without, a rank's own gradient is kept whole until a backward that does: less traffic for the
        micro-batches before the last one, at the memory of a whole gradient. Nothing for a model that is not
        sharded.
        """
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(wanted)


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
    for module in model.modules():
        if isinstance(module, RMSNorm) and mesh.device_type == "cpu":
            module.forward = partial(_normed, module)  # type: ignore[method-assign]
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


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    # The kernel shows its weight to numpy, and torch never again lets go of memory that numpy has seen.
    return rms_norm(x, norm.weight.clone(), norm.eps, form=norm.form)


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


def clip(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    mesh: Mesh,
    *,
    dealt: Mapping[nn.Parameter, tuple[str, ...]] | None = None,
    elsewhere: Collection[nn.Parameter] = (),
) -> float:
    """Scale the gradients down to a norm over all weights of all ranks, and give the norm they had.

    All ranks call it in step and get the same number. A norm that is not finite spoils the gradients.

    Args:
        parameters: whose gradients this rank holds, whole or in part (DTensor); one without counts as 0.
        max_norm: above 0.
        mesh: the layout; other pipeline stages hold other weights.
        dealt: for weights that this rank holds in part as plain tensors, the dimensions of the mesh that they
            are dealt over ("tp", "ep"), besides what their DTensor says.
        elsewhere: of the parameters, those whose equal on another pipeline stage is counted there (a tied
            head).

    Raises:
        ValueError: `max_norm` is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")
    held, dealt = list(parameters), dealt or {}
    skipped = {id(parameter) for parameter in elsewhere}
    # The gradients that are summed over the same groups, in an order that is the same on all ranks.
    pieces: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    gradients = []
    for parameter in held:
        groups = _groups(parameter, mesh, dealt.get(parameter, ()))
        counted = pieces.setdefault(groups, [])
        if parameter.grad is not None:
            gradients.append(_local(parameter.grad))
            if id(parameter) not in skipped:
                counted.append(gradients[-1])
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for groups, locals_ in pieces.items():
        square = torch.nn.utils.get_total_norm(locals_).to(mesh.device, torch.float64).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    norm = float(mesh.sum_over(total, "pp").sqrt())
    if not norm <= max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + NORM_EPS))
    return norm


def _groups(parameter: Tensor, mesh: Mesh, dealt: tuple[str, ...]) -> tuple[dist.ProcessGroup, ...]:
    """Over whom the squares of a parameter's parts are summed."""
    groups = [mesh.group(name) for name in dealt]
    if isinstance(parameter, DTensor):
        over: DeviceMesh = parameter.device_mesh
        groups += [
            over.get_group(dim)
            for dim, placement in enumerate(parameter.placements)
            if not placement.is_replicate() and over.size(dim) > 1
        ]
    return tuple(group for group in groups if group is not None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensors(
    root: Root, mesh: Mesh, *, gather: Callable[[str, Tensor], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every weight whole under its Hugging Face name, tied ones once, one at a time.

    All ranks that share weights go through it in step, and each gets all; at any moment a rank holds one
    whole weight besides its own parts.

    Args:
        root: made by `shard`.
        mesh: that it was made with.
        gather: makes a weight whole that is dealt out as plain tensors (`ep`), from its name and what this
            rank has of it.
    """
    for name, parameter in root.model.named_parameters():
        tensor: Any = parameter.detach()
        if isinstance(tensor, DTensor):
            # An offloaded part lies in the host's memory, where the ranks cannot exchange it.
            tensor = tensor.to(mesh.device)
            tensor = tensor.full_tensor()
        yield name, tensor if gather is None else gather(name, tensor)
