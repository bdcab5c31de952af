"""Gather and scatter of the chosen tokens of a packed row; segment sums; whitening.

T = packed tokens, N = chosen tokens, B = segments. Sums and checks also apply to groups of trajectories: a
group is a segment with members that need not be contiguous. Tensors of different shapes raise ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.algorithms.checks import check_positive, check_segments, check_shapes


@dataclass(frozen=True, eq=False)
class Chosen:
    """The positions of the chosen tokens (actions) in a packed row of `num_tokens` = T.

    Tokens written by the environment between two turns are not actions: advantages are computed on the
    compact row [N], in which the turns are adjacent, and scattered back. `index_N` ascends, unless episodes
    have branches (`data.batch.Batch.chosen`); a segment may have length 0.
    """

    index_N: Tensor
    length_B: Tensor
    num_tokens: int

    @property
    def segment_N(self) -> Tensor:
        """The segment of each chosen token."""
        segment_B = torch.arange(len(self.length_B), device=self.length_B.device)
        return segment_B.repeat_interleave(self.length_B, output_size=len(self.index_N))

    @property
    def position_N(self) -> Tensor:
        """Index of each chosen token among those of its segment, from 0."""
        before_B = self.length_B.cumsum(0) - self.length_B
        return torch.arange(len(self.index_N), device=self.index_N.device) - before_B[self.segment_N]

    def take(self, x_T: Tensor) -> Tensor:
        """Gather the numbers of the chosen tokens, [N]; ValueError if the row has another length."""
        if x_T.shape != (self.num_tokens,):
            raise ValueError(f"x_T has shape {list(x_T.shape)}; the row has {self.num_tokens} tokens")
        return x_T[self.index_N]

    def put(self, x_N: Tensor) -> Tensor:
        """Scatter numbers of the chosen tokens to the row, [T], 0 elsewhere; ValueError if they are not N."""
        if x_N.shape != self.index_N.shape:
            raise ValueError(f"x_N has shape {list(x_N.shape)}; {len(self.index_N)} tokens were chosen")
        return x_N.new_zeros(self.num_tokens).index_copy(0, self.index_N, x_N)


def chosen(action_mask_T: Tensor, segment_T: Tensor, num_segments: int) -> Chosen:
    """Find the chosen tokens of a packed row; a segment may hold no token, or none that was chosen.

    Raises ValueError for a segment out of order or out of range.
    """
    check_shapes(action_mask_T=action_mask_T, segment_T=segment_T)
    check_segments(num_segments, segment_T=segment_T)
    index_N = action_mask_T.nonzero()[:, 0]
    length_B = torch.bincount(segment_T[index_N], minlength=num_segments)
    return Chosen(index_N, length_B, len(action_mask_T))


def segment_sum(x_T: Tensor, segment_T: Tensor, num_segments: int) -> Tensor:
    """Sum over each segment, [B]; 0 for an empty one. Segments may be in any order."""
    check_shapes(x_T=x_T, segment_T=segment_T)
    return x_T.new_zeros(num_segments).index_add(0, segment_T, x_T)


def segment_mean(x_T: Tensor, segment_T: Tensor, num_segments: int) -> Tensor:
    """Mean over each segment, [B]; 0 for an empty one. Segments may be in any order."""
    total_B = segment_sum(x_T, segment_T, num_segments)
    return total_B / torch.bincount(segment_T, minlength=num_segments).clamp(min=1)


def segment_max(x_T: Tensor, segment_T: Tensor, num_segments: int) -> Tensor:
    """Largest number of each segment, [B]; 0 for an empty one. Segments may be in any order."""
    check_shapes(x_T=x_T, segment_T=segment_T)
    return x_T.new_zeros(num_segments).scatter_reduce(0, segment_T, x_T, "amax", include_self=False)


def goes_on(length_B: Tensor, num_steps: int) -> Tensor:
    """Whether the token `num_steps` later belongs to the same segment, bool [T]."""
    end_T = length_B.cumsum(0).repeat_interleave(length_B)
    return torch.arange(len(end_T), device=length_B.device) + num_steps < end_T


def whiten(x_T: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon), with the unbiased variance, over all numbers given; epsilon > 0.

    One number or none has no variance and becomes 0. Equal numbers become 0 up to the rounding of their mean,
    which is taken in float64: in float32 a residue of 1e-8 would be multiplied by 1e4.
    """
    check_positive(epsilon=epsilon)
    if x_T.numel() < 2:
        return torch.zeros_like(x_T)
    wide_T = x_T.double()
    variance, mean = torch.var_mean(wide_T)
    return ((wide_T - mean) * (variance + epsilon).rsqrt()).to(x_T.dtype)
