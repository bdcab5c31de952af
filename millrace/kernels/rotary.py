"""Rotary positions in one pass over queries and keys on the CPU.

T = packed tokens, H = query heads, J = key heads, N = either, K = head width. With the halves x1, x2 of
a head, and c and s at its position:

    y1 = x1 c1 - x2 s1,  y2 = x2 c2 + x1 s2

Every product and sum is rounded as in transformers' sequence of operations, so the bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels.compiled import array, compiled, narrow, readable, wide

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def rotate(query_HTK: Tensor, key_JTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions; results are [T, N, K] in memory.

    Differentiable in queries and keys, once. Compiled on the CPU for one dtype and an even width; otherwise
    `rotate_plain` runs. Cosines and sines of the second half of a head follow those of the first.

    Source: Su et al. 2021, "RoFormer: Enhanced transformer with rotary position embedding".
    """
    tensors = query_HTK, key_JTK, cos_TK, sin_TK
    shape = query_HTK.shape[1:]
    alike = shape == key_JTK.shape[1:] == cos_TK.shape == sin_TK.shape and shape[1] % 2 == 0
    if not alike or query_HTK.dtype not in DTYPES or not readable(*tensors):
        return rotate_plain(query_HTK, cos_TK, sin_TK), rotate_plain(key_JTK, cos_TK, sin_TK)
    given = query_HTK.transpose(0, 1), key_JTK.transpose(0, 1), cos_TK, sin_TK
    recorded = torch.is_grad_enabled() and (query_HTK.requires_grad or key_JTK.requires_grad)
    query_THK, key_TJK = _Rotate.apply(*given) if recorded else _turned(*given)
    return query_THK.transpose(0, 1), key_TJK.transpose(0, 1)


def rotate_plain(x_NTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Reference for `rotate`, for queries or keys: transformers' sequence of operations."""
    half = x_NTK.shape[-1] // 2
    return x_NTK * cos_TK + torch.cat([-x_NTK[..., half:], x_NTK[..., :half]], -1) * sin_TK


def _turned(query_THK: Tensor, key_TJK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> tuple[Tensor, Tensor]:
    kernel = _rotate_bfloat16 if cos_TK.dtype is torch.bfloat16 else _rotate
    cos, sin = array(cos_TK), array(sin_TK)
    turned = torch.empty(query_THK.shape, dtype=cos_TK.dtype), torch.empty(key_TJK.shape, dtype=cos_TK.dtype)
    for x_TNK, y_TNK in zip((query_THK, key_TJK), turned, strict=True):
        kernel(array(x_TNK), cos, sin, array(y_TNK))
    return turned


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is a rotation: dx1 = dy1 c1 + dy2 s2, dx2 = dy2 c2 - dy1 s1."""

    @staticmethod
    def forward(
        ctx: Any, query_THK: Tensor, key_TJK: Tensor, cos_TK: Tensor, sin_TK: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_TK, sin_TK)
        return _turned(query_THK, key_TJK, cos_TK, sin_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query_slope_THK: Tensor, key_slope_TJK: Tensor) -> tuple[Tensor | None, ...]:
        cos_TK, sin_TK = ctx.saved_tensors
        back_TK = -sin_TK.roll(sin_TK.shape[1] // 2, 1)
        return *_turned(query_slope_THK, key_slope_TJK, cos_TK, back_TK), None, None


# No contraction to fused multiply-add: a product that is not rounded before the sum would differ from
# transformers' in the last bit.
@compiled()
def _rotate(x_TNK: Any, cos_TK: Any, sin_TK: Any, y_TNK: Any) -> None:
    half = cos_TK.shape[1] // 2
    for t in range(len(x_TNK)):
        for n in range(x_TNK.shape[1]):
            for k in range(half):
                first, second = x_TNK[t, n, k], x_TNK[t, n, half + k]
                y_TNK[t, n, k] = first * cos_TK[t, k] - second * sin_TK[t, k]
                y_TNK[t, n, half + k] = second * cos_TK[t, half + k] + first * sin_TK[t, half + k]


@compiled()
def _rotate_bfloat16(x_TNK: Any, cos_TK: Any, sin_TK: Any, y_TNK: Any) -> None:
    half = cos_TK.shape[1] // 2
    for t in range(len(x_TNK)):
        for n in range(x_TNK.shape[1]):
            for k in range(half):
                first, second = wide(x_TNK[t, n, k]), wide(x_TNK[t, n, half + k])
                y_TNK[t, n, k] = narrow(_product(first, cos_TK[t, k]) - _product(second, sin_TK[t, k]))
                y_TNK[t, n, half + k] = narrow(
                    _product(second, cos_TK[t, half + k]) + _product(first, sin_TK[t, half + k])
                )


@compiled()
def _product(x: Any, factor: Any) -> Any:
    return wide(narrow(x * wide(factor)))
