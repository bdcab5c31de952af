"""Ring attention: causal attention of one rank's queries to another's keys, for a row sharded over ranks.

A rank's queries attend to the keys of one rank after the other; a running softmax accumulates the result.
Forward and backward go tile by tile, so that extra memory does not depend on the length of the row.

T = queries of one rank, U = keys of one rank, H = query heads, J = key heads, K = head width, M = tiles of a
rectangle, L = queries of a tile, S = keys of a tile, Q = the rows of one key head: the queries of a tile in
each query head of its group.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The largest tile: its scores take 1 MiB of float32 per head.
QUERIES = 256
KEYS = 1024


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Tiles of similar size, no two of one segment; a tile is a range of queries by a range of keys.

    `query_ML` and `key_MS` index the T queries and U keys; T and U are padding. `query_at_ML` and `key_at_MS`
    are indices in the whole packed row; arbitrary for padded queries, and for padded keys larger than all, so
    that no query sees them. `query_low_ML` is the lowest index that each query sees.
    """

    query_ML: Tensor
    key_MS: Tensor
    query_at_ML: Tensor
    key_at_MS: Tensor
    query_low_ML: Tensor

    def to(self, device: torch.device) -> Rectangle:
        """Copy the tables to another device."""
        return Rectangle(
            self.query_ML.to(device),
            self.key_MS.to(device),
            self.query_at_ML.to(device),
            self.key_at_MS.to(device),
            self.query_low_ML.to(device),
        )


@dataclass(frozen=True, slots=True)
class Tiles:
    """The visible pairs of a rank's queries and a rank's keys, each in one rectangle; may be empty."""

    rectangles: tuple[Rectangle, ...]

    @classmethod
    def of(
        cls,
        query_at_T: Tensor,
        first_at_T: Tensor,
        key_at_U: Tensor,
        *,
        window: int | None,
        chunk: int | None = None,
    ) -> Tiles:
        """Divide the visible pairs of queries and keys into tiles.

        Indices in the whole packed row are on the CPU; those of queries and keys ascend, or it raises a
        ValueError. `first_at_T` is that of the first token of each query's segment. Window and chunk are
        those of `packed_attention`.
        """
        for name, at_N in (("query_at_T", query_at_T), ("key_at_U", key_at_U)):
            if bool((at_N.diff() < 1).any()):
                raise ValueError(f"{name} does not ascend; give a rank's tokens in packed order")
        query_at, first_at, key_at = query_at_T.tolist(), first_at_T.tolist(), key_at_U.tolist()
        low_at_T = lowest_seen(query_at_T, first_at_T, window=window, chunk=chunk)
        low_at = low_at_T.tolist()
        of_segment: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for begin, end in _runs(query_at, first_at):
            segment = first_at[begin]
            last = bisect_right(key_at, query_at[end - 1])
            for key in range(bisect_left(key_at, low_at[begin]), last, KEYS):
                of_segment[segment].append((begin, end, key, min(key + KEYS, last)))
        alike: defaultdict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
        for tiles in of_segment.values():
            # Tiles of one segment must not share a rectangle: their index separates them.
            for n, (begin, end, key, key_end) in enumerate(tiles):
                size = n, (end - begin).bit_length(), (key_end - key).bit_length()
                alike[size].append((begin, end, key, key_end))
        rectangles = []
        for tiles in alike.values():
            for few in _split(tiles):
                rectangles.append(_rectangle(few, query_at_T, key_at_U, low_at_T))
        return cls(tuple(rectangles))

    def to(self, device: torch.device) -> Tiles:
        """Copy the tables to another device."""
        return Tiles(tuple(rectangle.to(device) for rectangle in self.rectangles))


def lowest_seen(query_at_T: Tensor, first_at_T: Tensor, *, window: int | None, chunk: int | None) -> Tensor:
    """Compute the lowest index that each query sees; arguments as in `Tiles.of`."""
    low_at_T = first_at_T
    if window is not None:
        low_at_T = low_at_T.maximum(query_at_T - window + 1)
    if chunk is not None:
        low_at_T = low_at_T.maximum(first_at_T + (query_at_T - first_at_T) // chunk * chunk)
    return low_at_T


def _runs(at: list[int], first_at: list[int]) -> list[tuple[int, int]]:
    """Return ranges (begin, end) of consecutive tokens of one segment, none longer than a tile."""
    found, begin = [], 0
    for t in range(1, len(at) + 1):
        whole = t == len(at) or at[t] != at[t - 1] + 1 or first_at[t] != first_at[begin]
        if whole or t - begin == QUERIES:
            found.append((begin, t))
            begin = t
    return found


def _split(tiles: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    longest = max(end - begin for begin, end, _, _ in tiles)
    widest = max(end - begin for _, _, begin, end in tiles)
    most = QUERIES * KEYS // (longest * widest)
    return [tiles[m : m + most] for m in range(0, len(tiles), most)]


def _rectangle(
    tiles: Sequence[tuple[int, ...]], query_at_T: Tensor, key_at_U: Tensor, low_at_T: Tensor
) -> Rectangle:
    begin_M, end_M, key_M, key_end_M = torch.tensor(tiles).unbind(1)
    query_ML = _places(begin_M, end_M, len(query_at_T))
    key_MS = _places(key_M, key_end_M, len(key_at_U))
    beyond = torch.iinfo(torch.int64).max
    return Rectangle(
        query_ML,
        key_MS,
        # Padded queries are zeros, and so is their gradient: their visible keys do not matter.
        query_at_T[query_ML % len(query_at_T)],
        torch.cat([key_at_U, key_at_U.new_tensor([beyond])])[key_MS],
        low_at_T[query_ML % len(query_at_T)],
    )


def _places(begin_M: Tensor, end_M: Tensor, beyond: int) -> Tensor:
    place_ML = begin_M[:, None] + torch.arange(int((end_M - begin_M).max()))
    return place_ML.where(place_ML < end_M[:, None], beyond)


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """Running softmax of T queries over the keys so far. The extra row T absorbs writes of padding.

    `top` is the highest score, `total` the sum of exp(score - top), both [T + 1, H, 1], and `value` the sum
    of exp(score - top) v, [T + 1, H, K].
    """

    top: Tensor
    total: Tensor
    value: Tensor

    @classmethod
    def before(cls, query_THK: Tensor, value_UJK: Tensor) -> Softmax:
        """Initialize for no keys; sums are float32 (float64 stays float64)."""
        like = query_THK.new_zeros(
            len(query_THK) + 1, query_THK.shape[1], 1, dtype=_at_least_float32(query_THK)
        )
        # The lowest number instead of -inf: -inf minus -inf is NaN.
        top = torch.full_like(like, torch.finfo(like.dtype).min)
        return cls(top, like, like.repeat(1, 1, value_UJK.shape[2]))

    def after(self) -> tuple[Tensor, Tensor]:
        """Return the attention output, [T, H, K], and log sum exp(score), [T, H, 1], after all keys."""
        return (self.value / self.total)[:-1], (self.top + self.total.log())[:-1]


def attend(
    softmax: Softmax,
    query_THK: Tensor,
    key_UJK: Tensor,
    value_UJK: Tensor,
    tiles: Tiles,
    *,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Update the running softmax in place with the keys of one rank.

    Rotary positions are applied to queries and keys; J divides H. Widths of keys and values may differ. With
    `softcap` scores become softcap * tanh(score / softcap).

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Liu, Zaharia and Abbeel
    2023, "Ring attention with blockwise transformers for near-infinite context".
    """
    heads = key_UJK.shape[1]
    query, key, value = _padded(query_THK), _padded(key_UJK), _padded(value_UJK)
    for tile in tiles.rectangles:
        met = tile.query_ML
        score_MJQS = _scores(query, key, tile, scale, softcap)
        top_MJQ1 = _take(softmax.top, met, heads)
        new_top_MJQ1 = torch.maximum(top_MJQ1, score_MJQS.amax(-1, keepdim=True))
        kept_MJQ1 = (top_MJQ1 - new_top_MJQ1).exp_()
        mass_MJQS = score_MJQS.sub_(new_top_MJQ1).exp_()
        _put(softmax.top, met, new_top_MJQ1)
        total_MJQ1 = _take(softmax.total, met, heads) * kept_MJQ1 + mass_MJQS.sum(-1, keepdim=True)
        _put(softmax.total, met, total_MJQ1)
        value_MJQK = mass_MJQS @ _take(value, tile.key_MS, heads)
        _put(softmax.value, met, value_MJQK.add_(_take(softmax.value, met, heads) * kept_MJQ1))


def attend_backward(
    query_THK: Tensor,
    key_UJK: Tensor,
    value_UJK: Tensor,
    tiles: Tiles,
    *,
    log_total_TH1: Tensor,
    gradient_THK: Tensor,
    agreement_TH1: Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values from the pairs with one rank's keys.

    With p = exp(score - log total), o the attention output and g its gradient,
    d loss / d score = p (g v - g o). `log_total_TH1` is log sum exp(score) of each query, over the keys of
    all ranks; `agreement_TH1` is g o, summed over the head width. Gradients are in float32 (float64 stays
    float64).
    """
    heads = key_UJK.shape[1]
    query, key, value = _padded(query_THK), _padded(key_UJK), _padded(value_UJK)
    gradient, log_total, agreement = _padded(gradient_THK), _padded(log_total_TH1), _padded(agreement_TH1)
    of_query, of_key, of_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for tile in tiles.rectangles:
        met, seen = tile.query_ML, tile.key_MS
        score_MJQS = _scores(query, key, tile, scale, softcap)
        mass_MJQS = (score_MJQS - _take(log_total, met, heads)).exp_()
        gradient_MJQK = _take(gradient, met, heads)
        slope_MJQS = gradient_MJQK @ _take(value, seen, heads).transpose(2, 3)
        slope_MJQS.sub_(_take(agreement, met, heads)).mul_(mass_MJQS).mul_(scale)
        if softcap is not None:
            # A score of -inf (a masked key) must not give NaN.
            slope_MJQS.mul_(1 - (score_MJQS.clamp_(min=-softcap) / softcap).square_())
        _add(of_query, met, slope_MJQS @ _take(key, seen, heads))
        _add(of_key, seen, slope_MJQS.transpose(2, 3) @ _take(query, met, heads))
        _add(of_value, seen, mass_MJQS.transpose(2, 3) @ gradient_MJQK)
    return of_query[:-1], of_key[:-1], of_value[:-1]


def _scores(query: Tensor, key: Tensor, tile: Rectangle, scale: float, softcap: float | None) -> Tensor:
    """Scores of a rectangle, -inf where a query does not see a key, [M, J, Q, S]."""
    heads = key.shape[1]
    score_MJQS = _take(query, tile.query_ML, heads) @ _take(key, tile.key_MS, heads).transpose(2, 3)
    score_MJQS.mul_(scale)
    if softcap is not None:
        score_MJQS.div_(softcap).tanh_().mul_(softcap)
    key_at_M1S = tile.key_at_MS[:, None]
    unseen_MLS = (key_at_M1S > tile.query_at_ML[:, :, None]) | (key_at_M1S < tile.query_low_ML[:, :, None])
    of_heads = score_MJQS.unflatten(2, (-1, unseen_MLS.shape[1]))
    of_heads.masked_fill_(unseen_MLS[:, None, None], float("-inf"))
    return score_MJQS


def _padded(x_THK: Tensor) -> Tensor:
    x_THK = x_THK.to(_at_least_float32(x_THK))
    return torch.cat([x_THK, x_THK.new_zeros(1, *x_THK.shape[1:])])


def _take(x_THK: Tensor, place_ML: Tensor, num_key_heads: int) -> Tensor:
    """Gather the rows of each tile by key head, [M, J, Q, K]."""
    rows = x_THK[place_ML].unflatten(2, (num_key_heads, -1))
    return rows.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _put(x_THK: Tensor, place_ML: Tensor, rows_MJQK: Tensor) -> None:
    rows = rows_MJQK.unflatten(2, (-1, place_ML.shape[1]))
    x_THK[place_ML] = rows.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _add(x_THK: Tensor, place_ML: Tensor, rows_MJQK: Tensor) -> None:
    # Tiles of a rectangle share no row except padding: no update is lost, and sums have a fixed order.
    _put(x_THK, place_ML, rows_MJQK.add_(_take(x_THK, place_ML, rows_MJQK.shape[1])))


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
