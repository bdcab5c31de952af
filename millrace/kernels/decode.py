"""What an engine's layer does between its products, in one call: with few rows calls cost most.

T = tokens, H = query heads, J = key heads, K = head width, N = (H + 2 J) K, B = rows, C = blocks of the
longest row, P = blocks of the pool, S = slots of a block.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.kernels.compiled import NUMBERS, compiled, memory, number_of, put, readable
from millrace.kernels.paged_attention import PagedRows
from millrace.kernels.paged_attention_cpu import PART_WORK, attend, outside, stored_keys, work
from millrace.kernels.team import bounds, cut, num_threads, share_out

# Tokens that pay for the thread they are turned on.
PART_TOKENS = 8
NO_SLOT = 1


def attend_new(
    heads_TN: Tensor,
    angles: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    rows: PagedRows,
    *,
    norms: tuple[Tensor, Tensor, float] | None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Queries and keys by their root mean square, then turned; keys and values stored; then paged attention.

    Everything has one dtype, float32 or bfloat16. Queries are not rounded on the way.

    Args:
        heads_TN: queries [H K], keys [J K] and values [J K] of each token, one behind the other.
        angles: cosines and sines [T, K] of the positions, as transformers makes them (both halves of K
            alike).
        pools: keys and values as `new_pool` makes them.
        rows: whose tokens they are.
        norms: factors [K] of queries and of keys after the norm, and eps; None for models without.
        scale: as in `dispatch.paged_attention`.
        window: likewise.
        softcap: likewise.

    Returns:
        [T, H K].

    Raises:
        ValueError: dtypes differ, the pool does not lie as `new_pool` makes it or has no such slot, or a row
            points outside the pool or the queries; nothing is stored then.
    """
    num_blocks, num_keys, size, width = pools[0].shape
    num_heads = heads_TN.shape[1] // width - 2 * num_keys
    # Without norms the factors have no length, and their address is not read.
    gains, eps = (angles, 0.0) if norms is None else (norms[:2], norms[2])
    numbers = [x.contiguous() for x in (heads_TN, *angles, *gains)] + [stored_keys(*pools), pools[1]]
    if heads_TN.dtype not in NUMBERS or not readable(*numbers):
        raise ValueError(f"the dtypes are {[x.dtype for x in numbers]}; all must be float32, or all bfloat16")
    tables = [rows.slot_T, rows.block_BC, rows.start_B, rows.first_B, rows.count_B]
    tables = [x.contiguous() for x in tables]
    out_TN = torch.empty(len(heads_TN), num_heads * width, dtype=heads_TN.dtype)
    wrong = _attend_new(
        tuple([x.data_ptr() for x in (*numbers, *tables, out_TN)]),
        (len(heads_TN), num_heads, num_keys, width, 0 if norms is None else width),
        (num_blocks, size, *rows.block_BC.shape),
        NUMBERS[heads_TN.dtype],
        (np.float32(eps), sys.maxsize if window is None else window, np.float32(scale), float(softcap or 0)),
        (num_threads(), PART_TOKENS, PART_WORK),
    )
    if wrong == NO_SLOT:
        highest = int(rows.slot_T.max())
        raise ValueError(f"slot_T holds {highest}; the pool has {num_blocks} blocks of {size} slots")
    if wrong < 0:
        raise outside(rows, -1 - wrong, len(heads_TN), (num_blocks, size))
    return out_TN


@compiled()
def _attend_new(addresses: Any, heads: Any, lies: Any, number: Any, options: Any, limits: Any) -> int:
    """Give back 0; `NO_SLOT` where a slot is not there, -1 - b where row b lies outside."""
    num_tokens, num_heads, num_keys, width, num_gains = heads
    num_blocks, size, num_rows, num_columns = lies
    eps, reach, scale, softcap = options
    threads, part_tokens, part_work = limits
    heads_TN = memory(addresses[0], (num_tokens, (num_heads + 2 * num_keys) * width), number)
    cos_TK = memory(addresses[1], (num_tokens, width), number)
    sin_TK = memory(addresses[2], (num_tokens, width), number)
    query_gain_K = memory(addresses[3], (num_gains,), number)
    key_gain_K = memory(addresses[4], (num_gains,), number)
    key_PJKS = memory(addresses[5], (num_blocks, num_keys, width, size), number)
    value_PJSK = memory(addresses[6], (num_blocks, num_keys, size, width), number)
    slot_T = memory(addresses[7], (num_tokens,), np.int64(0))
    block_BC = memory(addresses[8], (num_rows, num_columns), np.int32(0))
    start_B = memory(addresses[9], (num_rows,), np.int64(0))
    first_B = memory(addresses[10], (num_rows,), np.int64(0))
    count_B = memory(addresses[11], (num_rows,), np.int64(0))
    out_N = memory(addresses[12], (num_tokens * num_heads * width,), number)
    for t in range(num_tokens):
        if slot_T[t] >= num_blocks * size:
            return NO_SLOT
    pools, rows = (key_PJKS, value_PJSK), (block_BC, start_B, first_B, count_B)
    total = work(rows, pools, num_tokens, reach)
    if total < 0:
        return total
    query_THK = np.empty((num_tokens, num_heads, width), np.float32)
    parts, members = cut(num_tokens // part_tokens, threads)
    given = heads_TN, (cos_TK, sin_TK), (query_gain_K, key_gain_K), eps
    share_out(_turn, (given, query_THK, pools, slot_T, parts), parts, members)
    found_THK = np.empty(query_THK.shape, np.float32)
    parts, members = cut(total * (num_heads // num_keys) * width // part_work, threads)
    share_out(
        attend, (query_THK, found_THK, (pools, rows), (reach, scale, softcap), (total, parts)), parts, members
    )
    found_N = found_THK.reshape(-1)
    for n in range(len(out_N)):
        put(out_N, n, found_N[n])
    return 0


@compiled("contract", "reassoc")
def _turned(x_K: Any, angles: Any, gain_K: Any, eps: Any, y_K: Any) -> None:
    """One head, normed in place where there are factors, then turned."""
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
def _widened(x_K: Any, y_K: Any) -> None:
    for k in range(len(x_K)):
        y_K[k] = number_of(x_K[k])


@compiled()
def _turn(given: Any, query_THK: Any, pools: Any, slot_T: Any, num_parts: int, part: int) -> None:
    heads_TN, (cos_TK, sin_TK), gains, eps = given
    key_PJKS, value_PJSK = pools
    _, num_keys, size, width = value_PJSK.shape
    num_tokens, num_heads, _ = query_THK.shape
    angles = np.empty(width, np.float32), np.empty(width, np.float32)
    query_gain_K, key_gain_K = np.empty(len(gains[0]), np.float32), np.empty(len(gains[1]), np.float32)
    _widened(gains[0], query_gain_K)
    _widened(gains[1], key_gain_K)
    x_K, key_K = np.empty(width, np.float32), np.empty(width, np.float32)
    start, stop = bounds(num_tokens, num_parts, part)
    for t in range(start, stop):
        _widened(cos_TK[t], angles[0])
        _widened(sin_TK[t], angles[1])
        head_NK = heads_TN[t].reshape(-1, width)
        for h in range(num_heads):
            _widened(head_NK[h], x_K)
            _turned(x_K, angles, query_gain_K, eps, query_THK[t, h])
        block, slot = divmod(slot_T[t], size)
        if block >= 0:
            for j in range(num_keys):
                _widened(head_NK[num_heads + j], x_K)
                _turned(x_K, angles, key_gain_K, eps, key_K)
                for k in range(width):
                    put(key_PJKS[block, j, k], slot, key_K[k])
                value_PJSK[block, j, slot] = head_NK[num_heads + num_keys + j]
