"""Estimators of KL(policy || reference) per token, from sampled tokens, and the KL coefficient.

T = packed tokens. With d = log pi - log ref. In the mean over the policy's own tokens k1 and k3 are unbiased;
as a loss they differ: the gradient of k1 has mean zero, that of k2 is the gradient of the divergence. The
divergence over the whole vocabulary needs the logits: `kernels`.
Source: Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from millrace.algorithms.checks import check_shapes, require
from millrace.algorithms.losses import log_ratio

# log-probabilities of policy and reference [N] -> divergence [N].
Divergence = Callable[[Tensor, Tensor], Tensor]


def k1(policy_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """d: unbiased, high variance, may be negative."""
    check_shapes(policy_logprob_T=policy_logprob_T, reference_logprob_T=reference_logprob_T)
    return policy_logprob_T - reference_logprob_T


def k2(policy_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance; its gradient is that of the divergence."""
    return 0.5 * k1(policy_logprob_T, reference_logprob_T).square()


def k3(policy_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """exp(-d) - 1 + d, at most 10: unbiased below the bound, never negative.

    verl's `low_var_kl`: the ratio is clamped to e^+-20 and the value to 10, because one token with very
    little probability under the policy would otherwise dominate the batch.
    """
    inverse_T = log_ratio(reference_logprob_T, policy_logprob_T)
    return (inverse_T.exp() - inverse_T - 1).clamp(max=10)


def absolute(policy_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """|d|: a distance rather than an estimate of the divergence; verl's `abs`."""
    return k1(policy_logprob_T, reference_logprob_T).abs()


def straight_through(estimator: Divergence) -> Divergence:
    """The estimator's value with the gradient of k2, which is that of the divergence; verl's `k1+`, `k3+`."""

    def value_of_one_gradient_of_the_other(policy_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
        square_T = k2(policy_logprob_T, reference_logprob_T)
        return square_T - square_T.detach() + estimator(policy_logprob_T, reference_logprob_T).detach()

    return value_of_one_gradient_of_the_other


def divergence(name: str) -> Divergence:
    """Return the estimator that a recipe names; ValueError if there is none."""
    estimators = {
        "k1": k1,
        "k2": k2,
        "k3": k3,
        "abs": absolute,
        "k1+": straight_through(k1),
        "k3+": straight_through(k3),
    }
    require(name in estimators, "estimator", name, f"one of {', '.join(estimators)}")
    return estimators[name]


def adaptive_coefficient(
    coefficient: float, divergence: float, *, target: float, horizon: float, num_sequences: int
) -> float:
    """The coefficient of the next step: beta (1 + clip(KL / target - 1, -0.2, 0.2) num_sequences / horizon).

    After `horizon` sequences, a full error (0.2) would have changed beta by a fifth. Raises ValueError if
    target is not above 0, the divergence is not finite, or the horizon is shorter than the step, which could
    turn the coefficient negative.
    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences"; as in verl.
    """
    require(target > 0, "target", target, "above 0")
    require(horizon >= num_sequences, "horizon", horizon, f"at least the {num_sequences} sequences of a step")
    require(math.isfinite(divergence), "divergence", divergence, "finite")
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_sequences / horizon)
