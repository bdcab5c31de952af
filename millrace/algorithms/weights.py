"""Token shares: how the tokens of one optimizer step divide its loss.

The loss is `(loss_T * weight_T).sum()` whatever the micro-batches, so these are computed once, over the whole
optimizer step. T = packed tokens, B = segments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(action_mask_T: Tensor, segment_T: Tensor) -> Tensor:
    """Every chosen token weighs the same: 1 / number of chosen tokens. Long answers weigh more.

    Raises:
        ValueError: no token was chosen.
    """
    return action_mask_T.float() / _at_least_one(action_mask_T)


def sequence_mean(action_mask_T: Tensor, segment_T: Tensor) -> Tensor:
    """Every segment weighs the same, its tokens share it: 1 / (B n_b). GRPO's original form.

    Raises:
        ValueError: no token was chosen.
    """
    _at_least_one(action_mask_T)
    count_B = _actions_per_segment(action_mask_T, segment_T)
    return action_mask_T.float() / (count_B.clamp(min=1)[segment_T] * (count_B > 0).sum())


def sequence_sum(action_mask_T: Tensor, segment_T: Tensor) -> Tensor:
    """Tokens of a segment add up, segments are averaged: 1 / B.

    Raises:
        ValueError: no token was chosen.
    """
    _at_least_one(action_mask_T)
    return action_mask_T.float() / (_actions_per_segment(action_mask_T, segment_T) > 0).sum()


def fixed_length(action_mask_T: Tensor, segment_T: Tensor, *, length: int) -> Tensor:
    """Tokens of a segment add up and are divided by one constant: 1 / (B length). Dr. GRPO.

    Raises:
        ValueError: no token was chosen.
    """
    return sequence_sum(action_mask_T, segment_T) / length


def _actions_per_segment(action_mask_T: Tensor, segment_T: Tensor) -> Tensor:
    return torch.zeros(int(segment_T.max()) + 1, device=segment_T.device).index_add(
        0, segment_T, action_mask_T.float()
    )


def _at_least_one(action_mask_T: Tensor) -> Tensor:
    count = action_mask_T.sum()
    if count == 0:
        raise ValueError("no token in the batch was chosen by the policy, so there is nothing to weigh")
    return count
