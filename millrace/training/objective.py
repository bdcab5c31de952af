"""Objectives of the policy: a loss for each chosen token, from the model's outputs for it.

N = chosen tokens in packed order, T = packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from millrace.algorithms.ratios import interpolated_proximal
from millrace.data.batch import Batch
from millrace.training.kl_control import KlControl


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """The policy's outputs for the chosen tokens, with gradient during training.

    `divergence_N` is KL(policy || reference) over the candidates of each token, if requested.
    """

    logprob_N: Tensor
    entropy_N: Tensor
    version: int
    divergence_N: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What a policy loss may look at, one entry for each chosen token.

    Attributes:
        policy_N: log-probability under the weights being trained, with gradient.
        start_N: log-probability that the ratio is taken to.
        selected_N: tokens to treat apart, where the method selects some.
    """

    policy_N: Tensor
    start_N: Tensor
    advantage_N: Tensor
    segment_N: Tensor
    num_segments: int
    selected_N: Tensor | None


# What the forward gave, and the micro-batch -> loss [N] and what to report of each token, [N] each.
Objective = Callable[[Predicted, Batch], tuple[Tensor, dict[str, Tensor]]]
# -> loss [N], and which tokens its bounds left without gradient (None: it has no bounds).
PolicyLoss = Callable[[Terms], tuple[Tensor, Tensor | None]]
# log-ratio of proximal over sampler [N], segment [N], number of segments -> factor of each token's loss [N].
Correction = Callable[[Tensor, Tensor, int], Tensor]
# log-probabilities of policy and reference [N] -> divergence [N].
Divergence = Callable[[Tensor, Tensor], Tensor]


def imitation(predicted: Predicted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Supervised training: the negative log-probability of the demonstration's tokens."""
    return -predicted.logprob_N, {}


def surrogate(
    loss: PolicyLoss,
    *,
    interpolate: bool = False,
    correction: Correction | None = None,
    entropy_coefficient: float = 0.0,
    penalty: Objective | None = None,
) -> Objective:
    """Combine a policy loss with its entropy bonus and penalty.

    The ratio is taken to the batch's proximal log-probabilities where it has some, else to the sampler's;
    with `interpolate` to a mean of sampler and policy by version, and `correction` is the importance weight
    of that mean over the sampler, which otherwise comes with the batch.
    """

    def objective(predicted: Predicted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        mask_T = batch.action_mask_T
        sampler_N, segment_N = batch.sampler_logprob_T[mask_T], batch.segment_T[mask_T]
        start_N = sampler_N if batch.proximal_logprob_T is None else batch.proximal_logprob_T[mask_T]
        factor_N = None if batch.correction_T is None else batch.correction_T[mask_T]
        if interpolate:
            start_N = interpolated_proximal(
                predicted.logprob_N.detach(), sampler_N, batch.version_T[mask_T], version=predicted.version
            )
            if correction is not None:
                factor_N = correction(start_N - sampler_N, segment_N, batch.num_segments)
        selected_N = None if batch.selected_T is None else batch.selected_T[mask_T]
        loss_N, outside_N = loss(
            Terms(
                predicted.logprob_N,
                start_N,
                batch.advantage_T[mask_T],
                segment_N,
                batch.num_segments,
                selected_N,
            )
        )
        report = {} if outside_N is None else {"clip_fraction": outside_N.to(loss_N.dtype)}
        if factor_N is not None:
            loss_N = loss_N * factor_N
            report["correction"] = factor_N
        if entropy_coefficient:
            loss_N = loss_N - entropy_coefficient * predicted.entropy_N
        if penalty is not None:
            penalty_N, more = penalty(predicted, batch)
            loss_N, report = loss_N + penalty_N, report | more
        return loss_N, report

    return objective


def kl_penalty(control: KlControl, divergence: Divergence) -> Objective:
    """The controlled multiple of an estimate of KL(policy || reference); the batch must have been scored."""

    def penalty(predicted: Predicted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.reference_logprob_T is None:
            raise ValueError("a KL penalty needs the batch's reference log-probabilities; score it first")
        divergence_N = divergence(predicted.logprob_N, batch.reference_logprob_T[batch.action_mask_T])
        return control.coefficient * divergence_N, {"kl_reference": divergence_N.detach()}

    return penalty


def full_kl_penalty(control: KlControl) -> Objective:
    """The controlled multiple of KL(policy || reference), token by token, over its candidates."""

    def penalty(predicted: Predicted, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        divergence_N = predicted.divergence_N
        if divergence_N is None:
            raise ValueError("a full KL penalty needs the divergence; give the trainer the reference")
        return control.coefficient * divergence_N, {"kl_reference": divergence_N.detach()}

    return penalty
