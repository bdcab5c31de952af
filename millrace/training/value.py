"""The critic: the value of each state, learned by its own optimizer beside the policy.

T = packed tokens, B = segments, N = chosen tokens, in packed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from millrace.algorithms.losses import value_clipped, value_loss
from millrace.data.batch import Batch
from millrace.models.heads import scores
from millrace.models.load import Model
from millrace.protocols import StepReport
from millrace.training.optimizer import WeightOptimizer, optimizer_step
from millrace.training.parallel_model import ParallelModel, TokenReadout, Which, at_chosen, predicting


class ValueTrainer:
    """The critic's weights, their optimizer, and the number of times it was asked to step.

    `learning_rate` is of the n-th call of `optim_step`, counted from 0. `clip` is how far a value may move
    from the batch's `value_T` before its loss holds it; None is off.
    """

    def __init__(
        self,
        model: Model,
        optimizer: WeightOptimizer,
        *,
        learning_rate: Callable[[int], float],
        clip: float | None,
        coefficient: float,
        max_tokens: int,
        max_grad_norm: float,
        spread: ParallelModel | None = None,
    ) -> None:
        self.model = model
        self._spread = spread or ParallelModel(model)
        self.optimizer = optimizer
        self.num_attempts = 0
        self._learning_rate = learning_rate
        self._clip = clip
        self._coefficient = coefficient
        self._max_tokens = max_tokens
        self._max_grad_norm = max_grad_norm
        self._seen: list[Tensor] = []

    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute values under the current weights, in float32 and without gradient.

        Returns:
            value_T: of the state in which each chosen token was chosen, which is the score at the position
                before it; 0 elsewhere.
            final_B: of the state after each segment's last token, to go on from where it was cut off.

        Raises:
            ValueError: one segment alone is longer than `max_tokens`.
        """
        (score_T,) = self._spread.read(
            batch, self._max_tokens, TokenReadout(_every_token, _scores, 1)
        ).float()
        return at_chosen(batch, score_T), score_T[batch.length_B.cumsum(0) - 1]

    def forward_backward(self, batch: Batch) -> None:
        """Add the gradient of the sum over chosen tokens of value_loss(v, V, R) * weight.

        v is the present value, V the batch's `value_T`, R its `return_T`. The gradient does not depend on how
        the batch is split.

        Raises:
            ValueError: the batch has no values or returns, or one segment alone is longer than `max_tokens`.
        """
        if batch.value_T is None or batch.return_T is None:
            raise ValueError("the critic needs the batch's value_T and return_T; compute them first")
        reading = TokenReadout(predicting, _scores, 1)
        (score_T,) = self._spread.learn(batch, self._max_tokens, reading, self._loss)
        value_N, mask_T = score_T[predicting(batch)], batch.action_mask_T
        old_N, return_N, weight_N = batch.value_T[mask_T], batch.return_T[mask_T], batch.weight_T[mask_T]
        loss_N = self._each(value_N, old_N, return_N)
        held_N = torch.zeros_like(value_N)
        if self._clip is not None:
            held_N = value_clipped(value_N, old_N, return_N, clip=self._clip)
        self._seen.append(
            torch.stack([x_N.double().cpu() for x_N in (loss_N, held_N, value_N, return_N, weight_N)])
        )

    def _loss(self, micro: Batch, numbers: tuple[Tensor, ...]) -> Tensor:
        assert micro.value_T is not None and micro.return_T is not None
        mask_T = micro.action_mask_T
        loss_N = self._each(numbers[0], micro.value_T[mask_T], micro.return_T[mask_T])
        return (loss_N * micro.weight_T[mask_T]).sum()

    def _each(self, value_N: Tensor, old_N: Tensor, return_N: Tensor) -> Tensor:
        return value_loss(value_N, old_N, return_N, clip=self._clip, coefficient=self._coefficient)

    def optim_step(self) -> StepReport:
        """Update the weights, or skip the step where the gradient is not finite, and clear the gradient.

        Returns:
            metrics: `loss`; the weighted means over the tokens `clip_fraction` (the clip holds the value) and
                `value`; and `explained_variance` = 1 - Var(R - v) / Var(R) under the weights, left out where
                every return is the same.
        """
        metrics = _metrics(torch.cat(self._seen, 1)) if self._seen else {}
        report = optimizer_step(
            self.optimizer,
            learning_rate=self._learning_rate(self.num_attempts),
            max_grad_norm=self._max_grad_norm,
            metrics=metrics,
            norms=self._spread.grad_norms,
        )
        self.num_attempts += 1
        self._seen = []
        return report

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, under its Hugging Face name; a collective call."""
        return self._spread.named_tensors()


def _scores(model: Model, micro: Batch, which: Which, hidden_MD: Tensor) -> tuple[Tensor]:
    return (scores(model, hidden_MD),)


def _every_token(batch: Batch) -> Tensor:
    return torch.arange(batch.num_tokens, device=batch.token_T.device)


def _metrics(columns_5N: Tensor) -> dict[str, float]:
    loss_N, clipped_N, value_N, return_N, weight_N = columns_5N
    normalised_N = weight_N / (weight_N.sum() or 1.0)

    def mean(x_N: Tensor) -> float:
        return float((x_N * normalised_N).sum())

    def variance(x_N: Tensor) -> float:
        return mean((x_N - mean(x_N)) ** 2)

    metrics = {
        "loss": float((loss_N * weight_N).sum()),
        "clip_fraction": mean(clipped_N),
        "value": mean(value_N),
    }
    if bool((return_N != return_N[:1]).any()):
        metrics["explained_variance"] = 1 - variance(return_N - value_N) / variance(return_N)
    return metrics
