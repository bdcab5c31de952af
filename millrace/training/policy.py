"""The policy trainer: accumulate `(loss_T * weight_T).sum()` over micro-batches, then step.

N = chosen tokens, in packed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from millrace.algorithms import kl
from millrace.algorithms.losses import clipped, ppo_clip
from millrace.data.batch import Batch
from millrace.models.load import Model
from millrace.models.logprobs import chosen_logprobs
from millrace.protocols import StepReport

# (log-probabilities [N], micro-batch) -> loss [N] and what to report of each token, [N] each.
Objective = Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]
KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def imitation(logprob_N: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised training: the negative log-probability of the demonstration's tokens."""
    return -logprob_N, {}


def clipped_surrogate(
    *, low: float, high: float, dual: float | None, kl_loss: Objective | None = None
) -> Objective:
    """PPO's clipped objective, with a penalty on the distance from the reference where `kl_loss` is given."""

    def objective(logprob_N: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        mask_T = batch.action_mask_T
        sampler_N, advantage_N = batch.sampler_logprob_T[mask_T], batch.advantage_T[mask_T]
        loss_N = ppo_clip(logprob_N, sampler_N, advantage_N, low=low, high=high, dual=dual)
        outside_N = clipped(logprob_N.detach(), sampler_N, advantage_N, low=low, high=high)
        report = {"clip_share": outside_N.to(loss_N.dtype)}
        if kl_loss is not None:
            penalty_N, more = kl_loss(logprob_N, batch)
            loss_N, report = loss_N + penalty_N, report | more
        return loss_N, report

    return objective


def kl_penalty(*, coefficient: float, estimator: str) -> Objective:
    """`coefficient` times an estimate of KL(policy || reference); the batch must have been scored."""
    estimate = KL_ESTIMATORS[estimator]

    def penalty(logprob_N: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.reference_logprob_T is None:
            raise ValueError("a KL penalty needs the batch's reference log-probabilities; score it first")
        divergence_N = estimate(logprob_N, batch.reference_logprob_T[batch.action_mask_T])
        return coefficient * divergence_N, {"kl_reference": divergence_N.detach()}

    return penalty


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
            logprob_N, entropy_N = chosen_logprobs(self.model, micro, temperature=self._temperature)
            loss_N, report = self._objective(logprob_N, micro)
            weight_N = micro.weight_T[micro.action_mask_T]
            loss = (loss_N * weight_N).sum()
            loss.backward()
            logprobs.append(logprob_N.detach())
            self._add("loss", loss.detach())
            for name, value_N in (report | {"entropy": entropy_N}).items():
                self._add(name, (value_N * weight_N).sum())
            self._weight += float(weight_N.sum())
        return torch.cat(logprobs)

    def optim_step(self) -> StepReport:
        """Move the weights, or leave them where the gradient is not finite; see `protocols.Trainer`."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                # A batch without any gradient still moves by momentum, as one with a gradient of 0 does.
                parameter.grad = torch.zeros_like(parameter)
        rate = self._learning_rate(self.num_attempts)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_gradient_norm))
        totals = {name: float(value) for name, value in self._totals.items()}
        finite = math.isfinite(norm) and math.isfinite(totals.get("loss", 0.0))
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.version += 1
        self.optimizer.zero_grad(set_to_none=True)
        # Everything but the loss is a mean over the shares that were trained on.
        shared = self._weight or 1.0
        metrics = {name: value if name == "loss" else value / shared for name, value in totals.items()}
        self.num_attempts += 1
        self._totals, self._weight = {}, 0.0
        return StepReport(skipped=not finite, gradient_norm=norm, learning_rate=rate, metrics=metrics)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, tied weights once."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def _add(self, name: str, value: Tensor) -> None:
        self._totals[name] = self._totals.get(name, torch.zeros(())) + value.detach().float().cpu()
