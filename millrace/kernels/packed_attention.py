"""Causal attention within segments of a packed row, and of single tokens over a dense cache.

T = packed tokens, B = rows of a bucket, L = longest segment of it, H = query heads, J = key heads,
K = head width, C = cache slots. A segment attends to itself alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# A bucket holds segments at least this share as long as its longest: padding costs at most twice the scores.
BUCKET_SHARE = 0.5
# Below this length padding is cheaper than another call.
BUCKET_LENGTH = 64
# Up to this length two plain products beat torch's fused attention on a CPU, by 2.3 times at 11 tokens.
SHORT_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of similar length laid out as a rectangle.

    Attributes:
        slot_BL: packed index of each place, [B L]; places beyond a segment's end point at row T (zeros).
        place_T: where each token stands in the flattened rectangle; tokens of other buckets point at its
            end, B L (zeros).
        shape: (B, L).
    """

    slot_BL: Tensor
    place_T: Tensor
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segments:
    """How a packed row of T tokens divides into segments."""

    buckets: tuple[Bucket, ...]
    num_tokens: int

    @classmethod
    def of(cls, length_B: Tensor) -> Segments:
        """Buckets for segments of these lengths, laid end to end.

        Raises:
            ValueError: a segment is empty.
        """
        length = length_B.tolist()
        if not length or min(length) < 1:
            raise ValueError(f"segment lengths {length[:8]} must all be at least 1")
        num_tokens = sum(length)
        start_B = (length_B.cumsum(0) - length_B).tolist()
        order = sorted(range(len(length)), key=lambda b: -length[b])
        buckets, first = [], 0
        for at in range(1, len(order) + 1):
            longest = length[order[first]]
            ends = at == len(order) or (
                longest > BUCKET_LENGTH and length[order[at]] < BUCKET_SHARE * longest
            )
            if ends:
                rows = sorted(order[first:at])
                buckets.append(_bucket([start_B[b] for b in rows], [length[b] for b in rows], num_tokens))
                first = at
        return cls(tuple(buckets), num_tokens)

    def to(self, device: torch.device) -> Segments:
        """The same segments, their tables on another device."""
        moved = [Bucket(b.slot_BL.to(device), b.place_T.to(device), b.shape) for b in self.buckets]
        return Segments(tuple(moved), self.num_tokens)


def _bucket(start: list[int], length: list[int], num_tokens: int) -> Bucket:
    longest = max(length)
    start_B, length_B = torch.tensor(start), torch.tensor(length)
    offset_L = torch.arange(longest)
    inside_BL = offset_L < length_B[:, None]
    slot_BL = torch.where(inside_BL, start_B[:, None] + offset_L, num_tokens).flatten()
    place_T = torch.full((num_tokens,), slot_BL.numel())
    place_N = inside_BL.flatten().nonzero()[:, 0]
    place_T[slot_BL[place_N]] = place_N
    return Bucket(slot_BL, place_T, (len(start), longest))


class _Gather(torch.autograd.Function):
    """y = x[index] (index T reads zeros); the gradient is gathered by the inverse table, not scattered.

    A scatter would add in an order that depends on threads; two gathers are exact and faster.
    """

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, index_N: Tensor, inverse_T: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_T)
        return _rows(x_THK, index_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse_T,) = ctx.saved_tensors
        return _rows(gradients[0], inverse_T), None, None


def _rows(x_THK: Tensor, index_N: Tensor) -> Tensor:
    """x[index], where index T (one past the end) reads a row of zeros."""
    return torch.cat([x_THK, x_THK.new_zeros(1, *x_THK.shape[1:])]).index_select(0, index_N)


def packed_attention(
    query_THK: Tensor,
    key_TJK: Tensor,
    value_TJK: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the earlier tokens of the same segment.

    Args:
        query_THK: queries.
        key_TJK: keys; J divides H.
        value_TJK: values.
        segments: how the row divides.
        scale: factor of the scores.
        window: a token sees itself and the `window - 1` tokens before it; None sees all.
        softcap: scores become softcap * tanh(score / softcap); None leaves them.

    Returns:
        [T, H, K].
    """
    parts = []
    for bucket in segments.buckets:

        def rectangle(x_THK: Tensor, bucket: Bucket = bucket) -> Tensor:
            rows = _Gather.apply(x_THK, bucket.slot_BL, bucket.place_T)
            return rows.view(*bucket.shape, *x_THK.shape[1:]).transpose(1, 2)

        out_BHLK = _causal(
            rectangle(query_THK),
            rectangle(key_TJK),
            rectangle(value_TJK),
            scale=scale,
            window=window,
            softcap=softcap,
        )
        # Gathering back is the same tables the other way round; other buckets' tokens read the zero row.
        place_NHK = out_BHLK.transpose(1, 2).flatten(0, 1)
        parts.append(_Gather.apply(place_NHK, bucket.place_T, bucket.slot_BL))
    return sum(parts[1:], start=parts[0])


def _causal(
    query_BHLK: Tensor,
    key_BJLK: Tensor,
    value_BJLK: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention on a rectangle; what lies beyond a segment's end no token inside it ever reads."""
    groups = query_BHLK.shape[1] // key_BJLK.shape[1]
    if groups > 1:
        key_BJLK = key_BJLK.repeat_interleave(groups, 1)
        value_BJLK = value_BJLK.repeat_interleave(groups, 1)
    length = query_BHLK.shape[2]
    if window is not None and window >= length:
        window = None
    plain = softcap is not None or length <= SHORT_LENGTH
    if window is None and not plain:
        return F.scaled_dot_product_attention(query_BHLK, key_BJLK, value_BJLK, is_causal=True, scale=scale)
    distance_LL = torch.arange(length, device=query_BHLK.device)[:, None] - torch.arange(
        length, device=query_BHLK.device
    )
    seen_LL = (distance_LL >= 0) & (distance_LL < (window or length))
    if not plain:
        return F.scaled_dot_product_attention(
            query_BHLK, key_BJLK, value_BJLK, attn_mask=seen_LL, scale=scale
        )
    return _shares(_scores(query_BHLK, key_BJLK, scale, softcap), seen_LL) @ value_BJLK


def _scores(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    score = query @ key.transpose(2, 3) * scale
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def _shares(score: Tensor, seen: Tensor) -> Tensor:
    """Softmax over what is seen, in float32 (float64 stays float64), back in the scores' dtype."""
    wide = torch.promote_types(score.dtype, torch.float32)
    return score.masked_fill(~seen, float("-inf")).softmax(-1, dtype=wide).to(score.dtype)


def packed_attention_loop(
    query_THK: Tensor,
    key_TJK: Tensor,
    value_TJK: Tensor,
    length_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The plain twin of `packed_attention`: one token and one head at a time, as the equation says."""
    heads = query_THK.shape[1]
    groups = heads // key_TJK.shape[1]
    rows = []
    start = 0
    for length in length_B.tolist():
        for i in range(start, start + length):
            first = start if window is None else max(start, i - window + 1)
            for head in range(heads):
                score = key_TJK[first : i + 1, head // groups] @ query_THK[i, head] * scale
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                rows.append(score.softmax(-1) @ value_TJK[first : i + 1, head // groups])
        start += length
    return torch.stack(rows).view(query_THK.shape)


def cached_attention(
    query_BHK: Tensor,
    key_BJCK: Tensor,
    value_BJCK: Tensor,
    position_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One new token per row over its cache slots 0 to `position_B`, itself included.

    Args:
        query_BHK: queries of the new tokens.
        key_BJCK: cached keys, the new token's already at slot `position_B`.
        value_BJCK: cached values, likewise.
        position_B: position of each new token.
        scale: factor of the scores.
        window: as in `packed_attention`.
        softcap: as in `packed_attention`.

    Returns:
        [B, H, K].
    """
    rows, heads, width = query_BHK.shape
    key_heads, slots = key_BJCK.shape[1], key_BJCK.shape[2]
    # The query heads that share a key head are its rows, so keys and values are read once and never repeated.
    grouped = query_BHK.view(rows, key_heads, heads // key_heads, width)
    slot_C = torch.arange(slots, device=query_BHK.device)
    seen_BC = slot_C <= position_B[:, None]
    if window is not None:
        seen_BC &= slot_C > position_B[:, None] - window
    mask = seen_BC[:, None, None, :]
    if softcap is None and slots > SHORT_LENGTH:
        out = F.scaled_dot_product_attention(grouped, key_BJCK, value_BJCK, attn_mask=mask, scale=scale)
    else:
        out = _shares(_scores(grouped, key_BJCK, scale, softcap), mask) @ value_BJCK
    return out.reshape(rows, heads, width)
