"""Estimators of KL(policy || reference) per token, from the tokens the policy drew.

With d = log pi - log ref. In the mean over the policy's own tokens k1 and k3 are unbiased; as a loss they
differ: the gradient of k1 has mean zero, that of k2 is the gradient of the divergence.
Source: Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

from torch import Tensor

from millrace.algorithms.losses import log_ratio


def k1(policy_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """d: unbiased, high variance, may be negative."""
    return policy_logprob_T - reference_logprob_T


def k2(policy_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance; its gradient is that of the divergence."""
    return 0.5 * (policy_logprob_T - reference_logprob_T).square()


def k3(policy_logprob_T: Tensor, reference_logprob_T: Tensor) -> Tensor:
    """exp(-d) - 1 + d, at most 10: unbiased below the bound, never negative.

    verl's `low_var_kl`: the ratio is clamped to e^+-20 and the value to 10, because one token that the
    policy hardly holds would otherwise outweigh the batch.
    """
    inverse_T = log_ratio(reference_logprob_T, policy_logprob_T)
    return (inverse_T.exp() - inverse_T - 1).clamp(max=10)
