"""What a decode step does between its products and its attention, in one pass: with few rows calls cost most.

T = tokens, H = query heads, J = key heads, K = head width, P = blocks of the pool, S = slots of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from millrace.kernels.compiled import array, compiled, narrow, wide
from millrace.kernels.paged_attention_cpu import pool_arrays
from millrace.kernels.team import bounds, cuts, share_out

NO_GAIN = np.empty(0, np.float32)
# Tokens that pay for the thread they are turned on.
PART_TOKENS = 8


def turn_and_store(
    heads: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    slot_T: Tensor,
    *,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Queries and keys by their root mean square, then turned to their positions; keys and values stored.

    Args:
        heads: queries [T, H K], keys [T, J K] and values [T, J K] as their products give them, all float32
            or all bfloat16.
        angles: cosines and sines [T, K] of the positions, as transformers makes them (both halves of K
            alike).
        pools: as `new_pool` makes them.
        slot_T: as in `PagedRows`.
        gains: factors [K] of queries and of keys after the norm; None for models without these norms.
        eps: of the norms.

    Returns:
        queries [T, H, K], float32.

    Raises:
        ValueError: the pool does not lie as `new_pool` makes it, or has no such slot; nothing is stored then.
    """
    num_blocks, _, size, width = pools[0].shape
    highest = int(slot_T.max())
    if highest >= num_blocks * size:
        raise ValueError(f"slot_T holds {highest}; the pool has {num_blocks} blocks of {size} slots")
    query_THK = torch.empty(len(slot_T), heads[0].shape[1] // width, width)
    factors = (NO_GAIN, NO_GAIN) if gains is None else tuple(map(array, gains))
    given = tuple(map(array, heads)), tuple(map(array, angles)), factors, np.float32(eps)
    into = query_THK.numpy(), *pool_arrays(*pools), array(slot_T)
    _turn_all(given, into, *cuts(len(slot_T) // PART_TOKENS))
    return query_THK


def _number(x: Any) -> Any:
    """What a number of an array stands for; one of 16 bits is a bfloat16."""
    return wide(x) if isinstance(x, np.uint16) else x


@overload(_number, strict=False)
def _number_compiled(x: Any) -> Callable[..., Any]:
    return (lambda x: wide(x)) if x == types.uint16 else (lambda x: x)


def _put(place: Any, k: int, x: Any) -> None:
    """Write a number as the array keeps it."""
    place[k] = narrow(x) if place.dtype == np.uint16 else x


@overload(_put, strict=False)
def _put_compiled(place: Any, k: Any, x: Any) -> Callable[..., None]:
    def narrowed(place: Any, k: Any, x: Any) -> None:
        place[k] = narrow(x)

    def as_it_is(place: Any, k: Any, x: Any) -> None:
        place[k] = x

    return narrowed if place.dtype == types.uint16 else as_it_is


@compiled("contract", "reassoc")
def _turned(x_K: Any, cos_K: Any, sin_K: Any, gain_K: Any, eps: Any, y_K: Any) -> None:
    """One head; `y_K` has room for the head and for the result."""
    width = len(x_K)
    half = width // 2
    for k in range(width):
        y_K[width + k] = _number(x_K[k])
    if len(gain_K):
        square = np.float32(0)
        for k in range(width):
            square += y_K[width + k] * y_K[width + k]
        scale = np.float32(1) / np.sqrt(square / np.float32(width) + eps)
        for k in range(width):
            y_K[width + k] *= scale * _number(gain_K[k])
    for k in range(half):
        low, high = y_K[width + k], y_K[width + half + k]
        cos, sin = _number(cos_K[k]), _number(sin_K[k])
        y_K[k], y_K[half + k] = low * cos - high * sin, high * cos + low * sin


@compiled("contract", "reassoc")
def _turn(given: Any, into: Any, num_parts: int, part: int) -> None:
    heads, angles, gains, eps = given
    (query_TN, key_TN, value_TN), (cos_TK, sin_TK), (query_gain_K, key_gain_K) = heads, angles, gains
    query_THK, key_PJKS, value_PJSK, slot_T = into
    _, num_keys, size, width = value_PJSK.shape
    num_tokens, num_heads, _ = query_THK.shape
    y_K = np.empty(2 * width, np.float32)
    start, stop = bounds(num_tokens, num_parts, part)
    for t in range(start, stop):
        for h in range(num_heads):
            x_K = query_TN[t, h * width : (h + 1) * width]
            _turned(x_K, cos_TK[t], sin_TK[t], query_gain_K, eps, y_K)
            query_THK[t, h] = y_K[:width]
        block, slot = divmod(slot_T[t], size)
        if block >= 0:
            for j in range(num_keys):
                x_K = key_TN[t, j * width : (j + 1) * width]
                _turned(x_K, cos_TK[t], sin_TK[t], key_gain_K, eps, y_K)
                for k in range(width):
                    _put(key_PJKS[block, j, k], slot, y_K[k])
                    _put(value_PJSK[block, j, slot], k, _number(value_TN[t, j * width + k]))


@compiled()
def _turn_all(given: Any, into: Any, num_parts: int, num_members: int) -> None:
    share_out(_turn, (given, into, num_parts), num_parts, num_members)
