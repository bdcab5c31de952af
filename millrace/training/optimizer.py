"""AdamW over a model's named weights, one guarded step of it, and its state as named tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from millrace.models.fsdp import local
from millrace.protocols import StepReport

# Groups of weights -> the norm of the gradient of each.
Norms = Callable[[Sequence[Sequence[nn.Parameter]]], list[float]]
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def adamw(model: nn.Module, *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, vectors (norms, biases) do not. The learning rate is set at each step."""
    parameters = list(model.parameters())
    groups = [
        {"kind": "matrices", "params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"kind": "vectors", "params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def optimizer_step(
    optimizer: torch.optim.AdamW,
    *,
    learning_rate: float,
    max_gradient_norm: float,
    metrics: Mapping[str, float],
    norms: Norms,
) -> StepReport:
    """Move the weights by the gradient they hold and clear it; where it is not finite, only clear it.

    The gradient is scaled down to a norm over all weights. After the step the update is put in its place and
    measured there: five passes over the weights, and no memory.

    Args:
        optimizer: from `adamw`; a weight of it without a gradient counts as having one of 0.
        learning_rate: of this step.
        max_gradient_norm: that the gradient is scaled down to.
        metrics: what the report says besides. A `loss` in it that is not finite skips the step too.
        norms: of the gradients of each group of weights, over all ranks; see `models.fsdp.gradient_norms`.

    Returns:
        metrics: those given; for the kinds of weights, `gradient_norm_matrices` and `gradient_norm_vectors`
            before clipping; and where the weights moved, `update_norm_matrices` and `update_norm_vectors`, of
            what was added to them.
    """
    groups = optimizer.param_groups
    rows = [group["params"] for group in groups]
    for parameter in itertools.chain(*rows):
        if parameter.grad is None:
            # A batch without any gradient still moves by momentum, as one with a gradient of 0 does.
            parameter.grad = torch.zeros_like(parameter)
    norm_G = norms(rows)
    norm = math.hypot(*norm_G)
    found = dict(metrics) | _named("gradient_norm", groups, norm_G)
    finite = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
    if finite:
        if norm > max_gradient_norm:
            torch._foreach_mul_([local(p.grad) for p in itertools.chain(*rows)], max_gradient_norm / norm)
        for group in groups:
            group["lr"] = learning_rate
        optimizer.step()
        for group in groups:
            for parameter in group["params"]:
                _put_update(parameter, optimizer.state[parameter], group)
        found |= _named("update_norm", groups, norms(rows))
    optimizer.zero_grad(set_to_none=True)
    return StepReport(skipped=not finite, gradient_norm=norm, learning_rate=learning_rate, metrics=found)


@torch.no_grad()
def _put_update(parameter: nn.Parameter, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """Overwrite a weight's gradient by what the last step added to the weight.

    dw = -lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w) / (1 - lr decay), all as they are after
    the step, so that no weight is kept from before it. How a narrow dtype rounds the sum is left out.
    """
    assert parameter.grad is not None
    weight, update, first, second = map(
        local, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
    )
    share, square_share = (1 - beta ** float(state["step"]) for beta in group["betas"])
    # Numerator and denominator times sqrt(1 - b2^t), which saves a pass.
    scale = math.sqrt(square_share)
    factor = -group["lr"] / (1 - group["lr"] * group["weight_decay"])
    torch.sqrt(second, out=update).add_(group["eps"] * scale)
    torch.div(first, update, out=update).mul_(factor * scale / share)
    update.add_(weight, alpha=factor * group["weight_decay"])


def _named(what: str, groups: Sequence[Mapping[str, Any]], values: Sequence[float]) -> dict[str, float]:
    return {f"{what}_{group['kind']}": value for group, value in zip(groups, values, strict=True)}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state by `moment/weight name`, as this rank keeps it; empty before the first step."""
    # Where pipeline stages hold a tied weight apart, both of its states are equal and go by one name.
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {
        f"{moment}/{tied.get(name, name)}": optimizer.state[parameter][moment]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def start_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Give an optimizer the state it has before its first step, to be filled; as `optimizer_tensors`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer_tensors(optimizer, model)
