"""A dense cache of keys and values for the reference engine, and the contexts that fill and read it.

B = rows, C = slots of a row, N = tokens of one forward, H = query heads, J = key heads, K = width of queries
and keys, V = width of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.kernels.packed_attention import SHORT_LENGTH, _scores, _shares
from millrace.models.attention import AttendingContext, Packed, Turns, attend_packed, pool_of
from millrace.models.facts import Heads, LayerFacts, ModelFacts, PoolShape


class DenseCache:
    """Keys [B, J, C, K] and values [B, J, C, V] of every pool, for B rows of C slots."""

    def __init__(self, facts: ModelFacts, *, num_rows: int, num_slots: int, like: Tensor) -> None:
        def empty(shape: PoolShape, width: int) -> Tensor:
            size = (num_rows, shape.num_heads, num_slots, width)
            return torch.zeros(size, dtype=like.dtype, device=like.device)

        self.keys = [empty(shape, shape.key_width) for shape in facts.pools]
        self.values = [empty(shape, shape.value_width) for shape in facts.pools]
        self.turns: Turns = {}

    def write(self, pool: int, row_N: Tensor, slot_N: Tensor, key_NJK: Tensor, value_NJV: Tensor) -> None:
        """Write token n to its row and slot."""
        self.keys[pool][row_N, :, slot_N] = key_NJK
        self.values[pool][row_N, :, slot_N] = value_NJV

    def take(self, row_M: Tensor, num_slots: int) -> None:
        """Keep these rows in this order (a row may be taken twice), and the first `num_slots` slots."""
        self.keys = [_resized(key.index_select(0, row_M), num_slots) for key in self.keys]
        self.values = [_resized(value.index_select(0, row_M), num_slots) for value in self.values]


def _resized(x_BJCK: Tensor, num_slots: int) -> Tensor:
    missing = num_slots - x_BJCK.shape[2]
    if missing <= 0:
        return x_BJCK[:, :, :num_slots]
    return torch.cat([x_BJCK, x_BJCK.new_zeros(*x_BJCK.shape[:2], missing, x_BJCK.shape[3])], dim=2)


@dataclass(frozen=True, slots=True)
class Prefill(AttendingContext):
    """A packed row whose keys and values are written to a cache at (`row_T`, `slot_T`) too."""

    packed: Packed
    cache: DenseCache
    row_T: Tensor
    slot_T: Tensor

    def attend(self, of_layer: LayerFacts, heads: Heads, options: dict[str, Any]) -> Tensor:
        if of_layer.writes:
            pool = pool_of(of_layer, self.cache.turns)
            self.cache.write(pool, self.row_T, self.slot_T, *heads[1:])
        return attend_packed(heads, self.packed, options)


@dataclass(frozen=True, slots=True)
class Decode(AttendingContext):
    """One new token per row of the cache, at `position_B`."""

    cache: DenseCache
    position_B: Tensor

    def attend(self, of_layer: LayerFacts, heads: Heads, options: dict[str, Any]) -> Tensor:
        cache, (query_BHK, key_BJK, value_BJV) = self.cache, heads
        pool = pool_of(of_layer, cache.turns)
        if of_layer.writes:
            row_B = torch.arange(len(query_BHK), device=query_BHK.device)
            cache.write(pool, row_B, self.position_B, key_BJK, value_BJV)
        return cached_attention(query_BHK, cache.keys[pool], cache.values[pool], self.position_B, **options)


def cached_attention(
    query_BHK: Tensor,
    key_BJCK: Tensor,
    value_BJCK: Tensor,
    position_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Attention of one new token per row over its cache slots 0 to `position_B`, itself included, [B, H, V].

    The new token's key and value are already in the cache. Options are those of `packed_attention`.
    """
    rows, heads, width = query_BHK.shape
    key_heads, slots = key_BJCK.shape[1], key_BJCK.shape[2]
    # Query heads of a key head are batched as its rows: keys and values are read once and never repeated.
    grouped = query_BHK.view(rows, key_heads, heads // key_heads, width)
    slot_C = torch.arange(slots, device=query_BHK.device)
    seen_BC = slot_C <= position_B[:, None]
    if window is not None:
        seen_BC &= slot_C > position_B[:, None] - window
    if chunk is not None:
        seen_BC &= slot_C >= position_B[:, None] // chunk * chunk
    mask = seen_BC[:, None, None, :]
    if softcap is None and slots > SHORT_LENGTH:
        out = F.scaled_dot_product_attention(grouped, key_BJCK, value_BJCK, attn_mask=mask, scale=scale)
    else:
        out = _shares(_scores(grouped, key_BJCK, scale, softcap), mask) @ value_BJCK
    return out.reshape(rows, heads, value_BJCK.shape[3])
