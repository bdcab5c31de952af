"""AdamW over a model's named weights, and its state as named tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adamw(model: nn.Module, *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, vectors (norms, biases) do not. The learning rate is set at each step."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


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
