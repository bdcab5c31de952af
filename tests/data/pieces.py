"""Packed batches with the advantages and shares that a test wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from millrace.algorithms.weights import token_mean
from millrace.data.batch import Batch
from millrace.data.packing import TokenWeights, pack
from millrace.types import Trajectory


def weighed(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], token_weights: TokenWeights = token_mean
) -> Batch:
    """Packed trajectories, with the same advantage for every chosen token of one."""
    batch = pack(trajectories)
    advantage_N = torch.tensor(advantages, dtype=torch.float32)
    batch.advantage_T = advantage_N[batch.segment_T] * batch.action_mask_T
    batch.weight_T = token_weights(batch.action_mask_T, batch.segment_T)
    return batch
