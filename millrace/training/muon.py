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

from millrace.models.load import ModelError
from millrace.training.optimizer import AdamW, step_by_copy, weight_groups


class MuonAdamW:
    """torch's Muon over one group of weights and AdamW over the others, as one optimizer."""

    def __init__(
        self, matrices: dict[str, Any], others: Sequence[dict[str, Any]], *, betas: tuple[float, float]
    ) -> None:
        """Create the optimizer, with learning rate 0.

        Args:
            matrices: group of the weights for Muon, with `params` (of two dimensions) and `weight_decay`.
            others: groups for AdamW.
            betas: of AdamW.
        """
        self._muon = torch.optim.Muon([matrices], lr=0.0, adjust_lr_fn="match_rms_adamw")
        self._adamw = AdamW(others, betas=betas)
        self._matrices: list[nn.Parameter] = matrices["params"]
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """Momentum of Muon's weights, moments of the others."""
        return {**self._muon.state, **self._adamw.state}

    def start(self) -> None:
        """Make momentum and moments, which are 0."""
        for weight in self._matrices:
            self._muon.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
        self._adamw.start()

    def step(self) -> None:
        """Move every weight that has a gradient; a copy of the matrices takes what a second moment would."""
        step_by_copy(self._matrices, self._muon.step)
        self._adamw.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._muon.zero_grad()
        self._adamw.zero_grad()


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
