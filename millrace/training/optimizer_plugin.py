"""An optimizer of a user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from millrace.data.plugin import Plugin
from millrace.distributed.collectives import local
from millrace.errors import SetupError
from millrace.training.optimizer import step_by_copy

INPUTS = ("groups", "betas", "weight_decay")


class OptimizerPlugin:
    """A torch optimizer made by a user's function, whose steps and state are checked."""

    def __init__(
        self,
        reference: str,
        groups: Sequence[dict[str, Any]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        """Make the optimizer.

        Args:
            reference: of the function.
            groups: of the weights, as torch takes them, with their `kind`.
            betas: of the recipe.
            weight_decay: of the recipe.

        Raises:
            SetupError: the function cannot be called, raises, or returns no optimizer of these weights.
        """
        self._plugin = Plugin.load("policy.optimizer.kind", reference, INPUTS)
        weights: list[nn.Parameter] = [weight for group in groups for weight in group["params"]]
        made = self._plugin.make(groups=list(groups), betas=betas, weight_decay=weight_decay)
        if not isinstance(made, torch.optim.Optimizer):
            raise SetupError(
                f"{self._plugin.title} returned a {type(made).__name__}; return a torch.optim.Optimizer "
                "over groups"
            )
        taken = [id(weight) for group in made.param_groups for weight in group["params"]]
        if sorted(taken) != sorted(map(id, weights)):
            raise SetupError(
                f"{self._plugin.title} returned an optimizer of {len(taken)} weights, and {len(weights)} are "
                "trained; make it over all of groups"
            )
        self._made, self._weights = made, weights
        self.param_groups = made.param_groups
        for number, group in enumerate(self.param_groups):
            group.setdefault("kind", f"group_{number}")

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """What it keeps of each weight."""
        return self._made.state

    @torch.no_grad()
    def start(self) -> None:
        """Make the state of each weight by a step with gradient and learning rate 0, which moves nothing."""
        before = [weight.clone() for weight in self._weights]
        for group in self.param_groups:
            group["lr"] = 0.0
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight)
        self._step()
        for weight, old in zip(self._weights, before, strict=True):
            weight.copy_(old)
        self.zero_grad()

    def step(self) -> None:
        """Do its step; meanwhile there is a copy of the weights.

        Raises:
            PluginError: it raises, leaves a weight that is not finite, or keeps what no checkpoint can hold.
        """
        step_by_copy(self._weights, self._step)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._made.zero_grad()

    def _step(self) -> None:
        with self._plugin.called(" in its step"):
            self._made.step()
        state = self.state
        for weight in self._weights:
            if not bool(torch.isfinite(local(weight)).all()):
                raise self._plugin.refuse(
                    "left a weight that is not finite, from finite gradients; lower "
                    "policy.optimizer.learning_rate, or bound what it divides by"
                )
            for name, value in state.get(weight, {}).items():
                if not isinstance(value, Tensor):
                    raise self._plugin.refuse(
                        f"keeps {name} of a weight as a {type(value).__name__}, and checkpoints hold "
                        "tensors; make it a tensor"
                    )
