"""Muon for the matrices inside the layers, AdamW for every other weight.

A matrix W moves along an orthogonalised momentum, so that all its directions move equally far:

    M <- b M + (1 - b) G
    U = (1 - b) G + b M  (Nesterov)
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) NS(U)

with b = 0.95. NS is five steps of a Newton-Schulz iteration, which takes the singular values of U to about 1.
The factor 0.2 sqrt(max(m, n)) gives the update the root mean square that AdamW's has, so both take one
learning rate. Embeddings and the output head, vectors, and stacks of experts are AdamW's.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the factor: Liu et al.
2025, "Muon is scalable for LLM training". torch.optim.Muon computes the same; this one also reports its
update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7


def newton_schulz(matrix: Tensor) -> Tensor:
    """Take the singular values of a matrix to about 1, in bfloat16; a matrix of zeros stays one."""
    a, b, c = COEFFICIENTS
    wide = matrix.bfloat16()
    if matrix.size(0) > matrix.size(1):
        wide = wide.T
    wide = wide / wide.norm().clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


class MuonAdamW(torch.optim.Optimizer):
    """Muon over one group of weights, and AdamW over the others; all take the learning rate of their group.

    A step overwrites the gradients of Muon's matrices with what was added to them.
    """

    def __init__(
        self, matrices: dict[str, Any], others: list[dict[str, Any]], *, betas: tuple[float, float]
    ) -> None:
        """Create the optimizer, with learning rate 0.

        Args:
            matrices: group of the weights for Muon, with `params` (of two dimensions) and `weight_decay`.
            others: groups for AdamW.
            betas: of AdamW.
        """
        super().__init__([matrices, *others], {"lr": 0.0})
        self._adamw = None
        if others:
            self._adamw = torch.optim.AdamW(self.param_groups[1:], lr=0.0, betas=betas, fused=True)
            # One state, as of one optimizer, in checkpoints.
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every weight that has a gradient."""
        group = self.param_groups[0]
        for weight in group["params"]:
            if weight.grad is None:
                continue
            momentum = self._momentum(weight)
            momentum.lerp_(weight.grad, 1 - MOMENTUM)
            direction = newton_schulz(weight.grad.lerp(momentum, MOMENTUM))
            scale = 0.2 * math.sqrt(max(weight.shape))
            weight.grad.copy_(direction).mul_(-group["lr"] * scale)
            weight.grad.add_(weight, alpha=-group["lr"] * group["weight_decay"])
            weight.add_(weight.grad)
        if self._adamw is not None:
            self._adamw.step()

    def begin(self) -> None:
        """Make the momentum of each matrix, before the first step."""
        for weight in self.param_groups[0]["params"]:
            self._momentum(weight)

    def _momentum(self, weight: Tensor) -> Tensor:
        if "momentum_buffer" not in self.state[weight]:
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        momentum: Tensor = self.state[weight]["momentum_buffer"]
        return momentum
