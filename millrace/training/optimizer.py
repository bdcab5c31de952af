"""The optimizer over a model's named weights, its step, and its state as named tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from millrace.distributed.collectives import local
from millrace.models.load import ModelError
from millrace.protocols import StepReport
from millrace.training.muon import MuonAdamW
from millrace.training.optimizer_plugin import OptimizerPlugin

# Groups of weights -> the norm of the gradient of each.
Norms = Callable[[Sequence[Sequence[nn.Parameter]]], list[float]]
# Smaller weights keep float32 moments where others have 8-bit ones.
LEAST_NUMBERS = 4096
# Optimizer state that is equal for all weights and steps.
_CONSTANT = ("qmap1", "qmap2")


def adamw(
    model: nn.Module, *, betas: tuple[float, float], weight_decay: float, eight_bit: bool = False
) -> torch.optim.Optimizer:
    """Fused AdamW; matrices decay, vectors (norms, biases) do not. The learning rate is set at each step."""
    groups = weight_groups(model, weight_decay)
    if eight_bit:
        from millrace.training.eight_bit import EightBitAdamW

        return EightBitAdamW(groups, lr=0.0, betas=betas, min_8bit_size=LEAST_NUMBERS)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def weight_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the weights in two groups of torch's form: `matrices`, which decay, and `vectors`."""
    parameters = list(model.parameters())
    return [
        {"kind": "matrices", "params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"kind": "vectors", "params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def muon(
    model: nn.Module, apart: Iterable[Tensor], *, betas: tuple[float, float], weight_decay: float
) -> MuonAdamW:
    """Muon over a model's matrices but those `apart` (embeddings, head); the rest is AdamW's.

    Raises:
        ModelError: there is no other matrix.
    """
    matrices, vectors = weight_groups(model, weight_decay)
    ends = {id(weight) for weight in apart}
    own = [p for p in matrices["params"] if p.ndim == 2 and id(p) not in ends]
    rest = [p for p in matrices["params"] if p.ndim != 2 or id(p) in ends]
    if not own:
        raise ModelError(
            "policy.optimizer.kind muon has no effect: no matrix that learns is inside a layer; remove it"
        )
    others = [{"kind": "embeddings", "params": rest, "weight_decay": weight_decay}, vectors]
    groups = [group for group in others if group["params"]]
    return MuonAdamW({"kind": "matrices", "params": own, "weight_decay": weight_decay}, groups, betas=betas)


def check_eight_bit(weights: Iterable[Tensor]) -> None:
    """Check that 8-bit moments are possible for at least one of these weights.

    Raises:
        ModelError: the library is missing, weights have a wider dtype than it supports, or all are too small.
    """
    weights, key = list(weights), "policy.optimizer.eight_bit"
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"{key} needs a package that is not installed; run `pip install 'millrace-rl[bitsandbytes]'` or "
            f"remove {key}"
        )
    if any(weight.dtype == torch.float64 for weight in weights):
        raise ModelError(f"{key} computes in float32, and precision is float64; remove one of them")
    if all(weight.numel() < LEAST_NUMBERS for weight in weights):
        raise ModelError(
            f"{key} has no effect: it leaves weights of fewer than {LEAST_NUMBERS} numbers as they are, and "
            "no weight that learns has more; remove it"
        )


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    *,
    learning_rate: float,
    max_grad_norm: float,
    metrics: Mapping[str, float],
    norms: Norms,
) -> StepReport:
    """Update the weights from their gradient and clear it; where it is not finite, only clear it.

    The gradient is clipped to a norm over all weights; a missing one counts as 0. After the step, the update
    overwrites the gradient and is measured there: five passes over the weights, and no extra memory. A `loss`
    in `metrics` that is not finite skips the step too. `norms`, over all ranks, is `models.fsdp.grad_norms`.

    Returns:
        metrics: those given; for the kinds of weights, `grad_norm_matrices` and `grad_norm_vectors` before
            clipping; and where the weights moved, `update_norm_matrices` and `update_norm_vectors`, of what
            was added to them. Muon also has those of `embeddings`. An optimizer of a user's own has its own
            groups, and no norm of an update.
    """
    groups = optimizer.param_groups
    rows = [group["params"] for group in groups]
    for parameter in itertools.chain(*rows):
        if parameter.grad is None:
            # A batch without any gradient still updates by momentum, as a gradient of 0 does.
            parameter.grad = torch.zeros_like(parameter)
    norm_G = norms(rows)
    norm = math.hypot(*norm_G)
    found = dict(metrics) | _named("grad_norm", groups, norm_G)
    finite = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
    if finite:
        if norm > max_grad_norm:
            torch._foreach_mul_([local(p.grad) for p in itertools.chain(*rows)], max_grad_norm / norm)
        for group in groups:
            group["lr"] = learning_rate
        optimizer.step()
        if not isinstance(optimizer, OptimizerPlugin):
            # The 8-bit optimizer, and Muon for its matrices, have already written their updates there.
            if isinstance(optimizer, torch.optim.AdamW | MuonAdamW):
                for group in groups[isinstance(optimizer, MuonAdamW) :]:
                    for parameter in group["params"]:
                        _put_update(parameter, optimizer.state[parameter], group)
            found |= _named("update_norm", groups, norms(rows))
    optimizer.zero_grad(set_to_none=True)
    return StepReport(skipped=not finite, grad_norm=norm, learning_rate=learning_rate, metrics=found)


@torch.no_grad()
def _put_update(parameter: nn.Parameter, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """Overwrite a weight's gradient with the update of the last step.

    dw = -lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w) / (1 - lr decay), all values after the
    step, so that no old weight is kept. Rounding of the sum in a narrow dtype is ignored.
    """
    assert parameter.grad is not None
    weight, update, first, second = map(
        local, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
    )
    first_correction, second_correction = (1 - beta ** float(state["step"]) for beta in group["betas"])
    # Numerator and denominator times sqrt(1 - b2^t), which saves a pass.
    scale = math.sqrt(second_correction)
    factor = -group["lr"] / (1 - group["lr"] * group["weight_decay"])
    torch.sqrt(second, out=update).add_(group["eps"] * scale)
    torch.div(first, update, out=update).mul_(factor * scale / first_correction)
    update.add_(weight, alpha=factor * group["weight_decay"])


def _named(what: str, groups: Sequence[Mapping[str, Any]], values: Sequence[float]) -> dict[str, float]:
    return {f"{what}_{group['kind']}": value for group, value in zip(groups, values, strict=True)}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's optimizer state by `kind/weight name`; empty before the first step."""
    # Where pipeline stages have separate copies of a tied weight, their states are equal and share one name.
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    return {
        f"{kind}/{tied.get(name, name)}": tensor
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for kind, tensor in optimizer.state[parameter].items()
        if kind not in _CONSTANT
    }


def start_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Initialize an optimizer's state, to be filled from a checkpoint; returns `optimizer_tensors`."""
    if isinstance(optimizer, MuonAdamW | OptimizerPlugin):
        optimizer.begin()
    if isinstance(optimizer, OptimizerPlugin):
        return optimizer_tensors(optimizer, model)
    for group_index, group in enumerate(optimizer.param_groups):
        if group_index == 0 and isinstance(optimizer, MuonAdamW):
            continue
        for index, parameter in enumerate(group["params"]):
            if isinstance(optimizer, torch.optim.AdamW | MuonAdamW):
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            else:
                cast(Any, optimizer).init_state(group, parameter, group_index, index)
    return optimizer_tensors(optimizer, model)
