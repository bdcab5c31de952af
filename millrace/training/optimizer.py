"""AdamW over a model's named weights, one guarded step of it, and its state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

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
) -> StepReport:
    """Move the weights by the gradient they hold and clear it; where it is not finite, only clear it.

    Args:
        model: its parameters hold the gradient; one without any counts as a gradient of 0.
        optimizer: over those parameters.
        learning_rate: of this step.
        max_gradient_norm: the gradient is scaled down to this norm over all weights.
        metrics: what the report says besides. A `loss` in it that is not finite skips the step too.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            # A batch without any gradient still moves by momentum, as one with a gradient of 0 does.
            parameter.grad = torch.zeros_like(parameter)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_gradient_norm))
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
    """The optimizer's state by `moment/weight name`; empty before the first step."""
    return {
        f"{moment}/{name}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave.

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
            moment: left.pop(key).to(parameter.device).clone()
            for moment, key in zip(_MOMENTS, keys, strict=True)
        }
    if left:
        raise ValueError(f"the optimizer state names {min(left)}, which the model does not have")


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
