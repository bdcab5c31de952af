"""The scan and GAE compiled for the CPU: parallel across segments and within a long one.

T = packed tokens, B = segments. A row is cut into parts of equal length, regardless of segments. First each
part computes its first A as a linear function of the carry from the part to its right
(A = value + share * carry); this only reads the segment at its start. Composed, these functions give the
carry into every part. Then each part is scanned independently (reduce-then-scan). The carry is float64, so
that neither the number of threads nor the length of a segment affects a float32 result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.kernels.compiled import compiled
from millrace.kernels.team import bounds, cuts, share_out

# With fewer tokens per thread, starting a thread costs more than it saves.
PART_TOKENS = 1 << 17
# Tokens scanned in the L1 cache at a time, between one pass over the inputs and one over each output.
TILE = 64

Array = NDArray[Any]
Arrays = tuple[Array, ...]
# Rows, segments (begin, end, decay, bootstrap) and gamma.
Common = tuple[Arrays, Arrays, float]


def linear_scan(x_T: Tensor, w_T: Tensor, out_T: Tensor, *, reverse: bool) -> None:
    """Compute out_t = x_t + w_t out_{t+1}, or out_{t-1} forward; all of one dtype, contiguous."""
    wide_T = _wide(out_T)
    x, w, out = (row_T.numpy() for row_T in (_wide(x_T), _wide(w_T), wide_T))
    if not reverse:
        x, w, out = x[::-1], w[::-1], out[::-1]
    _scan_all((x, w, out), *cuts(len(x) // PART_TOKENS))
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
    """Write advantage and return into `out`; arguments as in `linear_scan.gae`, of one dtype, contiguous."""
    wide = [_wide(row_T) for row_T in out]
    end_B = length_B.cumsum(0)
    inputs = reward_T, value_T
    rows = tuple(row_T.numpy() for row_T in (*map(_wide, inputs), *wide))
    segments = end_B - length_B, end_B, decay_B.contiguous(), _wide(bootstrap_B)
    # An integer gamma would trigger another compilation.
    common = rows, tuple(one_B.numpy() for one_B in segments), float(gamma)
    _gae_all(common, *cuts(len(value_T) // PART_TOKENS))
    for wide_T, out_T in zip(wide, out, strict=True):
        _narrow(wide_T, out_T)


def _wide(row: Tensor) -> Tensor:
    return row.float() if row.dtype == torch.bfloat16 else row


def _narrow(wide_T: Tensor, out_T: Tensor) -> None:
    if wide_T is not out_T:
        out_T.copy_(wide_T)


@compiled("contract")
def _chained(head_P2: Array) -> Array:
    carry_P = np.zeros(len(head_P2))
    for part in range(len(head_P2) - 1, 0, -1):
        value, share = head_P2[part]
        carry_P[part - 1] = value if share == 0 else value + share * carry_P[part]
    return carry_P


@compiled("contract")
def _scan_all(rows: Arrays, num_parts: int, num_members: int) -> None:
    head_P2 = np.zeros((num_parts, 2))
    share_out(_head, (rows, head_P2), num_parts - 1, num_members)
    share_out(_scan, (rows, _chained(head_P2)), num_parts, num_members)


@compiled("contract")
def _gae_all(common: Common, num_parts: int, num_members: int) -> None:
    head_P2 = np.zeros((num_parts, 2))
    share_out(_gae_head, (common, head_P2), num_parts - 1, num_members)
    share_out(_gae_scan, (common, _chained(head_P2)), num_parts, num_members)


@compiled("contract")
def _head(rows: Arrays, head_P2: Array, before: int) -> None:
    """Return A at the start of the part after `before`: value + share * A at the part's end."""
    x, w, _ = rows
    start, stop = bounds(len(x), len(head_P2), before + 1)
    value, share = 0.0, 1.0
    for t in range(start, stop):
        value += share * x[t]
        share *= w[t]
        if share == 0:
            break
    head_P2[before + 1] = value, share


@compiled("contract")
def _scan(rows: Arrays, carry_P: Array, part: int) -> None:
    x, w, out = rows
    start, stop = bounds(len(x), len(carry_P), part)
    carry = carry_P[part]
    for t in range(stop - 1, start - 1, -1):
        carry = x[t] + w[t] * carry if w[t] != 0 else x[t]
        out[t] = carry


@compiled("contract")
def _gae_head(common: Common, head_P2: Array, before: int) -> None:
    rows, segments, gamma = common
    _, end, decay, _ = segments
    start, stop = bounds(len(rows[0]), len(head_P2), before + 1)
    b = np.searchsorted(end, start, side="right")
    top = min(stop, end[b])
    value = _gae_stretch(rows, segments, gamma, (b, start, top), 0.0, False)
    head_P2[before + 1] = value, decay[b] ** (top - start) if stop < end[b] else 0.0


@compiled("contract")
def _gae_scan(common: Common, carry_P: Array, part: int) -> None:
    rows, segments, gamma = common
    start, stop = bounds(len(rows[0]), len(carry_P), part)
    begin, end, _, _ = segments
    top, b = stop, np.searchsorted(end, stop)
    while top > start:
        bottom = max(start, begin[b])
        _gae_stretch(rows, segments, gamma, (b, bottom, top), carry_P[part], True)
        top, b = bottom, b - 1


@compiled("contract")
def _gae_stretch(
    rows: Arrays, segments: Arrays, gamma: float, stretch: tuple[int, int, int], carry: float, keep: bool
) -> float:
    """Scan (segment, start, top) in tiles from the right; return the advantage at the start.

    The carry is used if the segment continues to the right. Nothing is written unless `keep`.
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
            # One output at a time: written together, they may evict each other from the cache.
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


@compiled("contract")
def _chain(x: Array, w: float, carry: float) -> float:
    """Compute A_k = x_k + w A_{k+1} of a tile in place; return A_0.

    Four tokens at a time, so that only one product in four depends on the previous one.
    """
    w2 = w * w
    w3, w4 = w2 * w, w2 * w2
    for four in range(TILE // 4):
        # Unsigned: numba checks a signed index for being negative.
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
