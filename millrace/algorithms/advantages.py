"""What is better than expected, from one scalar reward per trajectory.

N = trajectories, G = groups (one prompt each).
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_centred(reward_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """A_i = r_i - mean of the rewards in i's group.

    Args:
        reward_N: one scalar per trajectory.
        group_N: the group of each trajectory, integers in [0, num_groups).
        num_groups: G.

    Returns:
        advantages [N]; 0 for a group of one.

    Source: Liu et al. 2025, "Understanding R1-Zero-like training" (Dr. GRPO).
    """
    count_G = torch.bincount(group_N, minlength=num_groups).clamp(min=1)
    total_G = reward_N.new_zeros(num_groups).index_add(0, group_N, reward_N)
    return reward_N - (total_G / count_G)[group_N]


def group_normalised(reward_N: Tensor, group_N: Tensor, num_groups: int, *, epsilon: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean_g) / (std_g + epsilon), std with Bessel's correction, over i's group g.

    A group of one, or one whose rewards are all equal, has advantage 0. (verl gives a group of one its raw
    reward; a lone sample says nothing about what was expected, so here it teaches nothing.)

    Args:
        reward_N: one scalar per trajectory.
        group_N: the group of each trajectory, integers in [0, num_groups).
        num_groups: G.
        epsilon: keeps the quotient finite; verl's value.

    Source: Shao et al. 2024, "DeepSeekMath" (GRPO).
    """
    centred_N = group_centred(reward_N, group_N, num_groups)
    count_G = torch.bincount(group_N, minlength=num_groups)
    square_G = reward_N.new_zeros(num_groups).index_add(0, group_N, centred_N.square())
    std_G = (square_G / (count_G - 1).clamp(min=1)).sqrt()
    # Equal rewards leave a rounding residue in the mean; without this it would be divided by epsilon and
    # trained on.
    level_G = reward_N.new_zeros(num_groups).scatter_reduce(0, group_N, reward_N.abs(), "amax")
    equal_G = std_G <= 1e-6 * level_G
    return torch.where(equal_G[group_N], torch.zeros_like(centred_N), centred_N / (std_G + epsilon)[group_N])
