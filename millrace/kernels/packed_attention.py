"""Causal attention within segments of a packed row, and of single tokens over a dense cache.

A segment attends only to itself. Segments with a common prefix may share it: the row holds the prefix once,
as tokens of one of these segments, and the others attend to it there.

T = tokens of the row, B = rows of a bucket, L = keys of its longest segment, Q = queries of a segment, which
belong to its last tokens, N = places of a rectangle, A = segments, W = their tokens, shared ones counted in
each, H = query heads, J = key heads, K = width of queries and keys, V = width of values, C = cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.kernels.compiled import readable
from millrace.kernels.packed_attention_cpu import DTYPES, short_attention

# Least length of a segment relative to the longest of its bucket: padding at most doubles the scores.
BUCKET_SHARE = 0.5
# Most scores, padding included, per useful score in a bucket with shared tokens: three is up to 1.7 times
# faster than smaller buckets, and faster than ten.
BUCKET_WASTE = 3
# Below this length padding is cheaper than another call.
BUCKET_LENGTH = 64
# Up to this length two plain products are faster than torch's fused attention on a CPU, 2.3 times at 11
# tokens, and our kernel is faster than both.
SHORT_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Places:
    """A gather of a row's tokens into places, possibly with duplicates, and its inverse.

    `slot_N` has the packed index of the token in each place, T for an empty place (zeros); `place_T` the
    first place of each token, N for none. `again` has the S tokens with several places, [S], and their
    further places, [S C], padded with N; None without such tokens.
    """

    slot_N: Tensor
    place_T: Tensor
    again: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, slot_N: Tensor, num_tokens: int) -> Places:
        """Compute the inverse tables for `num_tokens` tokens, from `slot_N` on the CPU."""
        nowhere = len(slot_N)
        place_N = torch.cat([slot_N.argsort(stable=True), torch.tensor([nowhere])])
        count_T = torch.bincount(slot_N, minlength=num_tokens)[:num_tokens]
        first_T = count_T.cumsum(0) - count_T
        place_T = torch.where(count_T > 0, place_N[first_T], nowhere)
        token_S = (count_T > 1).nonzero()[:, 0]
        if not len(token_S):
            return cls(slot_N, place_T, None)
        nth_C = torch.arange(1, int(count_T.max()))
        nth_SC = torch.where(nth_C < count_T[token_S, None], first_T[token_S, None] + nth_C, nowhere)
        return cls(slot_N, place_T, (token_S, place_N[nth_SC]))

    def to(self, device: torch.device) -> Places:
        """Copy the tables to another device."""
        again = None if self.again is None else (self.again[0].to(device), self.again[1].to(device))
        return Places(self.slot_N.to(device), self.place_T.to(device), again)

    def spread(self, x_THK: Tensor) -> Tensor:
        """Gather tokens into places, [N, ...]; a token's gradient is the sum over its places."""
        x_NHK: Tensor = _Gather.apply(x_THK, self.slot_N, self.place_T, self.again)
        return x_NHK

    def gather(self, x_NHK: Tensor) -> Tensor:
        """Gather the only place of each token, zeros for a token without a place, [T, ...]."""
        x_THK: Tensor = _Gather.apply(x_NHK, self.place_T, self.slot_N, None)
        return x_THK


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of similar length laid out as two rectangles, one of keys [B L] and one of queries [B Q].

    `first_B` is the position of each segment's first own token, which is its first query. `query` is None if
    no token is shared, so that every key is also a query. The shape is (B, Q, L).
    """

    length_B: Tensor
    first_B: Tensor
    key: Places
    query: Places | None
    shape: tuple[int, int, int]

    def to(self, device: torch.device) -> Bucket:
        """Copy the tables to another device."""
        query = None if self.query is None else self.query.to(device)
        return Bucket(
            self.length_B.to(device), self.first_B.to(device), self.key.to(device), query, self.shape
        )


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a packed row of T tokens, in buckets of similar length."""

    buckets: tuple[Bucket, ...]
    num_tokens: int

    @classmethod
    def of(cls, length_B: Tensor) -> Segments:
        """Build buckets for segments of these lengths, concatenated; an empty one is a ValueError."""
        length = length_B.tolist()
        if not length or min(length) < 1:
            raise ValueError(f"segment lengths {length[:8]} must all be at least 1")
        num_tokens = sum(length)
        return cls.sharing(torch.arange(num_tokens), length_B, torch.zeros_like(length_B), num_tokens)

    @classmethod
    def sharing(cls, slot_W: Tensor, length_A: Tensor, first_A: Tensor, num_tokens: int) -> Segments:
        """Build buckets for segments, some of which have a prefix in another segment; tables are on the CPU.

        `slot_W` is the packed index of each token of each segment; `first_A` the position of each segment's
        first own token. A segment with only own tokens is contiguous in the row.
        """
        length, first = length_A.tolist(), first_A.tolist()
        whole = sorted((b for b in range(len(length)) if not first[b]), key=lambda b: -length[b])
        # A segment without own tokens has no queries.
        rest = [b for b in range(len(length)) if 0 < first[b] < length[b]]
        rest.sort(key=lambda b: (-first[b], -length[b]))
        span_A3 = torch.stack([length_A.cumsum(0) - length_A, length_A, first_A], 1)
        # All short segments are one bucket, since our kernel for them computes no padding.
        groups = [whole + rest]
        if max(length) > SHORT_LENGTH:
            spans = [(order, _similar([(first[b], length[b]) for b in order])) for order in (whole, rest)]
            groups = [order[span] for order, some in spans for span in some]
        return cls(tuple(_bucket(slot_W, span_A3[sorted(group)], num_tokens) for group in groups), num_tokens)

    def to(self, device: torch.device) -> Segments:
        """Copy the tables to another device."""
        return Segments(tuple(bucket.to(device) for bucket in self.buckets), self.num_tokens)


def _similar(spans: Sequence[tuple[int, int]]) -> list[slice]:
    """Return slices of consecutive spans (position of the first own token, length), one for each bucket.

    Segments without shared tokens are by descending length, others by descending position.
    """
    found: list[slice] = []
    first = longest = wanted = 0
    for at, (own, length) in enumerate(spans):
        longest = max(longest, length)
        wanted += (length - own) * length
        laid = (at + 1 - first) * (longest - own) * longest
        fits = laid <= BUCKET_WASTE * wanted if own else length >= BUCKET_SHARE * longest
        if longest > BUCKET_LENGTH and not fits:
            found.append(slice(first, at))
            first, longest, wanted = at, length, (length - own) * length
    return [*found, slice(first, len(spans))] if spans else []


def _bucket(slot_W: Tensor, span_B3: Tensor, num_tokens: int) -> Bucket:
    start_B, length_B, first_B = span_B3.unbind(1)
    size, longest = len(start_B), int(length_B.max())
    offset_L = torch.arange(longest)
    index_BL = (start_B[:, None] + offset_L).clamp(max=len(slot_W) - 1)
    slot_BL = slot_W[index_BL].where(offset_L < length_B[:, None], num_tokens)
    key = Places.of(slot_BL.flatten(), num_tokens)
    if not first_B.any():
        return Bucket(length_B, first_B, key, None, (size, longest, longest))
    asked = longest - int(first_B.min())
    slot_BQ = slot_BL.where(offset_L >= first_B[:, None], num_tokens)[:, longest - asked :]
    query = Places.of(slot_BQ.flatten(), num_tokens)
    return Bucket(length_B, first_B, key, query, (size, asked, longest))


class _Gather(torch.autograd.Function):
    """y = x[index] (index T reads zeros); the backward gathers by the inverse index instead of scattering.

    A scatter would add in an order that depends on threads; gathers are deterministic and faster.
    """

    @staticmethod
    def forward(
        ctx: Any, x_THK: Tensor, index_N: Tensor, inverse_T: Tensor, again: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        ctx.save_for_backward(inverse_T, *(again or ()))
        return _padded(x_THK).index_select(0, index_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        inverse_T, *again = ctx.saved_tensors
        slope_NHK = _padded(gradients[0])
        slope_THK = slope_NHK.index_select(0, inverse_T)
        if again:
            token_S, place_SC = again
            further = slope_NHK.index_select(0, place_SC.flatten()).unflatten(0, place_SC.shape)
            slope_THK[token_S] += further.sum(1)
        return slope_THK, None, None, None


def _padded(x_THK: Tensor) -> Tensor:
    return torch.cat([x_THK, x_THK.new_zeros(1, *x_THK.shape[1:])])


def packed_attention(
    query_THK: Tensor,
    key_TJK: Tensor,
    value_TJK: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the earlier tokens of the same segment, [T, H, V]; J divides H.

    With `window` a token sees itself and the `window - 1` tokens before it, with `chunk` only its own chunk
    of positions of the segment; with `softcap` scores become softcap * tanh(score / softcap).

    Our kernel for short segments supports neither chunks nor values of another width than keys; torch
    computes those.
    """
    parts = []
    inputs = query_THK, key_TJK, value_TJK
    alike = key_TJK.shape == value_TJK.shape and softcap is None
    ours = alike and query_THK.dtype in DTYPES and readable(*inputs)
    for bucket in segments.buckets:
        size, queries, keys = bucket.shape
        whole = chunk is None or chunk >= keys
        if ours and whole and keys <= SHORT_LENGTH:
            where = bucket.key.slot_N.view(size, keys), bucket.length_B, bucket.first_B
            parts.append(short_attention(*inputs, where, scale=scale, window=window))
            continue
        asked = bucket.key if bucket.query is None else bucket.query
        laid = asked.spread(query_THK), bucket.key.spread(key_TJK), bucket.key.spread(value_TJK)
        counts = queries, keys, keys
        rectangles = (x.unflatten(0, (size, n)).transpose(1, 2) for x, n in zip(laid, counts, strict=True))
        out_BHQV = _causal(
            *rectangles, scale=scale, limits=(window, None if whole else chunk), softcap=softcap
        )
        parts.append(asked.gather(out_BHQV.transpose(1, 2).flatten(0, 1)))
    return sum(parts[1:], start=parts[0])


def _causal(
    query_BHQK: Tensor,
    key_BJLK: Tensor,
    value_BJLK: Tensor,
    *,
    scale: float,
    limits: tuple[int | None, int | None],
    softcap: float | None,
) -> Tensor:
    """Compute attention on rectangles; by causality no query reads the padding after its segment."""
    window, chunk = limits
    groups = query_BHQK.shape[1] // key_BJLK.shape[1]
    if groups > 1:
        key_BJLK = key_BJLK.repeat_interleave(groups, 1)
        value_BJLK = value_BJLK.repeat_interleave(groups, 1)
    queries, keys = query_BHQK.shape[2], key_BJLK.shape[2]
    if window is not None and window >= keys:
        window = None
    plain = softcap is not None or keys <= SHORT_LENGTH
    if window is None and chunk is None and queries == keys and not plain:
        return F.scaled_dot_product_attention(query_BHQK, key_BJLK, value_BJLK, is_causal=True, scale=scale)
    position_L = torch.arange(keys, device=query_BHQK.device)
    distance_QL = position_L[keys - queries :, None] - position_L
    seen_QL = (distance_QL >= 0) & (distance_QL < (window or keys))
    if chunk is not None:
        seen_QL &= position_L >= position_L[keys - queries :, None] // chunk * chunk
    if not plain:
        return F.scaled_dot_product_attention(
            query_BHQK, key_BJLK, value_BJLK, attn_mask=seen_QL, scale=scale
        )
    return _shares(_scores(query_BHQK, key_BJLK, scale, softcap), seen_QL) @ value_BJLK


def _scores(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    score = query @ key.transpose(2, 3) * scale
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def _shares(score: Tensor, seen: Tensor) -> Tensor:
    wide = torch.promote_types(score.dtype, torch.float32)
    return score.masked_fill(~seen, float("-inf")).softmax(-1, dtype=wide).to(score.dtype)
