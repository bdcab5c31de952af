"""The critic: the value of each state, learned by its own optimizer beside the policy.

T = packed tokens, B = segments, N = chosen tokens, in packed order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from millrace.algorithms.losses import value_clipped, value_loss
from millrace.data.batch import Batch
from millrace.models.heads import packed_scores
from millrace.models.load import Model
from millrace.protocols import StepReport
from millrace.training.optimizer import optimizer_step


class ValueTrainer:
    """The critic's weights, their optimizer, and the number of times it was asked to step."""

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        *,
        learning_rate: Callable[[int], float],
        clip: float | None,
        coefficient: float,
        max_tokens: int,
        max_gradient_norm: float,
    ) -> None:
        """A critic.

        Args:
            model: from `models.heads`.
            optimizer: over the model's parameters.
            learning_rate: of the n-th call of `optim_step`, counted from 0.
            clip: how far a value may move from the batch's `value_T` before its loss holds it; None is off.
            coefficient: factor of the squared error.
            max_tokens: tokens of one micro-batch.
            max_gradient_norm: gradients are scaled down to this norm.
        """
        self.model = model
        self.optimizer = optimizer
        self.num_attempts = 0
        self._learning_rate = learning_rate
        self._clip = clip
        self._coefficient = coefficient
        self._max_tokens = max_tokens
        self._max_gradient_norm = max_gradient_norm
        self._seen: list[Tensor] = []

    @torch.no_grad()
    def values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Values under the present weights, in float32 and without gradient.

        Returns:
            value_T: of the state in which each chosen token was chosen, which is the score at the position
                before it; 0 elsewhere.
            final_B: of the state after each segment's last token, to go on from where it was cut off.

        Raises:
            ValueError: one segment alone is longer than `max_tokens`.
        """
        values, finals = [], []
        for micro in batch.split(self._max_tokens):
            here, score_T = self._scored(micro)
            # The first token of a segment is never chosen, so no value comes from the segment before.
            values.append(torch.where(here.action_mask_T, score_T.roll(1), 0.0))
            finals.append(score_T[here.length_B.cumsum(0) - 1])
        device = batch.token_T.device
        return torch.cat(values).float().to(device), torch.cat(finals).float().to(device)

    def forward_backward(self, batch: Batch) -> None:
        """Add the gradient of the sum over chosen tokens of value_loss(v, V, R) * weight.

        v is the present value, V the batch's `value_T`, R its `return_T`. The gradient does not depend on how
        the batch is split.

        Raises:
            ValueError: the batch has no values or returns, or one segment alone is longer than `max_tokens`.
        """
        if batch.value_T is None or batch.return_T is None:
            raise ValueError("the critic needs the batch's value_T and return_T; compute them first")
        for micro in batch.split(self._max_tokens):
            here, score_T = self._scored(micro)
            assert here.value_T is not None and here.return_T is not None
            index_N = here.action_mask_T.nonzero()[:, 0]
            value_N, return_N, weight_N = score_T[index_N - 1], here.return_T[index_N], here.weight_T[index_N]
            old_N = here.value_T[index_N]
            loss_N = value_loss(value_N, old_N, return_N, clip=self._clip, coefficient=self._coefficient)
            (loss_N * weight_N).sum().backward()
            held_N = torch.zeros_like(value_N)
            if self._clip is not None:
                held_N = value_clipped(value_N, old_N, return_N, clip=self._clip)
            columns = (loss_N, held_N, value_N, return_N, weight_N)
            self._seen.append(torch.stack([column_N.detach().double() for column_N in columns]).cpu())

    def optim_step(self) -> StepReport:
        """Move the weights, or leave them where the gradient is not finite, and clear the gradient.

        Returns:
            metrics: `loss`; the means over the tokens' shares `clip_share` (the clip holds the value) and
                `value`; and `explained_variance` = 1 - Var(R - v) / Var(R) under the shares, left out where
                every return is the same.
        """
        metrics = _metrics(torch.cat(self._seen, 1)) if self._seen else {}
        report = optimizer_step(
            self.model,
            self.optimizer,
            learning_rate=self._learning_rate(self.num_attempts),
            max_gradient_norm=self._max_gradient_norm,
            metrics=metrics,
        )
        self.num_attempts += 1
        self._seen = []
        return report

    def _scored(self, micro: Batch) -> tuple[Batch, Tensor]:
        here = micro.to(self.model.device)
        return here, packed_scores(self.model, here.token_T, here.position_T, here.length_B)


def _metrics(columns_5N: Tensor) -> dict[str, float]:
    """What one step's tokens come to: loss, clipped, value, return and weight of each."""
    loss_N, clipped_N, value_N, return_N, weight_N = columns_5N
    share_N = weight_N / (weight_N.sum() or 1.0)

    def mean(x_N: Tensor) -> float:
        return float((x_N * share_N).sum())

    def variance(x_N: Tensor) -> float:
        return mean((x_N - mean(x_N)) ** 2)

    metrics = {
        "loss": float((loss_N * weight_N).sum()),
        "clip_share": mean(clipped_N),
        "value": mean(value_N),
    }
    if bool((return_N != return_N[:1]).any()):
        metrics["explained_variance"] = 1 - variance(return_N - value_N) / variance(return_N)
    return metrics
