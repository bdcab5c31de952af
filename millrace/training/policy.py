"""The policy trainer: accumulate `(loss_T * weight_T).sum()` over micro-batches, then step.

N = chosen tokens in packed order, M = some of them, T = packed tokens, D = model width, L = layers with a
router, E = experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from millrace.algorithms.kl import Divergence
from millrace.algorithms.losses import LossTerms, PolicyLoss
from millrace.algorithms.ratios import Correction, interpolated_proximal
from millrace.data.batch import Batch
from millrace.data.packing import pack_demonstrations
from millrace.kernels.token_logprob import Head, token_divergence, token_logprob
from millrace.models.adapters import without_adapter
from millrace.models.load import Model
from millrace.models.logprobs import chosen_hidden, output_head
from millrace.models.router_replay import Routing
from millrace.models.routing import load_metrics
from millrace.protocols import StepReport
from millrace.training.kl_control import KlControl
from millrace.training.optimizer import WeightOptimizer, optimizer_step
from millrace.training.parallel_model import ParallelModel, TokenReadout, Which, predicting
from millrace.training.scorer import ModelScorer


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """The policy's outputs for the chosen tokens, with gradient during training.

    `divergence_N` is KL(policy || reference) over the candidates of each token, if requested; `step` is the
    optimizer step, counted from 0, skipped ones included.
    """

    logprob_N: Tensor
    entropy_N: Tensor
    version: int
    divergence_N: Tensor | None = None
    step: int = 0


# Outputs of the forward pass and the micro-batch -> loss [N], and metrics of each token by name, [N] each.
Objective = Callable[[Predicted, Batch], tuple[Tensor, dict[str, Tensor]]]


def imitation(predicted: Predicted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-probability of each token: the objective of supervised training."""
    return -predicted.logprob_N, {}


@dataclass(frozen=True, slots=True, eq=False)
class KlPenalty:
    """An objective: the controlled multiple of an estimate of KL(policy || reference) per token.

    `divergence` estimates it from the log-probabilities of policy and reference; None takes the divergence
    over the candidates of each token.
    """

    control: KlControl
    divergence: Divergence | None

    def __call__(self, predicted: Predicted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the penalty and its metrics; ValueError without the reference's log-probabilities."""
        if self.divergence is None:
            divergence_N = predicted.divergence_N
            if divergence_N is None:
                raise ValueError("a full KL penalty needs the divergence; give the trainer the reference")
        elif batch.reference_logprob_T is None:
            raise ValueError("a KL penalty needs the batch's reference log-probabilities; score it first")
        else:
            reference_N = batch.reference_logprob_T[batch.action_mask_T]
            divergence_N = self.divergence(predicted.logprob_N, reference_N)
        return self.control.coefficient * divergence_N, {"kl_reference": divergence_N.detach()}


@dataclass(frozen=True, slots=True, eq=False)
class PolicyObjective:
    """An objective: a policy loss with its correction, entropy bonus and penalty.

    The ratio is taken to the batch's proximal log-probabilities where it has some, else to the sampler's;
    with `interpolate` to a mean of sampler and policy by version. `correction` multiplies the loss by a
    weight of that mean over the sampler, or of the policy over the sampler, and `bounded` finds the tokens
    whose weight it bounds; what depends on the proximal log-probabilities alone comes with the batch.
    `entropy_coefficient` is a number, or a function of the optimizer step, which is reported then.
    """

    loss: PolicyLoss | Callable[[LossTerms], tuple[Tensor, Tensor | None]]
    interpolate: bool = False
    correction: Correction | None = None
    bounded: Correction | None = None
    entropy_coefficient: float | Callable[[int], float] = 0.0
    penalty: Objective | None = None

    def __call__(self, predicted: Predicted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, [N], and the metrics of each token."""
        mask_T = batch.action_mask_T
        sampler_N, segment_N = batch.sampler_logprob_T[mask_T], batch.segment_T[mask_T]
        start_N = sampler_N if batch.proximal_logprob_T is None else batch.proximal_logprob_T[mask_T]
        factor_N = None if batch.correction_T is None else batch.correction_T[mask_T]
        report: dict[str, Tensor] = {}
        policy_N = predicted.logprob_N.detach()
        if self.interpolate:
            version_N = batch.version_T[mask_T]
            start_N = interpolated_proximal(policy_N, sampler_N, version_N, version=predicted.version)
        if self.correction is not None:
            against = (
                start_N if self.interpolate else policy_N,
                sampler_N,
                segment_N,
                batch.num_segments,
            )
            weight_N = self.correction(*against)
            factor_N = weight_N if factor_N is None else factor_N * weight_N
            if self.bounded is not None:
                report["correction_clip_fraction"] = self.bounded(*against).to(weight_N.dtype)
        selected_N = None if batch.selected_T is None else batch.selected_T[mask_T]
        advantage_N = batch.advantage_T[mask_T]
        loss_N, outside_N = self.loss(
            LossTerms(predicted.logprob_N, start_N, advantage_N, segment_N, batch.num_segments, selected_N)
        )
        if outside_N is not None:
            report["clip_fraction"] = outside_N.to(loss_N.dtype)
        if factor_N is not None:
            loss_N = loss_N * factor_N
            report["correction"] = factor_N
        coefficient = self.entropy_coefficient
        if callable(coefficient):
            coefficient = coefficient(predicted.step)
            report["entropy_coefficient"] = torch.full_like(loss_N, coefficient)
        if coefficient:
            loss_N = loss_N - coefficient * predicted.entropy_N
        if self.penalty is not None:
            penalty_N, more = self.penalty(predicted, batch)
            loss_N, report = loss_N + penalty_N, report | more
        return loss_N, report


class PolicyTrainer:
    """The weights being trained, their optimizer, and the number of steps they have taken, its version.

    `learning_rate` is of the n-th call of `optim_step`, counted from 0. `temperature` is the sampler's:
    logits are divided by it. `max_tokens` are those of a micro-batch. `reference` is for the divergence over
    the whole vocabulary. `routing` is how a mixture of experts uses a batch's record of its tokens' experts;
    load balance is computed over the tokens of one `forward_backward`.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        optimizer: WeightOptimizer,
        *,
        learning_rate: Callable[[int], float],
        temperature: float,
        max_tokens: int,
        max_grad_norm: float,
        version: int = 0,
        spread: ParallelModel | None = None,
        reference: ModelScorer | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.model = model
        self._spread = spread or ParallelModel(model)
        self.optimizer = optimizer
        self.version = version
        self.num_attempts = 0
        self.scorer = ModelScorer(
            model, temperature=temperature, max_tokens=max_tokens, spread=self._spread, routing=routing
        )
        self._objective = objective
        self._learning_rate = learning_rate
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._max_grad_norm = max_grad_norm
        self._reference, self._routing = reference, routing
        self._load_LE: Tensor | None = None
        self._totals: dict[str, float] = {}
        self._weight = 0.0

    def forward_backward(self, batch: Batch) -> Tensor:
        """Add the gradient of one packed batch, micro-batch by micro-batch; see `protocols.Trainer`."""
        routing = self._routing
        if routing is not None:
            load_LE = routing.load(batch.expert_TLK)
            routing = replace(routing, load_LE=load_LE)
            self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE
        reading = TokenReadout(predicting, self._numbers, 2 if self._reference is None else 3, routing)
        number_KT = self._spread.learn(batch, self._max_tokens, reading, self._loss)
        predicted = self._predicted(tuple(number_KT[:, predicting(batch)]))
        with torch.no_grad():
            loss_N, report = self._objective(predicted, batch)
        weight_N = batch.weight_T[batch.action_mask_T]
        self._weight += float(weight_N.sum())
        for name, value_N in {"loss": loss_N, **report, "entropy": predicted.entropy_N}.items():
            self._totals[name] = self._totals.get(name, 0.0) + float((value_N.double() * weight_N).sum())
        return predicted.logprob_N.float()

    def _numbers(self, model: Model, micro: Batch, which: Which, hidden_MD: Tensor) -> tuple[Tensor, ...]:
        head, support = output_head(model), micro.chosen_support
        support = None if support is None else support[which]
        target_M = micro.token_T[micro.action_mask_T][which]
        numbers = token_logprob(hidden_MD, head, target_M, temperature=self._temperature, support=support)
        if self._reference is None:
            return numbers
        theirs = self._reference.hidden(micro)
        return *numbers, token_divergence(
            hidden_MD, head, *theirs, temperature=self._temperature, support=support
        )

    def _predicted(self, numbers: tuple[Tensor, ...]) -> Predicted:
        logprob_N, entropy_N, *more = numbers
        divergence_N = more[0] if more else None
        return Predicted(logprob_N, entropy_N, self.version, divergence_N, self.num_attempts)

    def _loss(self, micro: Batch, numbers: tuple[Tensor, ...]) -> Tensor:
        loss_N, _ = self._objective(self._predicted(numbers), micro)
        return (loss_N * micro.weight_T[micro.action_mask_T]).sum()

    def logprobs_of(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first, at temperature 1; a collective call."""
        scorer = ModelScorer(self.model, temperature=1.0, max_tokens=len(token_ids), spread=self._spread)
        alike = pack_demonstrations([(token_ids[:1], token_ids[1:])], lambda mask_T, _: mask_T.float())
        found: list[float] = scorer.logprobs(alike)[1:].tolist()
        return found

    def optim_step(self) -> StepReport:
        """Update weights and router biases, unless the gradient is not finite; see `protocols.Trainer`."""
        load_LE = self._load_LE
        report = optimizer_step(
            self.optimizer,
            learning_rate=self._learning_rate(self.num_attempts),
            max_grad_norm=self._max_grad_norm,
            metrics=self._take(),
            norms=self._spread.grad_norms,
        )
        if (
            self._routing is not None
            and self._routing.bias_step
            and load_LE is not None
            and not report.skipped
        ):
            self._routing.routers.move_biases(load_LE, step=self._routing.bias_step)
        self.version += not report.skipped
        self.num_attempts += 1
        return report

    def discard(self) -> dict[str, float]:
        """Drop the accumulated gradient without a step, and return the metrics it would have reported."""
        self.optimizer.zero_grad()
        return self._take()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by Hugging Face name, an adapter merged, tied ones once; a collective call."""
        return self._spread.named_tensors()

    def _take(self) -> dict[str, float]:
        shared = self._weight or 1.0
        metrics = {name: total if name == "loss" else total / shared for name, total in self._totals.items()}
        if self._load_LE is not None:
            metrics |= load_metrics(self._load_LE)
        self._totals, self._weight, self._load_LE = {}, 0.0, None
        return metrics


class BaseScorer(ModelScorer):
    """Log-probabilities under the base of an adapter: the same model with the adapter off."""

    @torch.no_grad()
    def hidden(self, micro: Batch) -> tuple[Tensor, Head]:
        """As `ModelScorer.hidden`, for the base only, within the policy's own forward."""
        with without_adapter(self.model):
            return chosen_hidden(self.model, micro)[0], output_head(self.model)

    def _read(self, batch: Batch, numbers: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        with without_adapter(self.model):
            return super()._read(batch, numbers)
