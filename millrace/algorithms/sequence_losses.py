"""Policy losses with one ratio per segment, per token, to be minimised.

T = packed tokens, here only those the policy chose; segment_T = the segment of each, ids in
[0, num_segments); B = segments, of which some may have no token. A micro-batch holds whole segments, so the
losses do not depend on the split. The other arguments, shapes and NaN as in `losses`; a NaN spreads over its
segment. The papers have one advantage per segment; the functions take one per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.checks import check_shapes, require
from millrace.algorithms.losses import log_ratio, ppo_clip, reinforce
from millrace.algorithms.masked import segment_mean, segment_sum

# verl's bound on the log of GSPO's token ratio.
MAX_TOKEN_LOG_RATIO = 10.0


def sequence_log_ratio(
    policy_logprob_T: Tensor, sampler_logprob_T: Tensor, segment_T: Tensor, num_segments: int
) -> Tensor:
    """Mean of log(pi / mu) over each token's segment, [T]: the log of GSPO's ratio."""
    check_shapes(policy_logprob_T=policy_logprob_T, sampler_logprob_T=sampler_logprob_T, segment_T=segment_T)
    return segment_mean(policy_logprob_T - sampler_logprob_T, segment_T, num_segments)[segment_T]


def gspo(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    low: float,
    high: float,
) -> Tensor:
    """L_t = max(-A s, -A clip(s, 1 - low, 1 + high)), s = exp(mean over the segment of log(pi / mu)).

    The gradient flows through the mean. The paper's bounds are about 3e-4, since a mean moves little.

    Raises:
        ValueError: low is not in [0, 1), or high is not above 0.

    Source: Zheng et al. 2025, "Group sequence policy optimization".
    """
    mean_T = sequence_log_ratio(policy_logprob_T, sampler_logprob_T, segment_T, num_segments)
    return ppo_clip(mean_T, torch.zeros_like(mean_T), advantage_T, low=low, high=high)


def gspo_token(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    low: float,
    high: float,
) -> Tensor:
    """As `gspo` in value, with s_t = sg(s) pi / sg(pi): each token's gradient is its own.

    The same gradient as `gspo` where a segment has one advantage and one weight per token; verl's form. The
    log of s_t is at most 10, as there.
    """
    mean_T = sequence_log_ratio(policy_logprob_T, sampler_logprob_T, segment_T, num_segments)
    log_T = policy_logprob_T - policy_logprob_T.detach() + mean_T.detach()
    bounded_T = log_T.clamp(max=MAX_TOKEN_LOG_RATIO)
    return ppo_clip(bounded_T, torch.zeros_like(mean_T), advantage_T, low=low, high=high)


def gmpo(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    low: float,
    high: float,
) -> Tensor:
    """L_b = -mean(A) exp(mean of d'), the geometric mean of ratios clipped per token; each token has its L_b.

    d = log(pi / mu); d' = min(d, high) where A > 0, max(d, -low) where A < 0, and 0 where A = 0. With
    `weights.sequence_mean` the sum is the mean over segments, as in verl (`geo_mean`). The paper's bounds are
    0.4 each.

    Raises:
        ValueError: low is below 0, or high is not above 0.

    Source: Zhao et al. 2025, "Geometric-mean policy optimization".
    """
    require(low >= 0, "low", low, "at least 0")
    require(high > 0, "high", high, "above 0")
    check_shapes(policy_logprob_T=policy_logprob_T, advantage_T=advantage_T, segment_T=segment_T)
    log_T, sign_T = log_ratio(policy_logprob_T, sampler_logprob_T), advantage_T.sign()
    kept_T = sign_T * torch.minimum(sign_T * log_T, sign_T * log_T.clamp(-low, high))
    ratio_B = segment_mean(kept_T, segment_T, num_segments).exp()
    return -(segment_mean(advantage_T, segment_T, num_segments) * ratio_B)[segment_T]


def topr(
    policy_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    segment_T: Tensor,
    num_segments: int,
) -> Tensor:
    """L_t = -w A log pi; w = 1 for A > 0, and for A < 0 the segment's ratio, at most 1, without gradient.

    Good sequences are imitated however off-policy they are; bad ones are pushed down only while the policy
    still samples them, so neither sign needs on-policy data.

    Source: Le Roux et al. 2025, "Tapered off-policy REINFORCE".
    """
    check_shapes(
        policy_logprob_T=policy_logprob_T,
        sampler_logprob_T=sampler_logprob_T,
        advantage_T=advantage_T,
        segment_T=segment_T,
    )
    total_B = segment_sum(policy_logprob_T.detach() - sampler_logprob_T, segment_T, num_segments)
    weight_T = total_B.clamp(max=0).exp()[segment_T]
    tapered_T = advantage_T.clamp(min=0) + weight_T * advantage_T.clamp(max=0)
    return reinforce(policy_logprob_T, tapered_T)
