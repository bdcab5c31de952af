"""An optimizer of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from millrace.data.functions import explain
from millrace.data.plugin import Plugin, PluginError
from millrace.errors import SetupError

INPUTS = ("groups", "betas", "weight_decay")


class OptimizerPlugin(torch.optim.Optimizer):
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
        weights = [weight for group in groups for weight in group["params"]]
        try:
            made = self._plugin(groups=list(groups), betas=betas, weight_decay=weight_decay)
        except PluginError as error:
            raise SetupError(str(error)) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise SetupError(
                f"{self._plugin.title} returned a {type(made).__name__}; return a torch.optim.Optimizer "
                f"over groups"
            )
        taken = [id(weight) for group in made.param_groups for weight in group["params"]]
        if sorted(taken) != sorted(map(id, weights)):
            raise SetupError(
                f"{self._plugin.title} returned an optimizer of {len(taken)} weights, and {len(weights)} are "
                "trained; make it over all of groups"
            )
        self._made = made
        super().__init__(made.param_groups, {})
        self.state = made.state
        for number, group in enumerate(self.param_groups):
            group.setdefault("kind", f"group_{number}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do its step.

        Raises:
            PluginError: it raises, leaves a weight that is not finite, or keeps what no checkpoint can hold.
        """
        try:
            self._made.step()
        except Exception as error:
            raise PluginError(
                f"{self._plugin.title} raised {explain(error)} in its step; correct it"
            ) from error
        for group in self.param_groups:
            for weight in group["params"]:
                if not bool(torch.isfinite(weight).all()):
                    raise self._plugin.refuse(
                        "left a weight that is not finite, from finite gradients; lower "
                        "policy.optimizer.learning_rate, or bound what it divides by"
                    )
                for name, value in self.state.get(weight, {}).items():
                    if not isinstance(value, Tensor):
                        raise self._plugin.refuse(
                            f"keeps {name} of a weight as a {type(value).__name__}, and checkpoints hold "
                            f"tensors; "
                            "make it a tensor"
                        )

    @torch.no_grad()
    def begin(self) -> None:
        """Make the state of each weight by a step with gradient and learning rate 0, which moves nothing."""
        for group in self.param_groups:
            group["lr"] = 0.0
            kept = [weight.detach().clone() for weight in group["params"]]
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight)
            group["kept"] = kept
        self.step()
        for group in self.param_groups:
            for weight, before in zip(group["params"], group.pop("kept"), strict=True):
                weight.copy_(before)
        self.zero_grad(set_to_none=True)
