"""Attention over the paged pool as Triton kernels: decode, split along the keys, and ragged prefill.

T = packed query tokens, B = rows (one request each), H = query heads, J = key heads, K = width of queries and
keys, V = width of values, P = blocks of the pool, S = slots of a block, C = blocks of the longest row, N =
splits of the longest row.

One program computes all query heads of one key head, for one query (decode) or a tile of consecutive queries
(prefill), so that keys and values are read once per group. It loops over the keys in tiles, aligned to a size
that depends only on the pool, with a running maximum and sum (Dao 2023, "FlashAttention-2"). A decode cuts a
long row into splits of fixed size, each its own program, and merges them (Dao et al. 2023, "Flash-Decoding").
The size is fixed instead of the number of splits, so that no result depends on the rest of the batch. A tile
that a query does not see leaves its running values unchanged, bit for bit, so a prefill's result does not
depend on its chunks either.

Scores are exponents of 2, since the hardware computes powers of 2. Keys that no query of a program sees are
not read: 0 times NaN is NaN, and a slot that was never written has arbitrary content.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace.kernels.paged_attention import PagedRows

# Bytes of a tile of keys. The next tile and its values are loaded while one is computed: 32 KiB in flight per
# program. A multiprocessor of an H200 runs four programs; its part of the bandwidth needs about 30 KiB.
TILE_BYTES = 2**14
# Keys of a tile: the least that tensor cores take; a split is a multiple of the largest.
LEAST_TILE, LARGEST_TILE = 16, 64
# Keys of a split: 128 KiB of a usual head in bfloat16, for at most 4 KiB of partial results.
SPLIT = 256
# Rows of the product of queries and keys: the least that tensor cores take, and the rows for four warps.
DECODE_ROWS, PREFILL_ROWS = 16, 64
# Splits merged at once.
PARTS = 8
# Rows that a tile searches at a time to find its own row.
FOUND = tl.constexpr(256)
# Below every score, but finite: the difference of two of them is 0, that of two infinities is NaN.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = math.log2(math.e)
# A float32 product as three tf32 products rounds much like float32, but runs on tensor cores.
PRECISION = tl.constexpr("tf32x3")
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def store_kv(
    key_TJK: Tensor, value_TJK: Tensor, key_PJSK: Tensor, value_PJSK: Tensor, slot_T: Tensor
) -> None:
    """Write each token's key and value, of any strides, into its slot; tokens with slot -1 are skipped.

    `slot_T` is block * S + slot of each token, int64. The pool's dtype may differ.
    """
    num_heads, block_size, width = key_PJSK.shape[1:]
    widths = {"WIDTH": width, "VALUE_WIDTH": value_PJSK.shape[3]}
    given, pools = (key_TJK, value_TJK), (key_PJSK, value_PJSK)
    sizes = {"HEADS": num_heads, "SIZE": block_size, **widths}
    widest = triton.next_power_of_2(max(widths.values()))
    powers = {"HEADS_2": triton.next_power_of_2(num_heads), "WIDTH_2": widest}
    strides = [tuple(one.stride() for one in pair) for pair in (given, pools)]
    with torch.cuda.device_of(key_PJSK):
        _store_kv[(len(slot_T),)](given, pools, *strides, slot_T, **sizes, **powers)


def paged_attention(
    query_THK: Tensor,
    key_PJSK: Tensor,
    value_PJSK: Tensor,
    rows: PagedRows,
    *,
    split: int | None = SPLIT,
    **options: Any,
) -> Tensor:
    """Compute `paged_attention_plain`: `paged_decode` if every row has one query, else `paged_prefill`.

    The two round differently, so `exact` rows always use `paged_prefill`. Options are those of the plain
    implementation.
    """
    if rows.max_count == 1 and not rows.exact:
        return paged_decode(query_THK, key_PJSK, value_PJSK, rows, split=split, **options)
    return paged_prefill(query_THK, key_PJSK, value_PJSK, rows, **options)


def paged_decode(
    query_BHK: Tensor,
    key_PJSK: Tensor,
    value_PJSK: Tensor,
    rows: PagedRows,
    *,
    split: int | None = SPLIT,
    **options: Any,
) -> Tensor:
    """Compute `paged_attention_plain` for rows of one query each, of any strides, [B, H, V].

    `split` is the most keys of one program; None does not split rows. Results for different values differ by
    rounding; with the same value they are batch-invariant. A split that is no positive multiple of 64, or a
    dtype that is not one of DTYPES, is a ValueError.
    """
    if split is not None and (split < LARGEST_TILE or split % LARGEST_TILE):
        raise ValueError(f"split is {split}; it is a positive multiple of {LARGEST_TILE}, or None")
    options = _options(query_BHK, (key_PJSK, value_PJSK), **options)
    limits = options["WINDOW"], options["CHUNK"]
    num_splits = 1 if split is None else _most_splits(rows.max_length, limits, split)
    num_rows, num_heads, _ = query_BHK.shape
    options["ROWS"] = max(DECODE_ROWS, triton.next_power_of_2(options["GROUP"]))
    grid = (num_rows, key_PJSK.shape[1], num_splits)
    out_BHV = query_BHK.new_empty(num_rows, num_heads, value_PJSK.shape[3])
    if num_splits == 1:
        _launch(grid, query_BHK, (key_PJSK, value_PJSK), rows, (out_BHV,), DECODE=True, SPLIT=None, **options)
        return out_BHV
    part_BNHV = out_BHV.new_empty(num_rows, num_splits, num_heads, value_PJSK.shape[3], dtype=torch.float32)
    highest_BNH, total_BNH = part_BNHV.new_empty(2, num_rows, num_splits, num_heads).unbind()
    parts = (part_BNHV, highest_BNH, total_BNH)
    _launch(grid, query_BHK, (key_PJSK, value_PJSK), rows, parts, DECODE=True, SPLIT=split, **options)
    sizes = {name: options[name] for name in ("WINDOW", "CHUNK", "VALUE_WIDTH", "VALUE_2")}
    sizes["SPLIT"] = split
    with torch.cuda.device_of(out_BHV):
        _merge[(num_rows, num_heads)](
            parts, out_BHV, (rows.start_B, rows.first_B), num_splits, **sizes, PARTS=PARTS, num_warps=1
        )
    return out_BHV


def paged_prefill(
    query_THK: Tensor,
    key_PJSK: Tensor,
    value_PJSK: Tensor,
    rows: PagedRows,
    **options: Any,
) -> Tensor:
    """Compute `paged_attention_plain` for rows of any number of queries, in the order of the packed row.

    Arguments, result and errors are those of `paged_decode`. A query's result has the same bits in any batch
    and for any chunks of its row.
    """
    options = _options(query_THK, (key_PJSK, value_PJSK), **options)
    options["ROWS"] = max(PREFILL_ROWS, triton.next_power_of_2(options["GROUP"]))
    # The tiles of row b begin at first_b // queries + b: an index that needs no sum over the rows before it,
    # and leaves at most one idle tile per row.
    num_tiles = len(query_THK) // (options["ROWS"] // options["GROUP"]) + len(rows.start_B)
    grid = (num_tiles, key_PJSK.shape[1], 1)
    out_THV = query_THK.new_empty(*query_THK.shape[:2], value_PJSK.shape[3])
    _launch(grid, query_THK, (key_PJSK, value_PJSK), rows, (out_THV,), DECODE=False, SPLIT=None, **options)
    return out_THV


def _most_splits(max_length: int, limits: tuple[int | None, int | None], split: int) -> int:
    """Most splits that a row overlaps: a window, or a chunk, may begin with the last key of a split."""
    reach = min((limit - 1 + split for limit in limits if limit is not None), default=max_length)
    return triton.cdiv(min(max_length, reach), split)


def _options(
    query_THK: Tensor,
    pools: tuple[Tensor, Tensor],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> dict[str, Any]:
    """Return options of `_attend`; score factors are for powers of 2, and for tanh, computed from 2 x."""
    key_PJSK, value_PJSK = pools
    for name, dtype in (("query_THK", query_THK.dtype), ("key_PJSK", key_PJSK.dtype)):
        if dtype not in DTYPES:
            raise ValueError(f"{name} is {dtype}; the Triton kernels take {', '.join(map(str, DTYPES))}")
    _, num_heads, size, width = key_PJSK.shape
    value_width = value_PJSK.shape[3]
    width_2, value_2 = (max(triton.next_power_of_2(size), LEAST_TILE) for size in (width, value_width))
    tile = TILE_BYTES // (max(width_2, value_2) * key_PJSK.element_size())
    # Arithmetic in bfloat16 is wrong in the interpreter, where tensors are on the CPU.
    factor = torch.promote_types(query_THK.dtype, key_PJSK.dtype) if query_THK.is_cuda else torch.float32
    return {
        "scale": scale * LOG2E if softcap is None else 2 * scale * LOG2E / softcap,
        "CAP": None if softcap is None else softcap * LOG2E,
        "WINDOW": window,
        "CHUNK": chunk,
        "FACTOR": DTYPES[factor],
        "GROUP": query_THK.shape[1] // num_heads,
        "WIDTH": width,
        "WIDTH_2": width_2,
        "VALUE_WIDTH": value_width,
        "VALUE_2": value_2,
        "SIZE": size,
        "TILE": min(max(tile, LEAST_TILE), LARGEST_TILE),
    }


def _launch(
    grid: tuple[int, int, int],
    query_THK: Tensor,
    pools: tuple[Tensor, Tensor],
    rows: PagedRows,
    outs: tuple[Tensor, ...],
    **options: Any,
) -> None:
    tensors = (query_THK, *pools)
    inputs = (*tensors, *(one.stride() for one in tensors))
    spans = (rows.start_B, rows.first_B, rows.count_B, len(rows.start_B))
    where = (*spans, rows.block_BC, rows.block_BC.stride(0))
    with torch.cuda.device_of(query_THK):
        _attend[grid](inputs, outs, where, num_warps=4, **options)


@triton.jit
def _store_kv(
    given: tl.tensor,
    pools: tl.tensor,
    given_strides: tl.tensor,
    pool_strides: tl.tensor,
    slot: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HEADS_2: tl.constexpr,
    WIDTH_2: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot + token)
    if place < 0:
        return
    j = tl.arange(0, HEADS_2).to(tl.int64)[:, None]
    d = tl.arange(0, WIDTH_2)[None, :]
    for kind in tl.static_range(2):
        inside = (j < HEADS) & (d < (WIDTH if kind == 0 else VALUE_WIDTH))
        to_token, to_head, to_lane = given_strides[kind]
        number = tl.load(given[kind] + token * to_token + j * to_head + d * to_lane, inside)
        to_block, to_head, to_slot, to_lane = pool_strides[kind]
        at = place // SIZE * to_block + j * to_head + place % SIZE * to_slot + d * to_lane
        tl.store(pools[kind] + at, number, inside)


@triton.jit
def _attend(
    inputs: tl.tensor,
    outs: tl.tensor,
    where: tl.tensor,
    scale: tl.tensor,
    DECODE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    CAP: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_2: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    start, first, count, num_rows, table, to_row = where
    if DECODE:
        b, before, num_queries = tl.program_id(0), 0, 1
    else:
        b, before, num_queries = _queries(first, count, num_rows, QUERIES=ROWS // GROUP)
    start_b = tl.load(start + b).to(tl.int32) + before
    begin, end = _keys(start_b, num_queries, WINDOW=WINDOW, CHUNK=CHUNK, SPLIT=SPLIT)
    if (num_queries <= 0) | (begin >= end):
        return
    # Rows after the last query repeat it, and are not stored.
    r = tl.arange(0, ROWS)
    n = tl.minimum(r // GROUP, num_queries - 1)
    token = tl.load(first + b) + before + n
    head = tl.program_id(1).to(tl.int64) * GROUP + r % GROUP
    query = _asked(inputs[0], inputs[3], token, head, WIDTH=WIDTH, WIDTH_2=WIDTH_2)
    found = _walk(
        query.to(FACTOR),
        start_b + n,
        inputs,
        table + b.to(tl.int64) * to_row,
        begin=begin,
        end=end,
        scale=scale,
        WINDOW=WINDOW,
        CHUNK=CHUNK,
        CAP=CAP,
        WIDTH=WIDTH,
        WIDTH_2=WIDTH_2,
        VALUE_WIDTH=VALUE_WIDTH,
        VALUE_2=VALUE_2,
        SIZE=SIZE,
        TILE=TILE,
    )
    kept, place = r // GROUP < num_queries, (b, token, head)
    _leave(outs, place, found, kept, GROUP=GROUP, SPLIT=SPLIT, VALUE_WIDTH=VALUE_WIDTH, VALUE_2=VALUE_2)


@triton.jit
def _asked(
    queries: tl.tensor,
    strides: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
) -> tl.tensor:
    d = tl.arange(0, WIDTH_2)
    to_token, to_head, to_lane = strides
    at = token[:, None] * to_token + head[:, None] * to_head + d[None, :] * to_lane
    return tl.load(queries + at, (d < WIDTH)[None, :], other=0)


@triton.jit
def _leave(
    outs: tl.tensor,
    place: tl.tensor,
    found: tl.tensor,
    kept: tl.tensor,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_2: tl.constexpr,
) -> None:
    b, token, head = place
    share, highest, total = found
    line = token * (tl.num_programs(1) * GROUP) + head
    if SPLIT is None:
        share = share / total[:, None]
    else:
        line = (b * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * (tl.num_programs(1) * GROUP) + head
        tl.store(outs[1] + line, highest, kept)
        tl.store(outs[2] + line, total, kept)
    v = tl.arange(0, VALUE_2)
    inside = kept[:, None] & (v < VALUE_WIDTH)[None, :]
    tl.store(outs[0] + line[:, None] * VALUE_WIDTH + v[None, :], share, inside)


@triton.jit
def _walk(
    query: tl.tensor,
    position: tl.tensor,
    inputs: tl.tensor,
    blocks: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_2: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The sum of values weighted by 2^(score - highest), the highest score, and the sum of the weights."""
    highest = tl.full((query.shape[0],), LOWEST, tl.float32)
    total = tl.zeros((query.shape[0],), tl.float32)
    share = tl.zeros((query.shape[0], VALUE_2), tl.float32)
    for tile in range(begin // TILE * TILE, end, TILE):
        i = tile + tl.arange(0, TILE)
        there = (i >= begin) & (i < end)
        block = tl.load(blocks + i // SIZE, there).to(tl.int64)
        key = _read(inputs[1], inputs[4], block, i % SIZE, there, query, WIDTH=WIDTH, WIDTH_2=WIDTH_2)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if CAP is not None:
            score = CAP - 2 * CAP / (tl.exp2(score) + 1)
        seen = there[None, :] & (i[None, :] <= position[:, None])
        if WINDOW is not None:
            seen &= i[None, :] > position[:, None] - WINDOW
        if CHUNK is not None:
            seen &= i[None, :] >= position[:, None] // CHUNK * CHUNK
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weight, 1)
        value = _read(inputs[2], inputs[5], block, i % SIZE, there, query, WIDTH=VALUE_WIDTH, WIDTH_2=VALUE_2)
        share = tl.dot(weight.to(query.dtype), value, share * shrink[:, None], input_precision=PRECISION)
        highest = higher
    return share, highest, total


@triton.jit
def _read(
    pool: tl.tensor,
    strides: tl.tensor,
    block: tl.tensor,
    slot: tl.tensor,
    there: tl.tensor,
    like: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
) -> tl.tensor:
    """Load the keys or values of some slots, 0 for masked slots, so that no masked number is NaN."""
    d = tl.arange(0, WIDTH_2)
    to_block, to_head, to_slot, to_lane = strides
    at = (block * to_block + tl.program_id(1) * to_head + slot * to_slot)[:, None] + d[None, :] * to_lane
    return tl.load(pool + at, there[:, None] & (d < WIDTH)[None, :], other=0).to(like.dtype)


@triton.jit
def _queries(first: tl.tensor, count: tl.tensor, num_rows: tl.tensor, QUERIES: tl.constexpr) -> tl.tensor:
    """Return the row of this program's tile, its queries before the tile, and those in it."""
    tile = tl.program_id(0)
    b = -1
    for start in range(0, num_rows, FOUND):
        row = start + tl.arange(0, FOUND)
        begun = row + tl.load(first + row, row < num_rows) // QUERIES <= tile
        b += tl.sum((begun & (row < num_rows)).to(tl.int32), 0)
    before = (tile - b - tl.load(first + b) // QUERIES) * QUERIES
    return b, before.to(tl.int32), tl.minimum(tl.load(count + b) - before, QUERIES).to(tl.int32)


@triton.jit
def _keys(
    position: tl.tensor,
    num_queries: tl.tensor,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
) -> tl.tensor:
    begin = _first_key(position, WINDOW=WINDOW, CHUNK=CHUNK)
    end = position + num_queries
    if SPLIT is not None:
        split = begin // SPLIT + tl.program_id(2)
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, split * SPLIT + SPLIT)
    return begin, end


@triton.jit
def _first_key(position: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    first = 0 if WINDOW is None else tl.maximum(position - WINDOW + 1, 0)
    return first if CHUNK is None else tl.maximum(position // CHUNK * CHUNK, first)


@triton.jit
def _merge(
    parts: tl.tensor,
    out: tl.tensor,
    spans: tl.tensor,
    num_splits: tl.tensor,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_2: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One program per row and query head: merge its splits, a few at a time, in a batch-invariant order."""
    b, h, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start, first = spans
    position = tl.load(start + b)
    num_parts = position // SPLIT - _first_key(position, WINDOW=WINDOW, CHUNK=CHUNK) // SPLIT + 1
    d = tl.arange(0, VALUE_2)
    highest = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    share = tl.zeros((VALUE_2,), tl.float32)
    for begin in range(0, num_parts, PARTS):
        n = begin + tl.arange(0, PARTS)
        there = n < num_parts
        line = (b.to(tl.int64) * num_splits + n) * num_heads + h
        reached = tl.load(parts[1] + line, there, other=LOWEST)
        higher = tl.maximum(highest, tl.max(reached, 0))
        weight = tl.exp2(reached - higher)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weight * tl.load(parts[2] + line, there, other=0), 0)
        inside = there[:, None] & (d < VALUE_WIDTH)[None, :]
        part = tl.load(parts[0] + line[:, None] * VALUE_WIDTH + d[None, :], inside, other=0)
        share = share * shrink + tl.sum(weight[:, None] * part, 0)
        highest = higher
    line = tl.load(first + b) * num_heads + h
    tl.store(out + line * VALUE_WIDTH + d, share / total, d < VALUE_WIDTH)
