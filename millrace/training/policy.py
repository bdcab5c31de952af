"""The policy trainer: accumulate `(loss_T * weight_T).sum()` over micro-batches, then step.

N = chosen tokens, in packed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from millrace.data.batch import Batch
from millrace.kernels.token_logprob import token_logprob
from millrace.models.load import Model
from millrace.models.logprobs import chosen_hidden, output_head
from millrace.protocols import StepReport
from millrace.training.objective import Objective, Predicted
from millrace.training.optimizer import optimizer_step
from millrace.training.scorer import ModelScorer


class PolicyTrainer:
    """The weights being trained, their optimizer, and the number of steps they have taken."""

    def __init__(
        self,
        model: Model,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        *,
        learning_rate: Callable[[int], float],
        temperature: float,
        max_tokens: int,
        max_gradient_norm: float,
        version: int = 0,
    ) -> None:
        """A trainer whose first step makes version `version + 1`.

        Args:
            model: a model from `models.load`.
            objective: loss per chosen token.
            optimizer: over the model's parameters.
            learning_rate: of the n-th call of `optim_step`, counted from 0.
            temperature: the sampler's; logits are divided by it.
            max_tokens: tokens of one micro-batch.
            max_gradient_norm: gradients are scaled down to this norm.
            version: optimizer steps already done.
        """
        self.model = model
        self.optimizer = optimizer
        self.version = version
        self.num_attempts = 0
        self.scorer = ModelScorer(model, temperature=temperature, max_tokens=max_tokens)
        self._objective = objective
        self._learning_rate = learning_rate
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._max_gradient_norm = max_gradient_norm
        self._totals: dict[str, Tensor] = {}
        self._weight = 0.0

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradient of one packed batch, micro-batch by micro-batch; see `protocols.Trainer`."""
        logprobs = []
        for micro in batch.split(self._max_tokens):
            micro = micro.to(next(self.model.parameters()).device)
            predicted = self._predict(micro)
            loss_N, report = self._objective(predicted, micro)
            weight_N = micro.weight_T[micro.action_mask_T]
            loss = (loss_N * weight_N).sum()
            loss.backward()
            logprobs.append(predicted.logprob_N.detach())
            self._add("loss", loss.detach())
            for name, value_N in (report | {"entropy": predicted.entropy_N.detach()}).items():
                self._add(name, (value_N * weight_N).sum())
            self._weight += float(weight_N.sum())
        return torch.cat(logprobs)

    def optim_step(self) -> StepReport:
        """Move the weights, or leave them where the gradient is not finite; see `protocols.Trainer`."""
        report = optimizer_step(
            self.model,
            self.optimizer,
            learning_rate=self._learning_rate(self.num_attempts),
            max_gradient_norm=self._max_gradient_norm,
            metrics=self._take(),
        )
        self.version += not report.skipped
        self.num_attempts += 1
        return report

    def discard(self) -> dict[str, float]:
        """Forget the accumulated gradient without a step, and give the metrics it would have reported."""
        self.optimizer.zero_grad(set_to_none=True)
        return self._take()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, tied weights once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def _predict(self, micro: Batch) -> Predicted:
        hidden_ND, target_N = chosen_hidden(self.model, micro)
        head = output_head(self.model)
        logprob_N, entropy_N = token_logprob(
            hidden_ND, head, target_N, temperature=self._temperature, support=micro.chosen_support
        )
        return Predicted(logprob_N, entropy_N, hidden_ND, head, self._temperature, self.version)

    def _take(self) -> dict[str, float]:
        """The metrics since the last step: the loss, and means over the shares that were trained on."""
        shared = self._weight or 1.0
        metrics = {
            name: float(value) if name == "loss" else float(value) / shared
            for name, value in self._totals.items()
        }
        self._totals, self._weight = {}, 0.0
        return metrics

    def _add(self, name: str, value: Tensor) -> None:
        self._totals[name] = self._totals.get(name, torch.zeros(())) + value.detach().float().cpu()
