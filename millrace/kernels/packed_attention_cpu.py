"""Attention within short segments of a packed row, compiled for the CPU: where they lie, without padding.

T = packed tokens, B = segments, L = tokens of one segment, M = L filled up to whole vectors, H = query heads,
J = key heads, K = head width. With shares p_im, the softmax over m <= i of scale q_i k_m:

    y_i = sum_m p_im v_m
    ds_im = scale p_im (dy_i v_m - dy_i y_i)
    dq_i = sum_m ds_im k_m,  dk_m = sum_i ds_im q_i,  dv_m = sum_i p_im dy_i

One thread computes a segment, head after head, so no bit depends on other segments or on the threads.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels.compiled import array, compiled
from millrace.kernels.paged_attention_cpu import add_product, exponential
from millrace.kernels.team import bounds, cuts, share_out

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# Rows of scores end at a multiple of this, since products of odd lengths are made number by number.
LANES = 16
# Numbers of queries that pay for the thread they are computed on.
PART_NUMBERS = 1 << 14


def short_attention(
    query_THK: Tensor,
    key_TJK: Tensor,
    value_TJK: Tensor,
    segments: tuple[Tensor, Tensor],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """As `packed_attention` for some segments of a row, [T, H, K]; 0 at the tokens of others.

    Differentiable in queries, keys and values, once. In bfloat16 nothing but the results is rounded.

    Args:
        query_THK: queries, of one of DTYPES, on the CPU.
        key_TJK: keys of that dtype; J divides H.
        value_TJK: values, likewise.
        segments: first token and length of each segment, int64 [B] each.
        scale: factor of the scores.
        window: as in `packed_attention`.
    """
    out_THK: Tensor = _Short.apply(query_THK, key_TJK, value_TJK, segments, scale, window)
    return out_THK


class _Short(torch.autograd.Function):
    """The equations at the top of the file; the backward makes the shares again."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THK: Tensor,
        key_TJK: Tensor,
        value_TJK: Tensor,
        segments: tuple[Tensor, Tensor],
        scale: float,
        window: int | None,
    ) -> Tensor:
        given = _arrays(query_THK, key_TJK, value_TJK)
        out_THK = np.zeros_like(given[0])
        log_total_TH = np.zeros_like(out_THK, shape=query_THK.shape[:-1])
        where = tuple(x.numpy() for x in segments)
        ctx.options = where, out_THK.dtype.type(scale), sys.maxsize if window is None else window
        _forward_all(given, (out_THK, log_total_TH), ctx.options, *_cuts(query_THK))
        kept = torch.from_numpy(out_THK), torch.from_numpy(log_total_TH)
        ctx.save_for_backward(query_THK, key_TJK, value_TJK, *kept)
        return kept[0].to(query_THK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_slope_THK: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out_THK, log_total_TH = ctx.saved_tensors
        given = _arrays(*inputs)
        told = *_arrays(out_slope_THK), out_THK.numpy(), log_total_TH.numpy()
        slopes = tuple(np.zeros_like(x) for x in given)
        _backward_all(given, told, slopes, ctx.options, *_cuts(out_slope_THK))
        return *(torch.from_numpy(slope).to(out_slope_THK.dtype) for slope in slopes), None, None, None


def _arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """Their memory, that of bfloat16 as float32."""
    return tuple(array(x.float() if x.dtype is torch.bfloat16 else x) for x in tensors)


def _cuts(query_THK: Tensor) -> tuple[int, int]:
    return cuts(query_THK.numel() // PART_NUMBERS)


@compiled("contract")
def _turned(x_LK: Any, y_KL: Any) -> None:
    for i in range(x_LK.shape[0]):
        for k in range(x_LK.shape[1]):
            y_KL[k, i] = x_LK[i, k]


@compiled("contract", "reassoc")
def _softmax(score_LM: Any, log_total_L: Any, scale: Any, reach: int) -> None:
    """Scores become shares, in place; and the logarithm of what each token's shares were divided by."""
    for i in range(len(score_LM)):
        first, highest, total = max(0, i + 1 - reach), scale * score_LM[i, i], scale * 0
        for m in range(first, i):
            highest = max(highest, scale * score_LM[i, m])
        for m in range(first, i + 1):
            score_LM[i, m] = exponential(np.float64(scale * score_LM[i, m] - highest))
            total += score_LM[i, m]
        for m in range(first, i + 1):
            score_LM[i, m] /= total
        score_LM[i, :first], score_LM[i, i + 1 :] = 0, 0
        log_total_L[i] = highest + np.log(total)


@compiled("contract")
def _forward(given: Any, found: Any, options: Any, num_parts: int, part: int) -> None:
    (query_THK, key_TJK, value_TJK), (out_THK, log_total_TH) = given, found
    (start_B, length_B), scale, reach = options
    num_heads, width = query_THK.shape[1:]
    group, dtype = num_heads // key_TJK.shape[1], query_THK.dtype
    for b in range(*bounds(len(start_B), num_parts, part)):
        length = length_B[b]
        here, padded = slice(start_B[b], start_B[b] + length), -(-length // LANES) * LANES
        key_KM, value_LK = np.zeros((width, padded), dtype), np.empty((length, width), dtype)
        share_LM = np.empty((length, padded), dtype)
        for h in range(num_heads):
            if h % group == 0:
                _turned(key_TJK[here, h // group], key_KM)
                value_LK[:] = value_TJK[here, h // group]
            share_LM[:] = 0
            add_product(query_THK[here, h], key_KM, share_LM)
            _softmax(share_LM, log_total_TH[here, h], scale, reach)
            add_product(share_LM[:, :length], value_LK, out_THK[here, h])


@compiled("contract", "reassoc")
def _slopes(rows: Any, score_LM: Any, slope_LM: Any, scale: Any, reach: int) -> None:
    """Scores become shares, and slopes of shares become those of scores, both in place."""
    out_slope_LK, out_LK, log_total_L = rows
    for i in range(len(score_LM)):
        first, mean = max(0, i + 1 - reach), scale * 0
        for k in range(out_LK.shape[1]):
            mean += out_slope_LK[i, k] * out_LK[i, k]
        for m in range(first, i + 1):
            score_LM[i, m] = exponential(np.float64(scale * score_LM[i, m] - log_total_L[i]))
            slope_LM[i, m] = scale * score_LM[i, m] * (slope_LM[i, m] - mean)
        score_LM[i, :first], score_LM[i, i + 1 :] = 0, 0
        slope_LM[i, :first], slope_LM[i, i + 1 :] = 0, 0


@compiled("contract")
def _backward(given: Any, told: Any, slopes: Any, options: Any, num_parts: int, part: int) -> None:
    (query_THK, key_TJK, value_TJK), (out_slope_THK, out_THK, log_total_TH) = given, told
    (query_slope_THK, key_slope_TJK, value_slope_TJK), ((start_B, length_B), scale, reach) = slopes, options
    num_heads, width = query_THK.shape[1:]
    group, dtype = num_heads // key_TJK.shape[1], query_THK.dtype
    for b in range(*bounds(len(start_B), num_parts, part)):
        length = length_B[b]
        here, padded = slice(start_B[b], start_B[b] + length), -(-length // LANES) * LANES
        tall, wide, square = (length, width), (width, padded), (length, length)
        query_LK, slope_LK, key_LK = np.empty(tall, dtype), np.empty(tall, dtype), np.empty(tall, dtype)
        key_KM, value_KM = np.zeros(wide, dtype), np.zeros(wide, dtype)
        share_LM, score_slope_LM = np.empty((length, padded), dtype), np.empty((length, padded), dtype)
        share_LL, score_slope_LL = np.empty(square, dtype), np.empty(square, dtype)
        for h in range(num_heads):
            j = h // group
            if h % group == 0:
                key_LK[:] = key_TJK[here, j]
                _turned(key_LK, key_KM)
                _turned(value_TJK[here, j], value_KM)
            query_LK[:], slope_LK[:] = query_THK[here, h], out_slope_THK[here, h]
            share_LM[:], score_slope_LM[:] = 0, 0
            add_product(query_LK, key_KM, share_LM)
            add_product(slope_LK, value_KM, score_slope_LM)
            rows = slope_LK, out_THK[here, h], log_total_TH[here, h]
            _slopes(rows, share_LM, score_slope_LM, scale, reach)
            add_product(score_slope_LM[:, :length], key_LK, query_slope_THK[here, h])
            _turned(score_slope_LM[:, :length], score_slope_LL)
            add_product(score_slope_LL, query_LK, key_slope_TJK[here, j])
            _turned(share_LM[:, :length], share_LL)
            add_product(share_LL, slope_LK, value_slope_TJK[here, j])


@compiled()
def _forward_all(given: Any, found: Any, options: Any, num_parts: int, num_members: int) -> None:
    share_out(_forward, (given, found, options, num_parts), num_parts, num_members)


@compiled()
def _backward_all(given: Any, told: Any, slopes: Any, options: Any, num_parts: int, num_members: int) -> None:
    share_out(_backward, (given, told, slopes, options, num_parts), num_parts, num_members)
