"""The scan and GAE compiled for the CPU: on several threads, over segments and inside a long one.

T = packed tokens, B = segments. A row is cut into parts of equal length, wherever the cuts fall. First each
part says how its first A hangs on the carry from the part to its right (A = value + share * carry); it need
not look further than the segment at its start. Chained, these are the carries of all parts, and each part is
scanned on its own (reduce, then scan). The carry is float64, so that neither the number of threads nor the
length of a segment shows in a float32 result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

# A thread costs more than it saves on fewer tokens.
PART_TOKENS = 1 << 17
# More parts than threads: a thread that was held up leaves its rest to the others.
PARTS_PER_THREAD = 4
# Tokens that are scanned in the first-level cache, between one pass over the inputs and one over each output.
TILE = 64

Array = NDArray[Any]
Arrays = tuple[Array, ...]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Machine code that lets other threads run, kept on disk where numba finds a folder it may write to."""
    options = {"nogil": True, "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)


def linear_scan(x_T: Tensor, w_T: Tensor, out_T: Tensor, *, reverse: bool) -> None:
    """out_t = x_t + w_t out_{t+1}, or out_{t-1} forward; all of one dtype, contiguous."""
    wide_T = _wide(out_T)
    x, w, out = (row_T.numpy() for row_T in (_wide(x_T), _wide(w_T), wide_T))
    if not reverse:
        x, w, out = x[::-1], w[::-1], out[::-1]
    _in_parts(len(x), partial(_head, x, w), partial(_scan, x, w, out))
    _narrow(wide_T, out_T)


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    length_B: Tensor,
    out: tuple[Tensor, Tensor],
    *,
    gamma: float,
    decay_B: Tensor,
    bootstrap_B: Tensor,
) -> None:
    """Advantage and return of packed segments into `out`; all of one dtype, contiguous.

    Args:
        reward_T: rewards.
        value_T: values.
        length_B: tokens of each segment, int64; they add up to T.
        out: buffers of advantage and return.
        gamma: discount.
        decay_B: gamma lambda of each segment, float64.
        bootstrap_B: value of the state after each segment.
    """
    wide = [_wide(row_T) for row_T in out]
    end_B = length_B.cumsum(0)
    inputs = reward_T, value_T
    rows = tuple(row_T.numpy() for row_T in (*map(_wide, inputs), *wide))
    segments = end_B - length_B, end_B, decay_B.contiguous(), _wide(bootstrap_B)
    common = rows, tuple(one_B.numpy() for one_B in segments), gamma
    _in_parts(len(value_T), partial(_gae_head, *common), partial(_gae_scan, *common))
    for wide_T, out_T in zip(wide, out, strict=True):
        _narrow(wide_T, out_T)


def _wide(row: Tensor) -> Tensor:
    """The tensor itself, or float32 for bfloat16, which numba does not know."""
    return row.float() if row.dtype == torch.bfloat16 else row


def _narrow(wide_T: Tensor, out_T: Tensor) -> None:
    if wide_T is not out_T:
        out_T.copy_(wide_T)


def _in_parts(
    num_tokens: int,
    head: Callable[[int, int], tuple[float, float]],
    scan: Callable[[int, int, float], None],
) -> None:
    """Call `scan(start, stop, carry)` for every part of a row, on as many threads as torch uses."""
    num_threads = torch.get_num_threads()
    num_parts = min(PARTS_PER_THREAD * num_threads, num_tokens // PART_TOKENS)
    if num_threads == 1 or num_parts < 2:
        scan(0, num_tokens, 0.0)
        return
    cuts = [num_tokens * part // num_parts for part in range(num_parts + 1)]
    with ThreadPoolExecutor(num_threads) as pool:
        carries = [0.0]
        for value, share in reversed(list(pool.map(head, cuts[1:-1], cuts[2:]))):
            carries.append(value + share * carries[-1] if share != 0 else value)
        # The results say nothing, but asking for them lets errors travel.
        list(pool.map(scan, cuts[:-1], cuts[1:], reversed(carries)))


@_compiled
def _head(x: Array, w: Array, start: int, stop: int) -> tuple[float, float]:
    """A at `start` as (value, share): value + share times A at `stop`."""
    value, share = 0.0, 1.0
    for t in range(start, stop):
        value += share * x[t]
        share *= w[t]
        if share == 0:
            break
    return value, share


@_compiled
def _scan(x: Array, w: Array, out: Array, start: int, stop: int, carry: float) -> None:
    for t in range(stop - 1, start - 1, -1):
        carry = x[t] + w[t] * carry if w[t] != 0 else x[t]
        out[t] = carry


@_compiled
def _gae_head(rows: Arrays, segments: Arrays, gamma: float, start: int, stop: int) -> tuple[float, float]:
    """As `_head`, of the advantage."""
    _, end, decay, _ = segments
    b = np.searchsorted(end, start, side="right")
    top = min(stop, end[b])
    value = _gae_stretch(rows, segments, gamma, (b, start, top), 0.0, False)
    return value, decay[b] ** (top - start) if stop < end[b] else 0.0


@_compiled
def _gae_scan(rows: Arrays, segments: Arrays, gamma: float, start: int, stop: int, carry: float) -> None:
    begin, end, _, _ = segments
    top, b = stop, np.searchsorted(end, stop)
    while top > start:
        bottom = max(start, begin[b])
        _gae_stretch(rows, segments, gamma, (b, bottom, top), carry, True)
        top, b = bottom, b - 1


@_compiled
def _gae_stretch(
    rows: Arrays, segments: Arrays, gamma: float, stretch: tuple[int, int, int], carry: float, keep: bool
) -> float:
    """Scan (segment, start, top) in tiles from the right, and what is left over token by token.

    The carry counts where the segment goes on to the right. Nothing is written unless `keep`. Gives back the
    advantage at the start.
    """
    reward, value, advantage, returns = rows
    _, end, decay, bootstrap = segments
    b, start, top = stretch
    delta = np.empty(TILE)
    if top < end[b]:
        after = np.float64(value[top])
    else:
        after, carry = np.float64(bootstrap[b]), 0.0
    while top - start >= TILE:
        bottom = top - TILE
        r, v, a, g = reward[bottom:top], value[bottom:top], advantage[bottom:top], returns[bottom:top]
        for k in range(TILE - 1):
            delta[k] = r[k] + gamma * v[k + 1] - v[k]
        delta[TILE - 1] = r[TILE - 1] + gamma * after - v[TILE - 1]
        carry = _chain(delta, decay[b], carry)
        if keep:
            # One output at a time: together they may evict each other from the cache.
            for k in range(TILE):
                a[k] = delta[k]
            for k in range(TILE):
                g[k] = delta[k] + v[k]
        top, after = bottom, np.float64(v[0])
    for t in range(top - 1, start - 1, -1):
        carry = reward[t] + gamma * after - value[t] + decay[b] * carry
        after = np.float64(value[t])
        if keep:
            advantage[t] = carry
            returns[t] = carry + after
    return carry


@_compiled
def _chain(x: Array, w: float, carry: float) -> float:
    """A_k = x_k + w A_{k+1} of a tile in place; gives back A_0.

    Four tokens at a time, so that only one product in four waits for the one before.
    """
    w2 = w * w
    w3, w4 = w2 * w, w2 * w2
    for four in range(TILE // 4):
        # Unsigned: a signed index would be checked for being negative.
        k = np.uintp(TILE - 4 - 4 * four)
        k1, k2, k3 = k + np.uintp(1), k + np.uintp(2), k + np.uintp(3)
        x3 = x[k3]
        x2 = x[k2] + w * x3
        x1 = x[k1] + w * x2
        x0 = x[k] + w * x1
        x[k3], x[k2], x[k1] = x3 + w * carry, x2 + w2 * carry, x1 + w3 * carry
        carry = x0 + w4 * carry
        x[k] = carry
    return carry
