"""Decoder layers of an engine in one call on the CPU: with few rows, call overhead exceeds the arithmetic.

    x + attention(norm x), then x + down(silu(gate(norm x)) * up(norm x))

T = tokens, D = model width, H = query heads, J = key heads, K = head width, N = (H + 2 J) K, F = width of
the feed-forward, W = output tokens, L = layers, B = rows, C = blocks of the longest row, P = blocks of the
pool, S = slots of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.kernels.compiled import NUMBERS, compiled, memory, put, put_all, readable, room
from millrace.kernels.norm import gain_of, norm_rows
from millrace.kernels.paged_attention import PagedRows
from millrace.kernels.paged_attention_cpu import NO_LIMIT, PART_WORK, attend, outside, stored_keys, work
from millrace.kernels.product_cpu import (
    ADD,
    GATE,
    WRITE,
    PackedWeight,
    kinds,
    place_of,
    share_product,
    weight_at,
)
from millrace.kernels.team import bounds, cut, num_threads, share_out

# Least tokens per thread for rotary positions, and least numbers per thread for a norm.
PART_TOKENS = 8
PART_NORMED = 1 << 14
NO_SLOT, NO_TOKEN = 1, 2
# Layout of the result of `_places`: four products of this many numbers each, then norms, then sizes.
PLACE = 6
GAINS = 4 * PLACE
SIZES = GAINS + 4


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer, all float32 or all bfloat16, and its attention settings.

    `norms` [D] (before attention, before the feed-forward) and `head_norms` [K] (query, key; None without
    them) are in Llama's form; `eps` has the eps of each, that of the head norms last. `products` are packed:
    queries, keys and values [N, D] concatenated along N, the attention output [D, H K], gate and up [F, D] as
    a gated pair, and down [D, F]. Scale, window and softcap are those of `dispatch.paged_attention`.
    """

    norms: tuple[Tensor, Tensor]
    head_norms: tuple[Tensor, Tensor] | None
    eps: tuple[float, float, float]
    products: tuple[PackedWeight, PackedWeight, PackedWeight, PackedWeight]
    biases: tuple[Tensor | None, ...]
    scale: float
    window: int | None = None
    softcap: float | None = None


class Layers:
    """A stack of layers, and the final norm, if any."""

    def __init__(
        self, weights: Sequence[LayerWeights], norm_D: Tensor | None = None, *, eps: float = 0.0
    ) -> None:
        self._weights, self._norm_D = weights, norm_D
        self._dtype = weights[0].norms[0].dtype
        self._place_LN = np.array([_places(one) for one in weights])
        self._number_LN = np.array([[*one.eps, one.scale, one.softcap or 0] for one in weights], np.float32)
        self._last = (0 if norm_D is None else norm_D.data_ptr()), np.float32(eps)

    def __call__(
        self,
        x_TD: Tensor,
        angles: tuple[Tensor, Tensor],
        pools: Sequence[tuple[Tensor, Tensor]],
        rows: PagedRows,
        last_B: Tensor | None = None,
    ) -> Tensor:
        """Run the layers on some tokens and store their keys and values in the pools.

        Angles are cosines and sines [T, K] of the positions, in transformers' layout (both halves of K are
        equal). All pools have one size. With `last_B`, the index of each row's last token, the last layer
        returns only those tokens, [B, D] instead of [T, D].

        Inputs and outputs have the dtype of the weights. Intermediate results are float32, except the inputs
        of products and the residual stream.

        Raises:
            ValueError: dtypes differ, the pool does not have the layout of `new_pool` or has no such slot, a
                row points outside the pool or the queries, or `last_B` points outside the queries. Nothing
                is stored then.
        """
        halves = [half for key, value in pools for half in (stored_keys(key, value), value)]
        given = [x_TD, *(angle_TK.contiguous() for angle_TK in angles), *halves]
        if self._dtype not in NUMBERS or not readable(self._weights[0].norms[0], *given):
            raise ValueError(
                f"the dtypes are {[x.dtype for x in given[:5]]}; all must be float32, or all bfloat16"
            )
        if len({half.shape for pair in pools for half in pair}) != 1:
            sizes = [tuple(half.shape) for pair in pools for half in pair]
            raise ValueError(f"the pools have shapes {sizes}; all must be the same")
        x_TD = x_TD.clone(memory_format=torch.contiguous_format)
        y_WD = x_TD if last_B is None else x_TD.new_empty(len(last_B), x_TD.shape[1])
        tables = [rows.slot_T, rows.block_BC, rows.start_B, rows.first_B, rows.count_B]
        tables = [x.contiguous() for x in (*tables, rows.count_B if last_B is None else last_B)]
        num_blocks, num_keys, size, width = pools[0][0].shape
        wrong = _layers(
            tuple([x.data_ptr() for x in (x_TD, y_WD, *given[1:3], *tables)]),
            (self._place_LN, self._number_LN, np.array([half.data_ptr() for half in halves])),
            (len(x_TD), 0 if last_B is None else len(last_B), x_TD.shape[1], *rows.block_BC.shape),
            (num_blocks, num_keys, size, width),
            (*kinds(self._dtype), self._dtype == torch.bfloat16),
            (*self._last, num_threads()),
        )
        if wrong == NO_SLOT:
            highest = int(rows.slot_T.max())
            raise ValueError(f"slot_T holds {highest}; the pool has {num_blocks} blocks of {size} slots")
        if wrong == NO_TOKEN:
            raise ValueError(f"last_B is {tables[-1].tolist()}; there are {len(x_TD)} tokens")
        if wrong < 0:
            raise outside(rows, -1 - wrong, len(x_TD), (num_blocks, size))
        return y_WD


def _places(weights: LayerWeights) -> list[int]:
    """Return addresses of products and norms; N, H K, F, the length of a head norm; and the window."""
    # Without head norms the length is 0, and the address is not read.
    heads = weights.head_norms or weights.norms
    products = [place_of(*pair) for pair in zip(weights.products, weights.biases, strict=True)]
    given, attended, _, mixed = weights.products
    return [
        *(number for place in products for number in place),
        *(x.data_ptr() for x in (*weights.norms, *heads)),
        *(given.num_outputs, attended.num_inputs, mixed.num_inputs),
        *(0 if weights.head_norms is None else len(heads[0]), weights.window or NO_LIMIT),
    ]


@compiled()
def _layers(addresses: Any, tables: Any, sizes: Any, lies: Any, numbers: Any, rest: Any) -> int:
    """Return 0; `NO_SLOT` or `NO_TOKEN` if one does not exist, -1 - b if row b is out of range."""
    (num_tokens, num_wanted, size, num_rows, num_columns), kept = sizes, numbers[0]
    (num_blocks, num_keys, slots, width), (norm, eps, threads) = lies, rest
    place_LN, number_LN, pool_N = tables
    x_TD = memory(addresses[0], (num_tokens, size), kept)
    y_WD = memory(addresses[1], (num_wanted or num_tokens, size), kept)
    angles = memory(addresses[2], (num_tokens, width), kept), memory(addresses[3], (num_tokens, width), kept)
    slot_T = memory(addresses[4], (num_tokens,), np.int64(0))
    block_BC = memory(addresses[5], (num_rows, num_columns), np.int32(0))
    start_B = memory(addresses[6], (num_rows,), np.int64(0))
    first_B = memory(addresses[7], (num_rows,), np.int64(0))
    count_B = memory(addresses[8], (num_rows,), np.int64(0))
    last_W = memory(addresses[9], (num_wanted,), np.int64(0))
    for t in range(num_tokens):
        if slot_T[t] >= num_blocks * slots:
            return NO_SLOT
    for w in range(num_wanted):
        if not 0 <= last_W[w] < num_tokens:
            return NO_TOKEN
    rows, every = (block_BC, start_B, first_B, count_B), last_W[:0]
    end_B, one_B = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    for b in range(num_rows):
        end_B[b], one_B[b] = start_B[b] + count_B[b] - 1, 1
    last = block_BC, end_B, last_W, one_B
    for n in range(len(place_LN)):
        key_PJKS = memory(pool_N[2 * n], (num_blocks, num_keys, width, slots), kept)
        value_PJSK = memory(pool_N[2 * n + 1], (num_blocks, num_keys, slots, width), kept)
        weights, given = (place_LN[n], number_LN[n]), ((key_PJKS, value_PJSK), slot_T, angles)
        # One call, since the function is inlined.
        ends = num_wanted > 0 and n == len(place_LN) - 1
        out_WD, asked, wanted_W = (y_WD, last, last_W) if ends else (x_TD, rows, every)
        wrong = _layer(x_TD, out_WD, weights, (given, asked, wanted_W), numbers, threads)
        if wrong:
            return wrong
    if norm:
        _share_norm(y_WD, memory(norm, (size,), kept), (eps, numbers[3]), y_WD, threads)
    return 0


@compiled(inline=True)
def _layer(x_TD: Any, y_WD: Any, weights: Any, given: Any, numbers: Any, threads: int) -> int:
    """Run one layer; y is x itself if every token is an output."""
    (place_N, number_N), (new, rows, last_W), (kept, read, zero, rounds) = weights, given, numbers
    num_outputs, num_attended, inner = place_N[SIZES], place_N[SIZES + 1], place_N[SIZES + 2]
    size = x_TD.shape[1]
    normed_TD = room(x_TD.shape, read)
    _share_norm(x_TD, memory(place_N[GAINS], (size,), kept), (number_N[0], rounds), normed_TD, threads)
    heads_TN = room((len(x_TD), num_outputs), zero)
    share_product(normed_TD, weight_at(place_N[:PLACE], kept), heads_TN, WRITE, zero, threads)
    width = new[0][0].shape[2]
    found_THK = room((len(x_TD), num_attended // width, width), zero)
    wrong = _attend_new(heads_TN, found_THK, new, rows, (place_N, number_N, kept), threads)
    if wrong:
        return wrong
    attended_WN = room((len(y_WD), num_attended), read)
    for w in range(len(y_WD)):
        t = last_W[w] if len(last_W) else w
        put_all(y_WD[w], x_TD[t])
        put_all(attended_WN[w], found_THK[t].reshape(-1))
    share_product(attended_WN, weight_at(place_N[PLACE : 2 * PLACE], kept), y_WD, ADD, zero, threads)
    normed_WD = normed_TD[: len(y_WD)]
    _share_norm(y_WD, memory(place_N[GAINS + 1], (size,), kept), (number_N[1], rounds), normed_WD, threads)
    mixed_WF = room((len(y_WD), inner), read)
    share_product(normed_WD, weight_at(place_N[2 * PLACE : 3 * PLACE], kept), mixed_WF, GATE, zero, threads)
    share_product(mixed_WF, weight_at(place_N[3 * PLACE : 4 * PLACE], kept), y_WD, ADD, zero, threads)
    return 0


@compiled()
def _share_norm(x_ND: Any, weight_D: Any, options: Any, y_ND: Any, threads: int) -> None:
    gain_D = gain_of(weight_D, np.float32(0))
    parts, members = cut(x_ND.size // PART_NORMED, threads)
    share_out(_norm_part, (x_ND, gain_D, options, y_ND, parts), parts, members)


@compiled()
def _norm_part(x_ND: Any, gain_D: Any, options: Any, y_ND: Any, num_parts: int, part: int) -> None:
    start, stop = bounds(len(x_ND), num_parts, part)
    scale_N = np.empty(stop - start, np.float32)
    norm_rows(x_ND[start:stop], gain_D, options, scale_N, y_ND[start:stop])


@compiled(inline=True)
def _attend_new(heads_TN: Any, found_THK: Any, new: Any, rows: Any, weights: Any, threads: int) -> int:
    (pools, slot_T, angles), (place_N, number_N, kept) = new, weights
    num_gains, reach = place_N[SIZES + 3], place_N[SIZES + 4]
    gains = memory(place_N[GAINS + 2], (num_gains,), kept), memory(place_N[GAINS + 3], (num_gains,), kept)
    num_tokens, num_heads, width = found_THK.shape
    total = work(rows, pools, num_tokens, (reach, NO_LIMIT))
    if total < 0:
        return total
    query_THK = np.empty(found_THK.shape, np.float32)
    parts, members = cut(num_tokens // PART_TOKENS, threads)
    share_out(
        _turn, ((heads_TN, angles, gains, number_N[2]), query_THK, pools, slot_T, parts), parts, members
    )
    parts, members = cut(total * (num_heads // pools[1].shape[1]) * width // PART_WORK, threads)
    options = (reach, NO_LIMIT), number_N[3], np.float64(number_N[4])
    share_out(attend, (query_THK, found_THK, (pools, rows), options, (total, parts)), parts, members)
    return 0


@compiled("contract", "reassoc")
def _turned(x_K: Any, angles: Any, gain_K: Any, eps: Any, y_K: Any) -> None:
    """Apply rotary positions to one head, after a norm in place if the head norm has weights."""
    (cos_K, sin_K), width = angles, len(x_K)
    half = width // 2
    if len(gain_K):
        square = np.float32(0)
        for k in range(width):
            square += x_K[k] * x_K[k]
        scale = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
        for k in range(width):
            x_K[k] *= scale * gain_K[k]
    for k in range(half):
        y_K[k] = x_K[k] * cos_K[k] - x_K[half + k] * sin_K[k]
    for k in range(half):
        y_K[half + k] = x_K[half + k] * cos_K[k] + x_K[k] * sin_K[k]


@compiled()
def _turn(new: Any, query_THK: Any, pools: Any, slot_T: Any, num_parts: int, part: int) -> None:
    heads_TN, (cos_TK, sin_TK), gains, eps = new
    key_PJKS, value_PJSK = pools
    _, num_keys, size, width = value_PJSK.shape
    num_tokens, num_heads, _ = query_THK.shape
    angles = np.empty(width, np.float32), np.empty(width, np.float32)
    query_gain_K, key_gain_K = np.empty(len(gains[0]), np.float32), np.empty(len(gains[1]), np.float32)
    put_all(query_gain_K, gains[0])
    put_all(key_gain_K, gains[1])
    key_K = np.empty(width, np.float32)
    start, stop = bounds(num_tokens, num_parts, part)
    for t in range(start, stop):
        put_all(angles[0], cos_TK[t])
        put_all(angles[1], sin_TK[t])
        head_NK = heads_TN[t].reshape(-1, width)
        for h in range(num_heads):
            _turned(head_NK[h], angles, query_gain_K, eps, query_THK[t, h])
        block, slot = divmod(slot_T[t], size)
        if block >= 0:
            for j in range(num_keys):
                _turned(head_NK[num_heads + j], angles, key_gain_K, eps, key_K)
                for k in range(width):
                    put(key_PJKS[block, j, k], slot, key_K[k])
                put_all(value_PJSK[block, j, slot], head_NK[num_heads + num_keys + j])
