"""Token weights: loss aggregation over the tokens of one optimizer step.

The loss is `(loss_T * weight_T).sum()` whatever the micro-batches, so these are computed once, over the whole
optimizer step, in `dtype`: float64 where the policy's weights are. T = packed tokens, B = segments with at
least one chosen token, N = chosen tokens. Every function raises ValueError if no token was chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.algorithms.checks import check_shapes, require


def token_weights(
    action_mask_T: Tensor, segment_T: Tensor, *, kind: str, dtype: torch.dtype, length: int = 0
) -> Tensor:
    """Compute the token weights that a recipe names; `length` is the constant of `fixed_length`."""
    match kind:
        case "token_mean":
            return token_mean(action_mask_T, segment_T, dtype=dtype)
        case "token_sum":
            return token_sum(action_mask_T, segment_T, dtype=dtype)
        case "sequence_mean":
            return sequence_mean(action_mask_T, segment_T, dtype=dtype)
        case "sequence_sum":
            return sequence_sum(action_mask_T, segment_T, dtype=dtype)
        case "fixed_length":
            return fixed_length(action_mask_T, segment_T, length=length, dtype=dtype)
    raise ValueError(f"there is no loss aggregation {kind!r}")


def token_mean(action_mask_T: Tensor, segment_T: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every chosen token weighs the same: 1 / number of chosen tokens. Long responses weigh more."""
    return action_mask_T.to(dtype) / len(_segments(action_mask_T, segment_T))


def token_sum(action_mask_T: Tensor, segment_T: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every chosen token weighs 1: the gradient grows with the batch."""
    _segments(action_mask_T, segment_T)
    return action_mask_T.to(dtype)


def sequence_mean(action_mask_T: Tensor, segment_T: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every segment has the same weight, split over its tokens: 1 / (B n_b). GRPO's original form."""
    segment_N = _segments(action_mask_T, segment_T)
    count_N = torch.bincount(segment_N)[segment_N]
    weight_N = 1 / (count_N * len(segment_N.unique())).to(dtype)
    return weight_N.new_zeros(len(segment_T)).masked_scatter(action_mask_T, weight_N)


def sequence_sum(action_mask_T: Tensor, segment_T: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tokens of a segment add up, segments are averaged: 1 / B."""
    return action_mask_T.to(dtype) / len(_segments(action_mask_T, segment_T).unique())


def fixed_length(
    action_mask_T: Tensor, segment_T: Tensor, *, length: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Tokens of a segment add up and are divided by one constant: 1 / (B length). Dr. GRPO."""
    require(length > 0, "length", length, "above 0")
    return sequence_sum(action_mask_T, segment_T, dtype=dtype) / length


def _segments(action_mask_T: Tensor, segment_T: Tensor) -> Tensor:
    check_shapes(action_mask_T=action_mask_T, segment_T=segment_T)
    segment_N = segment_T[action_mask_T]
    if len(segment_N) == 0:
        raise ValueError("no token in the batch was chosen by the policy, so there is nothing to weigh")
    return segment_N
