"""Policy losses, per token. What a token weighs is decided elsewhere (`weights`).

T = packed tokens. Log-probabilities are natural.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Beyond e^20 a ratio says nothing but "far off"; without a bound one token overflows the whole loss.
MAX_LOG_RATIO = 20.0


def log_ratio(policy_logprob_T: Tensor, sampler_logprob_T: Tensor) -> Tensor:
    """log(pi / mu) per token, clamped to +-20."""
    return (policy_logprob_T - sampler_logprob_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Tensor:
    """L_t = max(-A r, -A clip(r, 1 - low, 1 + high)) with r = pi / mu; for A < 0 at most -A dual.

    Args:
        policy_logprob_T: under the weights being trained.
        sampler_logprob_T: under the weights that drew the token.
        advantage_T: advantages.
        low: the ratio is clipped at 1 - low.
        high: the ratio is clipped at 1 + high.
        dual: bound on the ratio for negative advantages, above 1; None is off.

    Returns:
        loss [T], to be minimised.

    Source: Schulman et al. 2017; separate bounds: Yu et al. 2025 (DAPO); dual clip: Ye et al. 2020.
    """
    ratio_T = log_ratio(policy_logprob_T, sampler_logprob_T).exp()
    loss_T = torch.maximum(-advantage_T * ratio_T, -advantage_T * ratio_T.clamp(1 - low, 1 + high))
    if dual is not None:
        loss_T = torch.where(advantage_T < 0, torch.minimum(loss_T, -advantage_T * dual), loss_T)
    return loss_T


def clipped(
    policy_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor, *, low: float, high: float
) -> Tensor:
    """Which tokens `ppo_clip` gives no gradient because their ratio left the band, bool [T]."""
    ratio_T = log_ratio(policy_logprob_T, sampler_logprob_T).exp()
    return ((advantage_T > 0) & (ratio_T > 1 + high)) | ((advantage_T < 0) & (ratio_T < 1 - low))
