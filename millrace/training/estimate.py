"""From scored groups to advantages, one per trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace.algorithms.advantages import group_centred, group_normalised
from millrace.types import Group, Trajectory


def usable(groups: Sequence[Group]) -> tuple[list[Trajectory], Tensor]:
    """Trajectories whose reward did not fail, in order, and the group of each, [N]."""
    kept = [
        (trajectory, index)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        if trajectory.outcome is not None and trajectory.outcome.kind != "failed"
    ]
    return [trajectory for trajectory, _ in kept], torch.tensor(
        [index for _, index in kept], dtype=torch.long
    )


def group_advantages(trajectories: Sequence[Trajectory], group_N: Tensor, *, divide_by_std: bool) -> Tensor:
    """Group-relative advantages of scored trajectories, [N], in float64 so that 0.1 is 0.1 in every group."""
    reward_N = torch.tensor(
        [t.outcome.value for t in trajectories if t.outcome is not None], dtype=torch.float64
    )
    estimator = group_normalised if divide_by_std else group_centred
    return estimator(reward_N, group_N, int(group_N.max()) + 1 if len(group_N) else 0)
