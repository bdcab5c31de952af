"""Advantage estimators.

N = trajectories, G = groups (one prompt each), K = rewards of one trajectory, T = chosen tokens, B = segments
(trajectories with their tokens). Group functions take one reward per trajectory and give one advantage per
trajectory [N]; `group_N` holds integers in [0, num_groups). A trajectory alone in its group has advantage 0
unless documented otherwise: it has no baseline (verl gives it its raw reward, unless noted). If all rewards
of a group are equal, its advantages are exactly 0. An empty group is allowed. `epsilon` keeps a quotient
finite.

Every function raises ValueError if shapes differ, a group or segment is out of range, a length is negative, a
number is NaN or infinite, or epsilon is not above 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.checks import (
    check_finite,
    check_ids,
    check_lengths,
    check_positive,
    check_segments,
    check_shapes,
    require,
)
from millrace.algorithms.masked import goes_on, segment_max, segment_mean, segment_sum, whiten
from millrace.algorithms.returns import discounted_returns
from millrace.kernels.dispatch import Scan, linear_scan


def group_centred(reward_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """A_i = r_i - mean of the rewards in i's group.

    Source: Liu et al. 2025, "Understanding R1-Zero-like training" (Dr. GRPO).
    """
    below_N = _below_best(reward_N, group_N, num_groups)
    return below_N - segment_mean(below_N, group_N, num_groups)[group_N]


def group_normalised(
    reward_N: Tensor, group_N: Tensor, num_groups: int, *, epsilon: float = 1e-6, lone_reward: bool = False
) -> Tensor:
    """A_i = (r_i - mean_g) / (std_g + epsilon), std with Bessel's correction, over i's group g.

    `epsilon` is verl's. `lone_reward` gives a trajectory alone in its group r / (1 + epsilon), as verl does.
    Source: Shao et al. 2024, "DeepSeekMath" (GRPO).
    """
    check_positive(epsilon=epsilon)
    centred_N = group_centred(reward_N, group_N, num_groups)
    advantage_N = centred_N / (group_std(centred_N, group_N, num_groups) + epsilon)[group_N]
    if lone_reward:
        alone_N = torch.bincount(group_N)[group_N] == 1
        advantage_N = torch.where(alone_N, reward_N / (1 + epsilon), advantage_N)
    return advantage_N


def leave_one_out(reward_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """A_i = r_i - mean of the other rewards in i's group: `group_centred` times n / (n - 1), unbiased.

    verl's `rloo_vectorized` gives a trajectory alone in its group 0, too.
    Source: Ahmadian et al. 2024, "Back to basics" (RLOO).
    """
    centred_N = group_centred(reward_N, group_N, num_groups)
    size_N = torch.bincount(group_N)[group_N]
    return centred_N * size_N / (size_N - 1).clamp(min=1)


def leave_one_out_normalised(
    reward_N: Tensor, group_N: Tensor, num_groups: int, *, epsilon: float = 1e-6
) -> Tensor:
    """A_i = (r_i - mean of the others) / (std of the others + epsilon), undivided where that std is 0.

    The std has Bessel's correction, over the n - 1 others; of a single other it is 0. This is what NeMo-RL
    does, with a pitfall: the only correct response of four is not divided, nor is the only wrong one; all
    others are.
    Source: NeMo-RL, `calculate_baseline_and_std_per_prompt`.
    """
    check_positive(epsilon=epsilon)
    wide_N = reward_N.double()
    advantage_N = leave_one_out(wide_N, group_N, num_groups)
    centred_N = group_centred(wide_N, group_N, num_groups)
    square_N = segment_sum(centred_N.square(), group_N, num_groups)[group_N]
    # The sum of squares without i, about the mean without i.
    others_N = square_N - centred_N * advantage_N
    std_N = (others_N / (torch.bincount(group_N)[group_N] - 2).clamp(min=1)).sqrt()
    # Equal others leave a rounding residue, here of 1e-16, which must not become the divisor.
    divided_N = torch.where(others_N > 1e-12 * square_N, advantage_N / (std_N + epsilon), advantage_N)
    return divided_N.to(reward_N.dtype)


def length_weighted_centred(reward_N: Tensor, length_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """A_i = r_i - sum_j l_j r_j / sum_j l_j over i's group, l = chosen tokens.

    The baseline of least variance if the squared gradient of a trajectory grows as its length. In a group
    without any token the best reward is the baseline.
    Source: Hao et al. 2025, "On-policy RL with optimal reward baseline" (OPO).
    """
    check_shapes(reward_N=reward_N, length_N=length_N)
    check_lengths(length_N=length_N)
    below_N = _below_best(reward_N, group_N, num_groups)
    total_G = segment_sum(below_N * length_N, group_N, num_groups)
    return below_N - (total_G / segment_sum(length_N, group_N, num_groups).clamp(min=1))[group_N]


def gpg(reward_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """A_i = N / (number of rewards that are not 0) * (r_i - mean_g): larger where success is rare.

    Source: Chu et al. 2025, "GPG: a simple and strong reinforcement learning baseline".
    """
    centred_N = group_centred(reward_N, group_N, num_groups)
    return centred_N * len(reward_N) / reward_N.count_nonzero().clamp(min=1)


def pass_at_k(
    reward_N: Tensor,
    group_N: Tensor,
    num_groups: int,
    *,
    divide_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """A_i = r_i - second best of the group if i is its best, else 0; over (std_g + epsilon) if divided.

    The best trajectory's contribution to the maximum of the group; 0 for a tie. The std has Bessel's
    correction. verl rejects a batch with a group of one.
    Source: Tang et al. 2025, "Optimizing language models for inference time objectives"; verl's `grpo_passk`.
    """
    check_positive(epsilon=epsilon)
    below_N = _below_best(reward_N, group_N, num_groups)
    order_N = below_N.argsort(descending=True)
    order_N = order_N[group_N[order_N].argsort(stable=True)]
    count_G = torch.bincount(group_N, minlength=num_groups)
    best_G = (count_G.cumsum(0) - count_G)[count_G > 1]
    gap_G = -below_N[order_N[best_G + 1]]
    if divide_by_std:
        centred_N = group_centred(reward_N, group_N, num_groups)
        gap_G = gap_G / (group_std(centred_N, group_N, num_groups)[count_G > 1] + epsilon)
    return torch.zeros_like(below_N).index_copy(0, order_N[best_G], gap_G)


def group_decoupled(
    reward_KN: Tensor, group_N: Tensor, num_groups: int, *, weight_K: Tensor, epsilon: float = 1e-6
) -> Tensor:
    """A_i = sum_k w_k GRPO(r_k)_i: each reward is normalised in its group before they are added.

    So a reward of large range does not dominate one of small range. The authors, and verl, then whiten over
    all tokens of the batch: `whiten` of the result, after the caller broadcasts it to the chosen tokens.
    Source: Liu et al. 2026, "GDPO: group reward-decoupled normalization policy optimization".
    """
    if reward_KN.shape != (len(weight_K), len(group_N)):
        raise ValueError(
            f"reward_KN has shape {tuple(reward_KN.shape)}, but there are {len(weight_K)} weights and "
            f"{len(group_N)} trajectories"
        )
    require(len(weight_K) > 0, "weight_K", weight_K.tolist(), "at least one weight")
    check_finite(reward_KN=reward_KN, weight_K=weight_K)
    normalised = [group_normalised(reward_N, group_N, num_groups, epsilon=epsilon) for reward_N in reward_KN]
    return weight_K.to(reward_KN.dtype) @ torch.stack(normalised)


def baseline_centred(return_T: Tensor, baseline_N: Tensor, segment_T: Tensor) -> Tensor:
    """A_t = R_t - b, per chosen token, R undiscounted, b the reward of the greedy response: ReMax.

    Source: Li et al. 2024, "ReMax".
    """
    check_shapes(return_T=return_T, segment_T=segment_T)
    check_finite(return_T=return_T, baseline_N=baseline_N)
    check_ids(len(baseline_N), segment_T=segment_T)
    return return_T - baseline_N[segment_T]


def reinforce_plus_plus(reward_T: Tensor, length_B: Tensor, *, gamma: float, scan: Scan = "auto") -> Tensor:
    """Discounted returns, whitened over all chosen tokens of the batch, [T].

    `reward_T` holds the segments one after the other, a KL penalty included.
    Source: Hu et al. 2025, "REINFORCE++".
    """
    return whiten(discounted_returns(reward_T, length_B, gamma=gamma, scan=scan))


def reinforce_plus_plus_baseline(
    reward_N: Tensor, group_N: Tensor, num_groups: int, length_N: Tensor
) -> Tensor:
    """`group_centred`, broadcast over each trajectory's chosen tokens, whitened over all of them, [T].

    verl whitens the raw reward of a trajectory that is alone in its group.
    Source: Hu et al. 2025, "REINFORCE++".
    """
    check_shapes(reward_N=reward_N, length_N=length_N)
    check_lengths(length_N=length_N)
    return whiten(group_centred(reward_N, group_N, num_groups).repeat_interleave(length_N))


def optimal_token_baseline(
    return_T: Tensor,
    logprob_T: Tensor,
    square_T: Tensor,
    position_T: Tensor,
    segment_T: Tensor,
    group_B: Tensor,
    *,
    weight_T: Tensor | None = None,
    epsilon: float = 1e-8,
    scan: Scan = "auto",
) -> Tensor:
    """A_t = R_t - b(group, position), the baseline of least variance if gradients of tokens are independent.

    b = sum_i W_i R_i / (sum_i W_i + epsilon) over the trajectories i of the group that reach the position.
    W_t = sum of w over the segment up to t; w = 1 - 2 pi + sum over the vocabulary of pi^2 (`square_T`) is
    the squared length of the gradient of log pi in the logits, times `weight_T`^2, importance weights. If
    only one trajectory reaches a position, there is no baseline: b is 0, the advantage is the return.
    `segment_T` ascends.

    Positions in the response give verl's `optimal_token_baseline`, positions among the chosen tokens
    (`Chosen.position_N`), which skip tool output, its multi-turn form. The former differs from verl with tool
    output: verl takes the second largest number of tokens for the position from which on the longest
    trajectory has no baseline, and before it subtracts a lone return from itself.
    Source: verl, `compute_optimal_token_baseline_advantage`.
    """
    check_positive(epsilon=epsilon)
    check_shapes(
        return_T=return_T, logprob_T=logprob_T, square_T=square_T, position_T=position_T, segment_T=segment_T
    )
    check_finite(return_T=return_T, logprob_T=logprob_T, square_T=square_T, weight_T=weight_T)
    check_segments(len(group_B), segment_T=segment_T)
    energy_T = 1 - 2 * logprob_T.exp() + square_T
    if weight_T is not None:
        check_shapes(return_T=return_T, weight_T=weight_T)
        energy_T = energy_T * weight_T.square()
    follows_T = goes_on(torch.bincount(segment_T, minlength=len(group_B)), 1).roll(1)
    total_T = linear_scan(energy_T, follows_T.to(energy_T.dtype), reverse=False, scan=scan)
    group_U, group_B = group_B.unique(return_inverse=True)
    position_U, position_T = position_T.unique(return_inverse=True)
    num_places = len(group_U) * len(position_U)
    place_T = group_B[segment_T] * len(position_U) + position_T
    weighted_T = segment_sum(total_T * return_T, place_T, num_places)[place_T]
    baseline_T = weighted_T / (segment_sum(total_T, place_T, num_places)[place_T] + epsilon)
    return torch.where(torch.bincount(place_T)[place_T] > 1, return_T - baseline_T, return_T)


def _below_best(reward_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """r_i less the best reward of i's group, at most 0.

    Every group advantage depends on differences only; taken this way equal rewards are exactly 0, while
    their mean would leave a rounding residue, amplified by a small std.
    """
    check_shapes(reward_N=reward_N, group_N=group_N)
    check_ids(num_groups, group_N=group_N)
    check_finite(reward_N=reward_N)
    return reward_N - segment_max(reward_N, group_N, num_groups)[group_N]


def group_std(centred_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """Standard deviation with Bessel's correction of each group, [G]; 0 for a group of one or none."""
    count_G = torch.bincount(group_N, minlength=num_groups)
    return (segment_sum(centred_N.square(), group_N, num_groups) / (count_G - 1).clamp(min=1)).sqrt()
