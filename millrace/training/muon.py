"""Muon for the matrices inside the layers, AdamW for every other weight.

torch's Muon moves a matrix along its orthogonalised momentum (0.95, Nesterov), times 0.2 sqrt(longer side):
this gives the update the root mean square that AdamW's has, so both take one learning rate. Embeddings and
the output head, vectors, and stacks of experts are AdamW's.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the factor: Liu et al.
2025, "Muon is scalable for LLM training".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from millrace.models.load import ModelError
from millrace.training.optimizer import AdamW, weight_groups

# Decay of the momentum.
MOMENTUM = 0.95


class MuonAdamW:
    """torch's Muon over one group of weights and AdamW over the others, as one optimizer.

    Of sharded weights each rank keeps its slice of the momentum. All ranks gather one matrix at a time and
    compute the same whole step of it, so they step together.
    """

    def __init__(
        self, matrices: dict[str, Any], others: Sequence[dict[str, Any]], *, betas: tuple[float, float]
    ) -> None:
        """Create the optimizer, with learning rate 0.

        Args:
            matrices: group of the weights for Muon, with `params` (of two dimensions) and `weight_decay`.
            others: groups for AdamW.
            betas: of AdamW.
        """
        self._matrices = {**matrices, "lr": 0.0}
        self._momentum: dict[Tensor, dict[str, Tensor]] = {}
        self._adamw = AdamW(others, betas=betas)
        self.param_groups = [self._matrices, *self._adamw.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """Momentum of Muon's weights, moments of the others."""
        return {**self._momentum, **self._adamw.state}

    def start(self) -> None:
        """Make momentum and moments, which are 0."""
        self._start_momentum()
        self._adamw.start()

    @torch.no_grad()
    def step(self) -> None:
        """Move every weight, and overwrite its gradient by what was added to it."""
        if not self._momentum:
            self._start_momentum()
        rate, decay = self._matrices["lr"], self._matrices["weight_decay"]
        for weight in self._matrices["params"]:
            momentum = self._momentum[weight]["momentum_buffer"]
            momentum.lerp_(weight.grad, 1 - MOMENTUM)
            update = _step_along(weight.grad.lerp(momentum, MOMENTUM), rate)
            weight.grad.copy_(update.add_(weight, alpha=-rate * decay))
            weight.add_(update)
        self._adamw.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for weight in self._matrices["params"]:
            weight.grad = None
        self._adamw.zero_grad()

    def _start_momentum(self) -> None:
        for weight in self._matrices["params"]:
            self._momentum[weight] = {"momentum_buffer": torch.zeros_like(weight, requires_grad=False)}


def _step_along(direction: Tensor, learning_rate: float) -> Tensor:
    """What torch's Muon without a momentum of its own adds to a matrix with this gradient."""
    whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
    added = nn.Parameter(torch.zeros_like(whole))
    added.grad = whole
    torch.optim.Muon(
        [added],
        lr=learning_rate,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    ).step()
    if isinstance(direction, DTensor):
        return distribute_tensor(
            added.detach(), direction.device_mesh, direction.placements, src_data_rank=None
        )
    return added.detach()


def muon(
    model: nn.Module, apart: Iterable[Tensor], *, betas: tuple[float, float], weight_decay: float
) -> MuonAdamW:
    """Muon over a model's matrices but those `apart` (embeddings, head); the rest is AdamW's.

    Raises:
        ModelError: there is no other matrix.
    """
    matrices, vectors = weight_groups(model, weight_decay)
    ends = {id(weight) for weight in apart}
    inside = [p for p in matrices["params"] if p.ndim == 2 and id(p) not in ends]
    rest = [p for p in matrices["params"] if p.ndim != 2 or id(p) in ends]
    if not inside:
        raise ModelError(
            "policy.optimizer.kind muon has no effect: no matrix that learns is inside a layer; remove it"
        )
    return MuonAdamW(
        matrices | {"params": inside},
        [{"kind": "embeddings", "params": rest, "weight_decay": weight_decay}, vectors],
        betas=betas,
    )
