"""The policy trainer: accumulate `(loss_T * weight_T).sum()` over micro-batches, then step.

N = chosen tokens, in packed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from millrace.data.batch import Batch
from millrace.kernels.token_logprob import Head, token_logprob
from millrace.models.adapters import merged_tensors, trained_weights, without_adapter
from millrace.models.load import Model
from millrace.models.logprobs import chosen_hidden, output_head
from millrace.protocols import StepReport
from millrace.training.objective import Objective, Predicted
from millrace.training.optimizer import optimizer_step
from millrace.training.scorer import ModelScorer
from millrace.training.spread import Spread


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
        spread: Spread | None = None,
    ) -> None:
        """A trainer whose first step makes version `version + 1`.

        Args:
            model: a model from `models.load`.
            objective: loss per chosen token.
            optimizer: over the model's weights that learn (`models.adapters.trained_weights`).
            learning_rate: of the n-th call of `optim_step`, counted from 0.
            temperature: the sampler's; logits are divided by it.
            max_tokens: tokens of one micro-batch.
            max_gradient_norm: gradients are scaled down to this norm.
            version: optimizer steps already done.
            spread: how the model lies on several ranks; None for this rank alone.
        """
        self.model = model
        self._spread = spread or Spread(model)
        self.optimizer = optimizer
        self.version = version
        self.num_attempts = 0
        self.scorer = ModelScorer(model, temperature=temperature, max_tokens=max_tokens, spread=self._spread)
        self._objective = objective
        self._learning_rate = learning_rate
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._max_gradient_norm = max_gradient_norm
        self._totals: dict[str, Tensor] = {}
        self._weight = 0.0

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradient of one packed batch, micro-batch by micro-batch; see `protocols.Trainer`."""
        logprob_T = torch.zeros(batch.num_tokens)
        for micro, place_T in self._spread.micro_batches(batch, self._max_tokens):
            here = micro.to(self.model.device)
            loss, logprob_N = self._spread.run(partial(self._loss, here))
            loss.backward()
            # Where the micro-batch stands nowhere, nothing of it is kept.
            kept_N = place_T[micro.action_mask_T[: len(place_T)].cpu()]
            logprob_T[kept_N] = logprob_N[: len(kept_N)].detach().float().cpu()
        return self._spread.total(logprob_T)[batch.action_mask_T.cpu()].to(batch.token_T.device)

    def _loss(self, here: Batch, model: Model) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch and the log-probabilities of its chosen tokens; metrics are added up."""
        predicted = self._predict(model, here)
        loss_N, report = self._objective(predicted, here)
        weight_N = here.weight_T[here.action_mask_T]
        loss = (loss_N * weight_N).sum()
        self._add("loss", loss)
        for name, value_N in (report | {"entropy": predicted.entropy_N}).items():
            self._add(name, (value_N.detach() * weight_N).sum())
        self._weight += float(weight_N.sum())
        return loss, predicted.logprob_N

    def optim_step(self) -> StepReport:
        """Move the weights, or leave them where the gradient is not finite; see `protocols.Trainer`."""
        report = optimizer_step(
            trained_weights(self.model),
            self.optimizer,
            learning_rate=self._learning_rate(self.num_attempts),
            max_gradient_norm=self._max_gradient_norm,
            metrics=self._take(),
            clip=self._spread.clip,
        )
        self.version += not report.skipped
        self.num_attempts += 1
        return report

    def discard(self) -> dict[str, float]:
        """Forget the accumulated gradient without a step, and give the metrics it would have reported."""
        self.optimizer.zero_grad(set_to_none=True)
        return self._take()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole under its Hugging Face name, an adapter folded in; tied weights once.

        All ranks ask in step.
        """
        return merged_tensors(self.model) if self._spread.alone else self._spread.named_tensors()

    def _predict(self, model: Model, micro: Batch) -> Predicted:
        hidden_ND, target_N = chosen_hidden(model, micro)
        head = output_head(model)
        logprob_N, entropy_N = token_logprob(
            hidden_ND, head, target_N, temperature=self._temperature, support=micro.chosen_support
        )
        return Predicted(logprob_N, entropy_N, hidden_ND, head, self._temperature, self.version)

    def _take(self) -> dict[str, float]:
        """The metrics since the last step: the loss, and means over the shares that were trained on."""
        # The same names on every rank, since each ran the same objective.
        part = torch.stack([torch.tensor(self._weight, dtype=torch.float64), *self._totals.values()])
        weight, *totals = self._spread.total(part).tolist()
        shared = weight or 1.0
        metrics = {
            name: total if name == "loss" else total / shared
            for name, total in zip(self._totals, totals, strict=True)
        }
        self._totals, self._weight = {}, 0.0
        return metrics

    def _add(self, name: str, value: Tensor) -> None:
        total = self._totals.get(name, torch.zeros((), dtype=torch.float64))
        self._totals[name] = total + value.detach().cpu()


class BaseScorer(ModelScorer):
    """What the model that an adapter stands beside says of tokens: the same model with the adapter off."""

    def hidden(self, batch: Batch) -> tuple[Tensor, Head]:
        """As `ModelScorer.hidden`, of the base alone and without gradient."""
        with torch.no_grad(), without_adapter(self._model):
            return super().hidden(batch)

    def _packed(self, score: Callable[..., Tensor], batch: Batch) -> Tensor:
        with without_adapter(self._model):
            return super()._packed(score, batch)
