"""The output head and the support: how a hidden state becomes the distribution of a token.

N = tokens, D = model width, V = vocabulary, or one rank's shard of it, M = tokens of all supports.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from millrace.kernels.linear import invariant_linear, linear
from millrace.kernels.product_cpu import PackedWeight


@dataclass(frozen=True, slots=True)
class Head:
    """The output head, from hidden states to logits: softcap * tanh(scale (W h + b) / softcap).

    With a group it is a shard: each rank of the group holds a contiguous range of at least one row of the
    weight and of the bias, from token id `first_row` on; the ranges partition the vocabulary. Models with a
    scale: Cohere, Granite; with a softcap (above 0; None for no bound): Gemma 2. `tile` has the rows of one
    product for batch-invariant results, None otherwise; `packed` is the weight from `kernels.linear.pack`.

    Raises:
        ValueError: the softcap is not above 0, the bias does not have one number for each row of the weight,
            a shard has no row or has a tile, or there is a first row without a group.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    tile: int | None = None
    packed: PackedWeight | None = None
    group: ProcessGroup | None = None
    first_row: int = 0

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; it must be above 0, or None for no bound")
        if self.bias_V is not None and self.bias_V.shape != self.weight_VD.shape[:1]:
            raise ValueError(
                f"bias_V has shape {tuple(self.bias_V.shape)}, the weight {tuple(self.weight_VD.shape)}"
            )
        if self.first_row < 0 or (self.first_row and self.group is None):
            raise ValueError(
                f"first_row is {self.first_row}; it is 0 or more, and 0 without a group: a whole head begins "
                "with token 0"
            )
        if self.group is not None and len(self.weight_VD) == 0:
            raise ValueError("weight_VD has no row; give each rank of the group at least one")
        if self.group is not None and self.tile is not None:
            raise ValueError(f"tile is {self.tile} for a shard; a row's own bits are for whole heads only")

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Compute logits in float32 (float64 stays float64), [N, V]; a shard gives those of its own rows."""
        if self.tile is not None:
            logit_NV = invariant_linear(hidden_ND, self.weight_VD, self.bias_V, tile=self.tile)
        else:
            logit_NV = linear(hidden_ND, self.weight_VD, self.bias_V, packed=self.packed)
        logit_NV = logit_NV if logit_NV.dtype == torch.float64 else logit_NV.float()
        if self.scale != 1.0:
            logit_NV = logit_NV * self.scale
        if self.softcap is not None:
            logit_NV = self.softcap * torch.tanh(logit_NV / self.softcap)
        return logit_NV


@dataclass(frozen=True, slots=True, eq=False)
class Supports:
    """The token ids that each of N tokens was sampled from; indexed like a column [N].

    `token_M` concatenates the supports; `count_N` (int64) is the size of each, 0 for the whole vocabulary.
    """

    token_M: Tensor
    count_N: Tensor

    @property
    def row_M(self) -> Tensor:
        """Index in [0, N) of the support that each entry of `token_M` belongs to."""
        row_N = torch.arange(len(self.count_N), device=self.count_N.device)
        return row_N.repeat_interleave(self.count_N)

    def __getitem__(self, index: Tensor | slice) -> Supports:
        start_N = self.count_N.cumsum(0) - self.count_N
        count_N = self.count_N[index]
        return Supports(self.token_M[runs(start_N[index], count_N)], count_N)

    def to(self, device: torch.device | str) -> Supports:
        """Copy the supports to another device."""
        return Supports(self.token_M.to(device), self.count_N.to(device))


def runs(start_N: Tensor, count_N: Tensor) -> Tensor:
    """Concatenate the index ranges start, start + 1, ..., start + count - 1 of each of N runs, int64 [M]."""
    # In the result, run n begins at the sum of the counts before it; every index of a run has the same shift.
    shift_M = (start_N - count_N.cumsum(0) + count_N).repeat_interleave(count_N)
    return shift_M + torch.arange(len(shift_M), device=shift_M.device)
