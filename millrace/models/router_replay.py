"""A trainer's forward and backward with the expert choices that the sampler recorded (routing replay).

If the tokens go to the same experts again (R3), the loss is of the function that sampled them, and rounding
cannot change the choice. The record also gives the expert loads of a whole optimizer step before its first
forward, so that the load-balancing loss does not depend on how the step is split.

T = tokens of a micro-batch, S = those that are computed, L = layers with a router, K = experts of a token,
E = experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.data.shared_prefix import Beginnings
from millrace.models.routing import Record, Routers, balance_loss, expert_load


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Settings for the recorded choices.

    `coefficient` is that of the loss that balances the experts, 0 for none; `load_LE` counts the choices of
    each expert over the whole optimizer step, for that loss. `bias_step` moves the biases after the step.
    """

    routers: Routers
    replay: bool
    coefficient: float = 0.0
    bias_step: float = 0.0
    load_LE: Tensor | None = None

    def load(self, expert_TLK: Tensor | None) -> Tensor:
        """Count the choices of each expert, [L, E]; ValueError without a record."""
        return expert_load(recorded(expert_TLK), self.routers.num_experts)


def recorded(expert_TLK: Tensor | None) -> Tensor:
    """Return the record; ValueError if it is None."""
    if expert_TLK is None:
        raise ValueError(
            "the batch does not record which experts its tokens went to; let the engine record them"
        )
    return expert_TLK


class Routed:
    """The routers of a model while one micro-batch goes forward and backward."""

    def __init__(self, routing: Routing, expert_TLK: Tensor) -> None:
        self._routing, self._expert_TLK = routing, expert_TLK
        self._forced_SLK, self._count_SL = expert_TLK, expert_TLK[..., 0]
        self._record: Record | None = None

    @property
    def apart_TLK(self) -> Tensor | None:
        """Numbers in which tokens must agree to be computed once for several segments; None for no more."""
        return self._expert_TLK if self._routing.replay else None

    @contextmanager
    def forward(self, shared: Beginnings | None) -> Iterator[None]:
        """Replay the choices, and record the routers for the balance loss, in the forward within the block.

        `shared` has the tokens that are computed, and for which others; None for each by itself.
        """
        # A token without a record counts neither among the loads nor here.
        known_TL = (self._expert_TLK >= 0).all(2).float()
        if shared is None:
            self._forced_SLK, self._count_SL = self._expert_TLK, known_TL
        else:
            kept_S, place_T = (index.to(known_TL.device) for index in (shared.kept_S, shared.place_T))
            self._forced_SLK = self._expert_TLK[kept_S]
            # A token that is computed for several segments counts for each.
            self._count_SL = known_TL.new_zeros(len(kept_S), known_TL.shape[1]).index_add(
                0, place_T, known_TL
            )
        balanced = self._routing.coefficient > 0 and self._routing.load_LE is not None
        with self.backward(), self._routing.routers.record() if balanced else nullcontext() as self._record:
            yield

    def backward(self) -> AbstractContextManager[None]:
        """Replay the choices in the backward within the block, in which layers may be computed again."""
        routing = self._routing
        return routing.routers.replay(self._forced_SLK) if routing.replay else nullcontext()

    def balance(self) -> Tensor:
        """Compute this micro-batch's part of the loss that balances the experts, after the forward."""
        if self._record is None or self._routing.load_LE is None:
            return torch.zeros((), device=self._expert_TLK.device)
        return balance_loss(
            self._record.mass_LE(self._count_SL),
            self._routing.load_LE.to(self._count_SL.device),
            num_choices=self._routing.routers.num_choices,
            coefficient=self._routing.coefficient,
        )
