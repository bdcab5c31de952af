"""Grouped matrix product: rows sorted by expert, each times its own expert's weight.

N = rows, E = experts, D = input width, M = output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels.linear import linear


def grouped_linear(x_ND: Tensor, weight_EMD: Tensor, count_E: Sequence[int]) -> Tensor:
    """Compute y_n = x_n W_e^T, [N, M], where e is the expert of row n; differentiable once in both.

    Rows are sorted by expert. An expert without rows has a gradient of 0. In bfloat16 on CUDA this is one
    grouped product of torch; elsewhere one product for each expert, over contiguous rows. Shapes, dtypes or
    counts that do not fit are a ValueError.
    """
    if x_ND.ndim != 2 or weight_EMD.ndim != 3 or x_ND.shape[1] != weight_EMD.shape[2]:
        raise ValueError(
            f"x_ND has shape {tuple(x_ND.shape)} and weight_EMD {tuple(weight_EMD.shape)}; "
            f"they must be [N, D] and [E, M, D]"
        )
    if x_ND.dtype != weight_EMD.dtype:
        raise ValueError(
            f"x_ND is {x_ND.dtype} and weight_EMD {weight_EMD.dtype}; the dtype must be the same"
        )
    if len(count_E) != len(weight_EMD) or sum(count_E) != len(x_ND) or any(count < 0 for count in count_E):
        raise ValueError(
            f"count_E is {list(count_E)}; it must have for each of {len(weight_EMD)} experts how many of "
            f"{len(x_ND)} rows it has"
        )
    product: Tensor = _Grouped.apply(x_ND, weight_EMD, tuple(count_E))
    return product


class _Grouped(torch.autograd.Function):
    """dx = dy W_e, dW_e = dy^T x over the rows of e."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_EMD: Tensor, count_E: tuple[int, ...]) -> Tensor:
        x_ND = x_ND.contiguous()
        ctx.save_for_backward(x_ND, weight_EMD)
        ctx.count_E = count_E
        return _rows(x_ND, weight_EMD, count_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_EMD = ctx.saved_tensors
        slope_NM = slope_NM.contiguous()
        x_slope, weight_slope, _ = ctx.needs_input_grad
        return (
            _rows(slope_NM, weight_EMD.transpose(1, 2), ctx.count_E) if x_slope else None,
            _weights(slope_NM, x_ND, ctx.count_E) if weight_slope else None,
            None,
        )


def _rows(x_ND: Tensor, weight_EMD: Tensor, count_E: tuple[int, ...]) -> Tensor:
    if _native(x_ND.device.type, x_ND.dtype, *weight_EMD.shape[1:]):
        return F.grouped_mm(x_ND, weight_EMD.transpose(1, 2), offs=_ends(x_ND, count_E))
    parts = zip(x_ND.split(count_E), weight_EMD, strict=True)
    none = x_ND.new_empty(0, weight_EMD.shape[1])
    return torch.cat([none, *(linear(part, weight) for part, weight in parts if len(part))])


def _weights(y_NM: Tensor, x_ND: Tensor, count_E: tuple[int, ...]) -> Tensor:
    """For each expert, y^T x over its rows, [E, M, D]."""
    if _native(x_ND.device.type, x_ND.dtype, y_NM.shape[1], x_ND.shape[1]):
        return F.grouped_mm(y_NM.T, x_ND, offs=_ends(x_ND, count_E))
    out_EMD = x_ND.new_empty(len(count_E), y_NM.shape[1], x_ND.shape[1])
    for y, x, out in zip(y_NM.split(count_E), x_ND.split(count_E), out_EMD, strict=True):
        torch.mm(y.T, x, out=out)
    return out_EMD


def _native(device: str, dtype: torch.dtype, *widths: int) -> bool:
    """Return whether torch has a grouped product; its rows must begin at multiples of 16 bytes."""
    return device == "cuda" and dtype is torch.bfloat16 and not any(width % 8 for width in widths)


def _ends(x_ND: Tensor, count_E: tuple[int, ...]) -> Tensor:
    return torch.tensor(count_E, device=x_ND.device).cumsum(0, dtype=torch.int32)
