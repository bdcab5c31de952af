"""Attention within short segments of a packed row, compiled for the CPU: in place, without padding.

T = packed tokens, B = segments, L = tokens of the longest, M = tokens of one segment, R = queries of one
segment at one key head, H = query heads, J = key heads, K = head width. With scores s_mr = k_m q_r and
attention weights p_mr, the softmax of scale s_mr over the tokens m up to that of r:

    y_r = sum_m p_mr v_m
    ds_mr = scale p_mr (dy_r v_m - dy_r y_r)
    dq_r = sum_m ds_mr k_m,  dk_m = sum_r ds_mr q_r,  dv_m = sum_r p_mr dy_r

Scores of one key token are contiguous and padded to whole vectors, so that the softmax is vectorized over
queries. One thread computes a segment, key head after key head. Gradients of a token shared by several
segments are added in the order of the segments. So no bit depends on the threads; only the gradients of
shared tokens depend on other segments.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from millrace.kernels.compiled import array, compiled, exponential, put_all
from millrace.kernels.paged_attention_cpu import add_product
from millrace.kernels.team import bounds, cuts, share_out

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# Queries are padded to a multiple of this; the compiler vectorizes loops of constant length.
LANES = 16
# Least numbers of queries per thread.
PART_NUMBERS = 1 << 14


def short_attention(
    query_THK: Tensor,
    key_TJK: Tensor,
    value_TJK: Tensor,
    segments: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute `packed_attention` for some segments of a row, [T, H, K]; 0 at tokens that are not queries.

    Differentiable in queries, keys and values, once; all are on the CPU and of one of DTYPES. In bfloat16
    only the results are rounded. `segments` are the packed index of each token of each segment, int64 [B, L],
    arbitrary after its end; the number of its tokens [B]; and the number of leading tokens that are keys but
    not queries [B].
    """
    out_THK: Tensor = _Short.apply(query_THK, key_TJK, value_TJK, segments, scale, window)
    return out_THK


class _Short(torch.autograd.Function):
    """The equations at the top of the file; the backward recomputes the attention weights."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THK: Tensor,
        key_TJK: Tensor,
        value_TJK: Tensor,
        segments: tuple[Tensor, Tensor, Tensor],
        scale: float,
        window: int | None,
    ) -> Tensor:
        given = _arrays(query_THK, key_TJK, value_TJK)
        out_THK = np.zeros_like(given[0])
        top_TH, share_TH = (np.zeros_like(out_THK, shape=query_THK.shape[:-1]) for _ in range(2))
        where = tuple(x.contiguous().numpy() for x in segments)
        ctx.options = where, out_THK.dtype.type(scale), sys.maxsize if window is None else window
        found = out_THK, top_TH, share_TH
        _forward_all(given, found, ctx.options, *_cuts(query_THK))
        kept = [torch.from_numpy(x) for x in found]
        ctx.save_for_backward(query_THK, key_TJK, value_TJK, *kept)
        return kept[0].to(query_THK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_slope_THK: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out_THK, top_TH, share_TH = ctx.saved_tensors
        given = _arrays(*inputs)
        told = *_arrays(out_slope_THK), *(x.numpy() for x in (out_THK, top_TH, share_TH))
        slopes = tuple(np.zeros_like(x) for x in given)
        _backward_all(given, told, slopes, ctx.options, *_cuts(out_slope_THK))
        return *(torch.from_numpy(slope).to(out_slope_THK.dtype) for slope in slopes), None, None, None


def _arrays(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(array(x.float() if x.dtype is torch.bfloat16 else x) for x in tensors)


def _cuts(query_THK: Tensor) -> tuple[int, int]:
    return cuts(query_THK.numel() // PART_NUMBERS)


@compiled("contract")
def _added(x_K: Any, y_K: Any) -> None:
    for k in range(len(y_K)):
        y_K[k] += x_K[k]


@compiled("contract")
def _transposed(x_MN: Any, y_NM: Any) -> None:
    for m in range(x_MN.shape[0]):
        for n in range(x_MN.shape[1]):
            y_NM[n, m] = x_MN[m, n]


@compiled("contract")
def _taken(x_TJK: Any, slot_M: Any, j: int, x_MK: Any) -> None:
    for m in range(len(slot_M)):
        put_all(x_MK[m], x_TJK[slot_M[m], j])


@compiled("contract")
def _asked(x_THK: Any, slot_Q: Any, j: int, x_RK: Any) -> None:
    """Copy rows at the query heads of one key head; heads of a token are consecutive."""
    group = len(x_RK) // len(slot_Q)
    for q in range(len(slot_Q)):
        for g in range(group):
            put_all(x_RK[q * group + g], x_THK[slot_Q[q], j * group + g])


@compiled("contract")
def _hide(score_MR: Any, num_unasked: int, group: int, reach: int) -> None:
    """Mask tokens after each query's own, and tokens `reach` or more positions before it."""
    reach = min(reach, len(score_MR))
    for m in range(len(score_MR)):
        for r in range(min((m - num_unasked) * group, score_MR.shape[1])):
            score_MR[m, r] = -np.inf
        for r in range(max(0, (m - num_unasked + reach) * group), score_MR.shape[1]):
            score_MR[m, r] = -np.inf


@compiled("contract")
def _softmax(score_MVL: Any, scale: Any, top_VL: Any, share_VL: Any) -> None:
    """Softmax of scores in place; keep each query's highest score and the weight of such a score."""
    for v in range(len(top_VL)):
        top_L, share_L = top_VL[v], share_VL[v]
        top_L[:], share_L[:] = -np.inf, 0
        for m in range(len(score_MVL)):
            for lane in range(LANES):
                score = scale * score_MVL[m, v, lane]
                top_L[lane] = score if score > top_L[lane] else top_L[lane]
        for m in range(len(score_MVL)):
            for lane in range(LANES):
                score = scale * score_MVL[m, v, lane] - top_L[lane]
                score_MVL[m, v, lane] = exponential(np.float64(score))
                share_L[lane] += score_MVL[m, v, lane]
        for lane in range(LANES):
            share_L[lane] = 1 / share_L[lane]
        for m in range(len(score_MVL)):
            for lane in range(LANES):
                score_MVL[m, v, lane] *= share_L[lane]


@compiled("contract")
def _forward(given: Any, found: Any, options: Any, num_parts: int, part: int) -> None:
    (query_THK, key_TJK, value_TJK), (out_THK, top_TH, share_TH) = given, found
    (slot_BL, length_B, first_B), scale, reach = options
    num_keys, width = key_TJK.shape[1:]
    group, dtype = query_THK.shape[1] // num_keys, query_THK.dtype
    for b in range(*bounds(len(length_B), num_parts, part)):
        slot_M, first = slot_BL[b, : length_B[b]], first_B[b]
        slot_Q, num_queries = slot_M[first:], (len(slot_M) - first) * group
        vectors = -(-num_queries // LANES)
        query_RK, out_RK = np.empty((num_queries, width), dtype), np.empty((num_queries, width), dtype)
        key_MK, value_MK = np.empty((len(slot_M), width), dtype), np.empty((len(slot_M), width), dtype)
        query_KR = np.zeros((width, vectors * LANES), dtype)
        share_MVL = np.empty((len(slot_M), vectors, LANES), dtype)
        share_MR = share_MVL.reshape(len(slot_M), -1)
        share_RM = np.empty((num_queries, len(slot_M)), dtype)
        top_VL, share_VL = np.empty((vectors, LANES), dtype), np.empty((vectors, LANES), dtype)
        top_R, share_R = top_VL.reshape(-1), share_VL.reshape(-1)
        for j in range(num_keys):
            _taken(key_TJK, slot_M, j, key_MK)
            _taken(value_TJK, slot_M, j, value_MK)
            _asked(query_THK, slot_Q, j, query_RK)
            _transposed(query_RK, query_KR)
            share_MR[:], out_RK[:] = 0, 0
            add_product(key_MK, query_KR, share_MR)
            _hide(share_MR[:, :num_queries], first, group, reach)
            _softmax(share_MVL, scale, top_VL, share_VL)
            _transposed(share_MR[:, :num_queries], share_RM)
            add_product(share_RM, value_MK, out_RK)
            for r in range(num_queries):
                t, h = slot_Q[r // group], j * group + r % group
                put_all(out_THK[t, h], out_RK[r])
                top_TH[t, h], share_TH[t, h] = top_R[r], share_R[r]


@compiled("contract")
def _slopes(pair: Any, scale: Any, told: Any) -> None:
    """Convert scores to attention weights, and gradients of weights to gradients of scores, in place."""
    (score_MVL, slope_MVL), (top_VL, share_VL, mean_VL) = pair, told
    for m in range(len(score_MVL)):
        for v in range(len(mean_VL)):
            for lane in range(LANES):
                power = exponential(np.float64(scale * score_MVL[m, v, lane] - top_VL[v, lane]))
                score_MVL[m, v, lane] = power
                score_MVL[m, v, lane] *= share_VL[v, lane]
                slope_MVL[m, v, lane] -= mean_VL[v, lane]
                slope_MVL[m, v, lane] *= scale * score_MVL[m, v, lane]


@compiled("contract", "reassoc")
def _mean(slope_K: Any, out_K: Any) -> Any:
    total = slope_K[0] * out_K[0]
    for k in range(1, len(out_K)):
        total += slope_K[k] * out_K[k]
    return total


@compiled("contract")
def _backward(given: Any, told: Any, slopes: Any, options: Any, num_parts: int, part: int) -> None:
    (query_THK, key_TJK, value_TJK), (out_slope_THK, out_THK, top_TH, share_TH) = given, told
    (query_slope_THK, key_slope_BLJK, value_slope_BLJK), (where, scale, reach) = slopes, options
    (slot_BL, length_B, first_B), (num_keys, width) = where, key_TJK.shape[1:]
    group, dtype = query_THK.shape[1] // num_keys, query_THK.dtype
    for b in range(*bounds(len(length_B), num_parts, part)):
        slot_M, first = slot_BL[b, : length_B[b]], first_B[b]
        slot_Q, num_queries = slot_M[first:], (len(slot_M) - first) * group
        lanes = len(slot_M), -(-num_queries // LANES), LANES
        asked, seen, filled = (num_queries, width), (len(slot_M), width), (width, lanes[1] * LANES)
        query_RK, slope_RK = np.empty(asked, dtype), np.empty(asked, dtype)
        key_MK, value_MK = np.empty(seen, dtype), np.empty(seen, dtype)
        query_slope_RK, key_slope_MK = np.empty(asked, dtype), np.empty(seen, dtype)
        value_slope_MK = np.empty(seen, dtype)
        query_KR, slope_KR = np.zeros(filled, dtype), np.zeros(filled, dtype)
        share_MVL, score_slope_MVL = np.empty(lanes, dtype), np.empty(lanes, dtype)
        share_MR = share_MVL.reshape(len(slot_M), -1)
        score_slope_MR = score_slope_MVL.reshape(len(slot_M), -1)
        score_slope_RM = np.empty((num_queries, len(slot_M)), dtype)
        told_3VL = np.zeros((3, *lanes[1:]), dtype)
        told_3R = told_3VL.reshape(3, -1)
        for j in range(num_keys):
            _taken(key_TJK, slot_M, j, key_MK)
            _taken(value_TJK, slot_M, j, value_MK)
            _asked(query_THK, slot_Q, j, query_RK)
            _asked(out_slope_THK, slot_Q, j, slope_RK)
            for r in range(num_queries):
                t, h = slot_Q[r // group], j * group + r % group
                told_3R[0, r], told_3R[1, r] = top_TH[t, h], share_TH[t, h]
                told_3R[2, r] = _mean(slope_RK[r], out_THK[t, h])
            _transposed(query_RK, query_KR)
            _transposed(slope_RK, slope_KR)
            share_MR[:], score_slope_MR[:] = 0, 0
            add_product(key_MK, query_KR, share_MR)
            _hide(share_MR[:, :num_queries], first, group, reach)
            add_product(value_MK, slope_KR, score_slope_MR)
            _slopes((share_MVL, score_slope_MVL), scale, (told_3VL[0], told_3VL[1], told_3VL[2]))
            _transposed(score_slope_MR[:, :num_queries], score_slope_RM)
            query_slope_RK[:], key_slope_MK[:], value_slope_MK[:] = 0, 0, 0
            add_product(score_slope_RM, key_MK, query_slope_RK)
            add_product(score_slope_MR[:, :num_queries], query_RK, key_slope_MK)
            add_product(share_MR[:, :num_queries], slope_RK, value_slope_MK)
            for r in range(num_queries):
                put_all(query_slope_THK[slot_Q[r // group], j * group + r % group], query_slope_RK[r])
            for m in range(len(slot_M)):
                put_all(key_slope_BLJK[b, m, j], key_slope_MK[m])
                put_all(value_slope_BLJK[b, m, j], value_slope_MK[m])


@compiled()
def _gathered(places: Any, where: Any, slopes: Any, num_parts: int, part: int) -> None:
    slot_BL, length_B, _ = where
    low, high = bounds(len(slopes[0]), num_parts, part)
    for b in range(len(length_B)):
        for m in range(length_B[b]):
            t = slot_BL[b, m]
            if low <= t < high:
                for n in range(len(slopes)):
                    _added(places[n][b, m].reshape(-1), slopes[n][t].reshape(-1))


@compiled()
def _forward_all(given: Any, found: Any, options: Any, num_parts: int, num_members: int) -> None:
    share_out(_forward, (given, found, options, num_parts), num_parts, num_members)


@compiled()
def _backward_all(given: Any, told: Any, slopes: Any, options: Any, num_parts: int, num_members: int) -> None:
    (query_slope_THK, key_slope_TJK, value_slope_TJK), (slot_BL, _, _) = slopes, options[0]
    shape = (*slot_BL.shape, *key_slope_TJK.shape[1:])
    places = np.empty(shape, key_slope_TJK.dtype), np.empty(shape, key_slope_TJK.dtype)
    found = query_slope_THK, *places
    share_out(_backward, (given, told, found, options, num_parts), num_parts, num_members)
    sums = key_slope_TJK, value_slope_TJK
    share_out(_gathered, (places, options[0], sums, num_parts), num_parts, num_members)
