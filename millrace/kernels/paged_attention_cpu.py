"""Batch-invariant attention over the paged pool, compiled for the CPU.

T = packed query tokens, B = rows, H = query heads, J = key heads, G = query heads that share a key head,
K = width of queries and keys, V = width of values, P = blocks of the pool, S = slots of a block, C = blocks
of the longest row, L = positions, M, N = rows and columns of any matrix.

An item is one query token at one key head. It reads the pool in place and is computed independently: scores
of all positions, their maximum, exponentials and sum, then values. Every sum runs in the order of head width
or of positions, so no bit of a result depends on the batch, on how a prompt was cut into chunks, on the size
and location of blocks, or on the number of threads.

Between steps the pool is evicted from the cache, and each block is on another page. So a product prefetches
the cache lines of another block while it reads its own: the product of keys prefetches the values of their
block, the product of values the keys of the next item.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numpy.typing import NDArray
from torch import Tensor

from millrace.kernels.compiled import array, compiled, exponential, fetch, steps
from millrace.kernels.paged_attention import PagedRows
from millrace.kernels.team import bounds, cuts, share_out

# Partial sums of the exponentials: position i is added to sum i % 16, independent of its block.
LANES = 16
# Tiles of a product: several vectors, to hide the latency of an addition. Each size divides the previous one.
TILE_HEADS = (4, 2, 1)
TILE_LANES = (32, 16, 4, 1)
# Fixed cost of an item, in positions.
ITEM_WORK = 16
# Least work of a part: positions times query heads times head width.
PART_WORK = 1 << 16

# Window or chunk for "no limit".
NO_LIMIT = sys.maxsize

# Alignment of vector loads, in bytes: any address.
ALIGNED = 1

DTYPES = (torch.bfloat16, torch.float32, torch.float64)

Array = NDArray[Any]
Arrays = tuple[Array, ...]


def store_kv(
    key_TJK: Tensor, value_TJK: Tensor, key_PJSK: Tensor, value_PJSK: Tensor, slot_T: Tensor
) -> None:
    """Write each token's key and value into its slot; tokens with slot -1 are skipped.

    A pool without the layout of `new_pool`, or without such a slot, is a ValueError; the tokens before it are
    already stored then.
    """
    pools = pool_arrays(key_PJSK, value_PJSK)
    news = tuple(array(new.to(key_PJSK.dtype)) for new in (key_TJK, value_TJK))
    slot = _store(news, pools, slot_T.contiguous().numpy())
    if slot >= 0:
        num_blocks, size = pools[1].shape[0], pools[1].shape[2]
        raise ValueError(f"slot_T holds {slot}; the pool has {num_blocks} blocks of {size} slots")


def paged_attention(
    query_THK: Tensor,
    key_PJSK: Tensor,
    value_PJSK: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute `paged_attention_plain`; float32 and bfloat16 may be mixed, and the pool is never copied.

    A dtype that does not fit, a pool without the layout of `new_pool`, and a row that points outside the pool
    or the queries are a ValueError.
    """
    if query_THK.dtype not in DTYPES or (query_THK.dtype == torch.float64) != (
        key_PJSK.dtype == torch.float64
    ):
        raise ValueError(
            f"query_THK is {query_THK.dtype} and the pool {key_PJSK.dtype}; on the CPU both are float64, or "
            "each is float32 or bfloat16"
        )
    query = array(query_THK.to(torch.promote_types(query_THK.dtype, torch.float32)))
    pools = pool_arrays(key_PJSK, value_PJSK)
    tables = tuple(x.contiguous().numpy() for x in (rows.block_BC, rows.start_B, rows.first_B, rows.count_B))
    limits = NO_LIMIT if window is None else window, NO_LIMIT if chunk is None else chunk
    total = work(tables, pools, len(query), limits)
    if total < 0:
        raise outside(rows, -1 - total, len(query), (len(key_PJSK), key_PJSK.shape[2]))
    out = np.empty_like(query, shape=(*query.shape[:2], pools[1].shape[3]))
    options = limits, query.dtype.type(scale), float(softcap or 0)
    most = total * (query.shape[1] // pools[1].shape[1]) * query.shape[2] // PART_WORK
    num_parts, num_members = cuts(most)
    _attend_all(query, out, (pools, tables), options, (total, num_parts), num_members)
    return torch.from_numpy(out).to(query_THK.dtype)


def outside(rows: PagedRows, b: int, num_queries: int, pool: tuple[int, int]) -> ValueError:
    """Return the error for row `b`, which is out of range; `pool` is the number of blocks and their slots."""
    return ValueError(
        f"row {b} has {rows.count_B[b]} queries at {rows.first_B[b]}, the first at position "
        f"{rows.start_B[b]}, and blocks {rows.block_BC[b].tolist()}; there are {num_queries} queries and "
        f"{pool[0]} blocks of {pool[1]}"
    )


def pool_arrays(key_PJSK: Tensor, value_PJSK: Tensor) -> tuple[Array, Array]:
    """Return keys [P J K S] and values [P J S K] in their memory layout."""
    return array(stored_keys(key_PJSK, value_PJSK)), array(value_PJSK)


def stored_keys(key_PJSK: Tensor, value_PJSK: Tensor) -> Tensor:
    """Check that keys and values have the layout of `new_pool`; return the keys [P J K S]."""
    key_PJKS = key_PJSK.transpose(2, 3)
    if not (key_PJKS.is_contiguous() and value_PJSK.is_contiguous()):
        raise ValueError(
            f"the pool's keys have strides {key_PJSK.stride()} and its values {value_PJSK.stride()}; "
            "make it with new_pool"
        )
    return key_PJKS


def add_product(x_GM: Array, matrix_MN: Array, y_GN: Array, soon_MN: Array | None = None) -> None:
    """Add x @ matrix to y, row by row; a matrix of uint16 holds the bits of bfloat16.

    Meanwhile `soon_MN`, if given, is prefetched: as many bytes as the matrix has.
    """
    for x_G, row_N in zip(x_GM.T, matrix_MN, strict=True):
        if row_N.dtype == np.uint16:
            row_N = (row_N.astype(np.uint32) << 16).view(np.float32)
        y_GN += x_G[:, None] * row_N


@overload(add_product, strict=False)
def _add_product_compiled(x_GM: Any, matrix_MN: Any, y_GN: Any, soon_MN: Any = None) -> Callable[..., None]:
    return lambda x_GM, matrix_MN, y_GN, soon_MN=None: _add_product_in_tiles(x_GM, matrix_MN, y_GN, soon_MN)


@intrinsic
def _add_product_in_tiles(
    context: Any, x: Any, matrix: Any, y: Any, soon: Any
) -> tuple[Any, Callable[..., Any]]:
    """Emit `add_product`, one tile of y at a time, which stays in registers for all rows of the matrix."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pairs = zip(signature.args, arguments, strict=True)
        arrays: Any = tuple(
            target.make_array(kind)(target, builder, value) if isinstance(kind, types.Array) else None
            for kind, value in pairs
        )
        (num_heads, _), (_, width) = (cgutils.unpack_tuple(builder, array.shape, 2) for array in arrays[:2])
        for heads, head in steps(builder, num_heads, TILE_HEADS):
            for lanes, column in steps(builder, width, TILE_LANES):
                _add_tile(builder, arrays, (head, column), (heads, lanes))
        return target.get_dummy_value()

    return types.void(x, matrix, y, soon), generate


def _add_tile(builder: Any, arrays: Any, corner: tuple[Any, Any], tile: tuple[int, int]) -> None:
    """Emit code for one tile of y, heads by lanes, from a corner (head, column) on."""
    (x, matrix, y, soon), (head, column), (heads, lanes) = arrays, corner, tile
    height, width = cgutils.unpack_tuple(builder, matrix.shape, 2)
    number, stored = y.data.type.pointee, matrix.data.type.pointee
    vector, bits = ir.VectorType(number, lanes), ir.VectorType(ir.IntType(32), lanes)

    def row_of(array: Any, number_of: int) -> Any:
        stride = cgutils.unpack_tuple(builder, array.strides, 2)[0]
        offset = builder.mul(builder.add(head, ir.Constant(head.type, number_of)), stride)
        return cgutils.pointer_add(builder, array.data, offset)

    def vector_at(start: Any, element: Any) -> Any:
        return builder.bitcast(start, ir.VectorType(element, lanes).as_pointer())

    rows = [row_of(x, h) for h in range(heads)]
    places = [vector_at(builder.gep(row_of(y, h), [column]), number) for h in range(heads)]
    totals = [cgutils.alloca_once(builder, vector) for _ in range(heads)]
    for place, total in zip(places, totals, strict=True):
        builder.store(builder.load(place, align=ALIGNED), total)
    with cgutils.for_range(builder, height) as loop:
        place = builder.add(builder.mul(loop.index, width), column)
        start = builder.gep(matrix.data, [place])
        if soon is not None:
            fetch(builder, builder.gep(soon.data, [place]), lanes)
        right = builder.load(vector_at(start, stored), align=ALIGNED)
        if stored == ir.IntType(16):
            right = builder.shl(builder.zext(right, bits), ir.Constant(bits, [16] * lanes))
            right = builder.bitcast(right, vector)
        for row, total in zip(rows, totals, strict=True):
            left = ir.Constant(vector, ir.Undefined)
            left = builder.insert_element(
                left, builder.load(builder.gep(row, [loop.index])), ir.IntType(32)(0)
            )
            left = builder.shuffle_vector(left, left, ir.Constant(bits, None))
            product = builder.fmul(left, right, flags=("contract",))
            builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    for place, total in zip(places, totals, strict=True):
        builder.store(builder.load(total), place, align=ALIGNED)


@compiled("contract")
def _softmax(score_L: Array, start: int, stop: int, softcap: float) -> None:
    """exp(score - highest score) from `start` to `stop`, in place; 0 outside."""
    if softcap > 0:
        for i in range(start, stop):
            z = np.float64(score_L[i]) / softcap
            e = exponential(-2 * abs(z))
            tanh = (1 - e) / (1 + e)
            score_L[i] = softcap * (tanh if z > 0 else -tanh)
    highest = score_L[start]
    for i in range(start, stop):
        highest = score_L[i] if score_L[i] > highest else highest
    # Scores of masked tokens and of slots that were never written, which may hold NaN.
    for i in range(start):
        score_L[i] = -np.inf
    for i in range(stop, len(score_L)):
        score_L[i] = -np.inf
    for i in range(len(score_L)):
        score_L[i] = exponential(np.float64(score_L[i] - highest))


@compiled("contract")
def _first(stop: int, limits: tuple[int, int]) -> int:
    window, chunk = limits
    return max(0, stop - window, (stop - 1) // chunk * chunk)


@compiled("contract")
def _item(
    query_GK: Array,
    pools: Arrays,
    place: tuple[Array, int, int, int],
    after: tuple[Array, int, int, int],
    softcap: float,
    into: tuple[Array, Array, Array, Array],
) -> None:
    """Compute one item; softcap 0 is none.

    Queries are times scale. `place` has the row's blocks [C], the key head, and the range (begin, end) of
    visible positions; `after` is that of the next item, to prefetch its keys. `into` has the result [G V],
    zeros; buffers for scores [G L]; ones [1 L/LANES]; buffer for sums [1 LANES].
    """
    (key_PJKS, value_PJSK), (block_C, j, start, stop) = pools, place
    after_C, after_j, after_start, after_stop = after
    out_GK, score_GL, one_1L, sum_1N = into
    group, width = out_GK.shape
    size = value_PJSK.shape[2]
    blocks = range(start // size, -(-stop // size))
    for c in blocks:
        score_GS = score_GL[:, c * size : (c + 1) * size]
        score_GS[:] = 0
        add_product(query_GK, key_PJKS[block_C[c], j], score_GS, value_PJSK[block_C[c], j])
    # Whole groups of lanes, so that a position is added to the same partial sum wherever its window begins.
    low, high = start // LANES, -(-stop // LANES)
    for g in range(group):
        score_L = score_GL[g, low * LANES : high * LANES]
        _softmax(score_L, start - low * LANES, stop - low * LANES, softcap)
    for c in blocks:
        head, tail = max(start, c * size), min(stop, (c + 1) * size)
        value_NK = value_PJSK[block_C[c], j, head - c * size : tail - c * size]
        soon_KS = key_PJKS[block_C[c], j]
        if after_start // size <= c < -(-after_stop // size):
            soon_KS = key_PJKS[after_C[c], after_j]
        add_product(score_GL[:, head:tail], value_NK, out_GK, soon_KS)
    for g in range(group):
        sum_1N[:] = 0
        share_LN = score_GL[g, low * LANES : high * LANES].reshape(high - low, LANES)
        add_product(one_1L[:, : high - low], share_LN, sum_1N)
        total = sum_1N[0, 0]
        for lane in range(1, LANES):
            total += sum_1N[0, lane]
        for k in range(width):
            out_GK[g, k] /= total


@compiled("contract")
def _store(news: Arrays, pools: Arrays, slot_T: Array) -> int:
    """Fill the slots; return a slot that the pool does not have, or -1."""
    (key_TJK, value_TJK), (key_PJKS, value_PJSK) = news, pools
    num_blocks, num_heads, size, value_width = value_PJSK.shape
    for t in range(len(slot_T)):
        block, slot = divmod(slot_T[t], size)
        if block >= num_blocks:
            return slot_T[t]
        if block >= 0:
            for j in range(num_heads):
                for k in range(value_width):
                    value_PJSK[block, j, slot, k] = value_TJK[t, j, k]
                for k in range(key_PJKS.shape[2]):
                    key_PJKS[block, j, k, slot] = key_TJK[t, j, k]
    return -1


@compiled("contract")
def work(rows: Arrays, pools: Arrays, num_queries: int, limits: tuple[int, int]) -> int:
    """Return the cost of all items, in positions; -1 - b if row b points outside the pool or the queries."""
    block_BC, start_B, first_B, count_B = rows
    num_blocks, num_heads, size, _ = pools[1].shape
    total = 0
    for b in range(len(start_B)):
        stop = start_B[b] + count_B[b]
        if start_B[b] < 0 or first_B[b] < 0 or first_B[b] + count_B[b] > num_queries:
            return -1 - b
        for c in range(_first(start_B[b] + 1, limits) // size, -(-stop // size)):
            if c >= block_BC.shape[1] or not 0 <= block_BC[b, c] < num_blocks:
                return -1 - b
        for end in range(start_B[b] + 1, stop + 1):
            total += num_heads * (end - _first(end, limits) + ITEM_WORK)
    return total


@compiled("contract")
def attend(
    query_THK: Array, out_THK: Array, lies: tuple[Arrays, Arrays], options: Any, whole: Any, part: int
) -> None:
    """Compute the items of one part; `lies` is (pools, rows), `whole` is (total work, number of parts)."""
    (pools, rows), (total, num_parts) = lies, whole
    low, high = bounds(total, num_parts, part)
    block_BC, start_B, first_B, count_B = rows
    _, num_heads, size, _ = pools[1].shape
    group, width = query_THK.shape[1] // num_heads, query_THK.shape[2]
    limits, scale, softcap = options
    longest = block_BC.shape[1] * size + LANES
    query_GK = np.empty((group, width), query_THK.dtype)
    score_GL = np.empty((group, longest), query_THK.dtype)
    one_1L, sum_1N = np.ones((1, longest // LANES), query_THK.dtype), np.empty((1, LANES), query_THK.dtype)
    work = 0
    for b in range(len(start_B)):
        next_b = min(b + 1, len(start_B) - 1)
        for i in range(count_B[b]):
            t, stop = first_B[b] + i, start_B[b] + i + 1
            first = _first(stop, limits)
            for j in range(num_heads):
                if low <= work < high:
                    asked_GK = query_THK[t, j * group :]
                    out_GK = out_THK[t, j * group : (j + 1) * group]
                    for g in range(group):
                        for k in range(width):
                            query_GK[g, k] = asked_GK[g, k] * scale
                        for k in range(out_GK.shape[1]):
                            out_GK[g, k] = 0
                    place = block_BC[b], j, first, stop
                    # The next key head, or the first one of the next row: keys of further tokens of this row
                    # are in the cache.
                    n, end = (b, stop) if j + 1 < num_heads else (next_b, start_B[next_b] + 1)
                    after = block_BC[n], (j + 1) % num_heads, _first(end, limits), end
                    into = out_GK, score_GL, one_1L, sum_1N
                    _item(query_GK, pools, place, after, softcap, into)
                work += stop - first + ITEM_WORK


@compiled("contract")
def _attend_all(query: Array, out: Array, lies: Any, options: Any, whole: Any, num_members: int) -> None:
    share_out(attend, (query, out, lies, options, whole), whole[1], num_members)
