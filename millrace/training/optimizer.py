"""The optimizer over a model's named weights, its step, and its state as named tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from millrace.distributed.collectives import local
from millrace.models.load import ModelError
from millrace.protocols import StepReport

# Groups of weights -> the norm of the gradient of each.
Norms = Callable[[Sequence[Sequence[nn.Parameter]]], list[float]]
# Smaller weights keep float32 moments where others have 8-bit ones.
LEAST_NUMBERS = 4096
# Optimizer state that is equal for all weights and steps.
_CONSTANT = ("qmap1", "qmap2")


class WeightOptimizer(Protocol):
    """What a trainer, its checkpoints and its offload need of an optimizer.

    Attributes:
        param_groups: the weights in groups of torch's form, each with its `kind` and its `lr`.
    """

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """State of each weight by name; of no weight before the first step."""

    def start(self) -> None:
        """Initialize the state of every weight, for a checkpoint to fill; no weight moves."""

    def step(self) -> None:
        """Move every weight, and overwrite its gradient by what was added to it."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


class AdamW:
    """torch's fused AdamW, which computes its update from the moments, without a copy of the weights."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        """Create the optimizer of groups of torch's form, with learning rate 0."""
        self._torch = torch.optim.AdamW(list(groups), lr=0.0, betas=betas, fused=True)
        self.param_groups = self._torch.param_groups

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """Moments and number of steps of each weight."""
        return self._torch.state

    def start(self) -> None:
        """Make the moments, which are 0."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._torch.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def step(self) -> None:
        """Move every weight that has a gradient; the update takes five passes over the weights."""
        self._torch.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                _put_update(parameter, self.state[parameter], group)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._torch.zero_grad()


def adamw(
    model: nn.Module, *, betas: tuple[float, float], weight_decay: float, eight_bit: bool = False
) -> WeightOptimizer:
    """AdamW; matrices decay, vectors (norms, biases) do not. The learning rate is set at each step."""
    groups = weight_groups(model, weight_decay)
    if eight_bit:
        from millrace.training.eight_bit import EightBitAdamW

        return EightBitAdamW(groups, lr=0.0, betas=betas, min_8bit_size=LEAST_NUMBERS)
    return AdamW(groups, betas=betas)


def weight_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the weights in two groups of torch's form: `matrices`, which decay, and `vectors`."""
    parameters = list(model.parameters())
    return [
        {"kind": "matrices", "params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"kind": "vectors", "params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def step_by_copy(weights: Sequence[nn.Parameter], step: Callable[[], object]) -> None:
    """Do a step, and overwrite the gradient of each weight by what it added; meanwhile it holds a copy."""
    before = [weight.clone() for weight in weights]
    step()
    for weight, old in zip(weights, before, strict=True):
        torch.sub(local(weight), local(old), out=local(old))
        weight.grad = old


def check_eight_bit(weights: Iterable[Tensor]) -> None:
    """Check that 8-bit moments are possible for at least one of these weights.

    Raises:
        ModelError: the library is missing, weights have a wider dtype than it supports, or all are too small.
    """
    weights, key = list(weights), "policy.optimizer.kind adamw_8bit"
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"{key} needs a package that is not installed; run `pip install 'millrace-rl[bitsandbytes]'` or "
            "set adamw"
        )
    if any(weight.dtype == torch.float64 for weight in weights):
        raise ModelError(
            f"{key} computes in float32, and precision is float64; set kind: adamw, or precision: float32"
        )
    if all(weight.numel() < LEAST_NUMBERS for weight in weights):
        raise ModelError(
            f"{key} has no effect: it leaves weights of fewer than {LEAST_NUMBERS} numbers as they are, and "
            "no weight that learns has more; set adamw"
        )


def optimizer_step(
    optimizer: WeightOptimizer,
    *,
    learning_rate: float,
    max_grad_norm: float,
    metrics: Mapping[str, float],
    norms: Norms,
) -> StepReport:
    """Update the weights from their gradient and clear it; where it is not finite, only clear it.

    The gradient is clipped to a norm over all weights; a missing one counts as 0. A `loss` in `metrics` that
    is not finite skips the step too. `norms`, over all ranks, is `models.fsdp.grad_norms`.

    Returns:
        metrics: those given; for the kinds of weights, `grad_norm_matrices` and `grad_norm_vectors` before
            clipping; and where the weights moved, `update_norm_matrices` and `update_norm_vectors`, of what
            was added to them. Muon also has those of `embeddings`, and an optimizer of a user's own those of
            its groups.
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
        found |= _named("update_norm", groups, norms(rows))
    optimizer.zero_grad()
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


def optimizer_tensors(optimizer: WeightOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's optimizer state by `kind/weight name`; empty before the first step."""
    # Where pipeline stages have separate copies of a tied weight, their states are equal and share one name.
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    state = optimizer.state
    return {
        f"{kind}/{tied.get(name, name)}": tensor
        for name, parameter in model.named_parameters()
        if parameter in state
        for kind, tensor in state[parameter].items()
        if kind not in _CONSTANT
    }


def start_optimizer(optimizer: WeightOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Initialize an optimizer's state, to be filled from a checkpoint; returns `optimizer_tensors`."""
    optimizer.start()
    return optimizer_tensors(optimizer, model)
