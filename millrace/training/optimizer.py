"""AdamW over a model's named weights, one guarded step of it, and its state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from millrace.protocols import StepReport

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_CRITIC = "critic/"


def adamw(model: nn.Module, *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, vectors (norms, biases) do not. The learning rate is set at each step."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    learning_rate: float,
    max_gradient_norm: float,
    metrics: Mapping[str, float],
    clip: Callable[[float], float] | None = None,
) -> StepReport:
    """Move the weights by the gradient they hold and clear it; where it is not finite, only clear it.

    Args:
        model: its parameters hold the gradient; one without any counts as a gradient of 0.
        optimizer: over those parameters.
        learning_rate: of this step.
        max_gradient_norm: the gradient is scaled down to this norm over all weights.
        metrics: what the report says besides. A `loss` in it that is not finite skips the step too.
        clip: scales the gradient down to a norm over all ranks and gives the norm before; None where this
            rank holds all weights.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            # A batch without any gradient still moves by momentum, as one with a gradient of 0 does.
            parameter.grad = torch.zeros_like(parameter)
    if clip is None:
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_gradient_norm))
    else:
        norm = clip(max_gradient_norm)
    finite = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
    if finite:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepReport(
        skipped=not finite, gradient_norm=norm, learning_rate=learning_rate, metrics=dict(metrics)
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state by `moment/weight name`; empty before the first step.

    Whole tensors: where weights are sharded, all ranks call it in step.
    """
    return {
        f"{moment}/{name}": whole(optimizer.state[parameter][moment])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave; a rank keeps its own part.

    Raises:
        ValueError: the tensors are not those of this model.
    """
    left = dict(tensors)
    for name, parameter in model.named_parameters():
        keys = [f"{moment}/{name}" for moment in _MOMENTS]
        if not any(key in left for key in keys):
            continue
        missing = [key for key in keys if key not in left]
        if missing or left[keys[0]].shape != parameter.shape:
            raise ValueError(f"the optimizer state of weight {name} does not fit the model")
        optimizer.state[parameter] = {
            moment: _as_kept(left.pop(key), parameter) for moment, key in zip(_MOMENTS, keys, strict=True)
        }
    if left:
        raise ValueError(f"the optimizer state names {min(left)}, which the model does not have")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded; all ranks that hold parts of it call it in step."""
    if not isinstance(tensor, DTensor):
        return tensor
    # An offloaded part lies where the ranks cannot exchange it.
    near: Any = tensor.to(tensor.device_mesh.device_type)
    full: Tensor = near.full_tensor()
    return full


def _as_kept(full: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of the optimizer as this rank keeps it; counts of steps belong to no part."""
    if full.ndim == 0 or not isinstance(parameter, DTensor):
        return full.to(parameter.device).clone()
    local = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return local.to(parameter.device)


def critic_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A critic's optimizer state under names of its own, to lie beside the policy's."""
    return {f"{_CRITIC}{name}": tensor for name, tensor in tensors.items()}


def split_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The policy's optimizer state, and the critic's under the names it was given with."""
    policy = {name: tensor for name, tensor in tensors.items() if not name.startswith(_CRITIC)}
    critic = {
        name.removeprefix(_CRITIC): tensor for name, tensor in tensors.items() if name.startswith(_CRITIC)
    }
    return policy, critic
