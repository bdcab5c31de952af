"""y = x W^T + b on the CPU by generated machine code, for weights packed in the layout it reads.

M = rows, D = input width, N = output width, P = panels of a weight, C = columns of a panel, S = steps of a
panel, R = rows of one block of the computation.

A packed weight is W^T in panels, as `product_tile` takes them. While one panel is multiplied, the next is
prefetched. A row's bits do not depend on M, the other rows or the threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace.kernels.compiled import (
    NUMBERS,
    compiled,
    exponential,
    memory,
    number_of,
    put,
    readable,
    room,
)
from millrace.kernels.product_tile import FEATURES, PAIRS, PANEL_BYTES, multiply_rows
from millrace.kernels.team import bounds, cut, num_threads, share_out

# R.
CHUNK_ROWS = 64
BLOCK_ROWS = 512
# Least work of a part: multiplications, or numbers to copy.
PART_PRODUCT, PART_NUMBERS = 1 << 17, 1 << 16
# Steps of a panel to fill at a time.
FILLED_STEPS = 16

# Epilogue of a product: write it, add it to the output, or write silu of one half times the other.
# As numpy numbers, since numba would compile once for each constant.
WRITE, ADD, GATE = np.int64(0), np.int64(1), np.int64(2)

KEPT = {**NUMBERS, torch.float64: np.float64(0)}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the layout that `multiply` reads, padded with zeros to whole panels.

    bfloat16 stays bfloat16. For a gated pair `num_outputs` is the width of one half, and panels of two
    weights alternate, the gate (the input of silu) first.
    """

    panel_PSC: Tensor
    num_inputs: int
    num_outputs: int
    gated: bool = False


def usable(dtype: torch.dtype) -> bool:
    """Return whether this dtype has fast products here: x86 processors with AVX2 and fused multiply-add."""
    return dtype in KEPT and {"fma", "avx2"} <= FEATURES


def pack(*weights: Tensor, gated: bool = False) -> PackedWeight:
    """Pack weights [N, D] of one dtype, concatenated along N, into the layout that `multiply` reads.

    If gated, the panels of two weights of one shape alternate, so that one product computes silu of the first
    times the second. A bfloat16 weight of odd width is a ValueError on a processor that multiplies pairs.
    """
    dtype, (num_outputs, num_inputs) = weights[0].dtype, weights[0].shape
    each = 2 if dtype == torch.bfloat16 and PAIRS else 1
    if num_inputs % each:
        raise ValueError(f"a bfloat16 weight has {num_inputs} inputs; here it must be an even number")
    if not gated:
        weights = (torch.cat(weights) if len(weights) > 1 else weights[0],)
        num_outputs = len(weights[0])
    columns = PANEL_BYTES // max(4, dtype.itemsize)
    shape = (len(weights) * -(-num_outputs // columns), num_inputs // each, columns * each)
    panel_PSC = torch.empty(shape, dtype=dtype)
    for index, weight_ND in enumerate(x.detach().contiguous() for x in weights):
        lies = weight_ND.data_ptr(), panel_PSC.data_ptr()
        sizes = num_outputs, num_inputs // each
        # A pair is handled as one number of twice the width.
        number = np.uint32(0) if each == 2 else KEPT[dtype]
        _fill_all(lies, sizes, (*shape[:2], columns), (index, len(weights)), number, num_threads())
    return PackedWeight(panel_PSC, num_inputs, num_outputs, gated)


def product(x: Tensor, packed: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
    """Compute x W^T + b in the dtype of x, [..., N], without gradient; ValueError for a gated pair.

    A width or a dtype that differs is a ValueError too.
    """
    given = [packed.panel_PSC, x] if bias_N is None else [packed.panel_PSC, x, bias_N]
    if x.shape[-1] != packed.num_inputs or packed.gated or not readable(*given):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, dtypes are {[y.dtype for y in given]}; the weight has "
            f"{packed.num_inputs} inputs, must not be a gated pair, and all must be of one dtype"
        )
    if bias_N is not None:
        if bias_N.shape != (packed.num_outputs,):
            raise ValueError(
                f"bias_N has shape {tuple(bias_N.shape)}; the weight has {packed.num_outputs} outputs"
            )
        bias_N = bias_N.contiguous()
    kept, read, summed = kinds(x.dtype)
    y = torch.empty(*x.shape[:-1], packed.num_outputs, dtype=x.dtype)
    x = (x.float() if read.itemsize > kept.itemsize else x).contiguous()
    sizes = x.numel() // packed.num_inputs, packed.num_inputs, packed.num_outputs
    lies = x.data_ptr(), y.data_ptr()
    _product(lies, place_of(packed, bias_N), sizes, (kept, read, summed), num_threads())
    return y


def kinds(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Return numbers of the types of a product: weights and result, rows as they are read, accumulator."""
    kept = KEPT[dtype]
    if dtype == torch.bfloat16:
        return kept, kept if PAIRS else np.float32(0), np.float32(0)
    return kept, kept, kept


def place_of(packed: PackedWeight, bias_N: Tensor | None) -> tuple[int, ...]:
    """Return the addresses of a weight and its bias for `weight_at`; both must outlive the call."""
    bias = (0, 0) if bias_N is None else (bias_N.data_ptr(), len(bias_N))
    return packed.panel_PSC.data_ptr(), *packed.panel_PSC.shape, *bias


@compiled()
def weight_at(place: Any, kept: Any) -> Any:
    """Return the panels and the bias at these addresses; a bias of length 0 is none."""
    panel, num_panels, num_steps, width, bias, num_biases = place
    return memory(panel, (num_panels, num_steps, width), kept), memory(bias, (num_biases,), kept)


@compiled()
def _fill_all(lies: Any, sizes: Any, shape: Any, turn: Any, number: Any, threads: int) -> None:
    weight_NS, panel_PSC = memory(lies[0], sizes, number), memory(lies[1], shape, number)
    parts, members = cut(weight_NS.size // PART_NUMBERS, threads)
    share_out(_fill, (weight_NS, panel_PSC, turn, parts), parts, members)


@compiled()
def _fill(weight_NS: Any, panel_PSC: Any, turn: Any, num_parts: int, part: int) -> None:
    """Fill the panels of one weight, every n-th if n weights alternate; a width of whole steps."""
    first, every = turn
    low, high = bounds(len(panel_PSC) // every, num_parts, part)
    for index in range(low, high):
        _fill_panel(weight_NS, index * panel_PSC.shape[2], panel_PSC[index * every + first])


@compiled()
def _fill_panel(weight_NS: Any, first: int, panel_SC: Any) -> None:
    num_steps, columns = panel_SC.shape
    there = min(columns, len(weight_NS) - first)
    for s in range(num_steps if there < columns else 0):
        for c in range(columns):
            panel_SC[s, c] = 0
    # Some steps of all rows at a time, so that both sides stay in the cache; as many as the compiler unrolls.
    whole = num_steps - num_steps % FILLED_STEPS
    for low in range(0, whole, FILLED_STEPS):
        for c in range(there):
            row_S = weight_NS[first + c]
            for s in range(low, low + FILLED_STEPS):
                panel_SC[s, c] = row_S[s]
    for s in range(whole, num_steps):
        for c in range(there):
            panel_SC[s, c] = weight_NS[first + c, s]


@compiled()
def _product(lies: Any, place: Any, sizes: Any, kinds: Any, threads: int) -> None:
    (num_rows, num_inputs, num_outputs), (kept, read, summed) = sizes, kinds
    x_MD = memory(lies[0], (num_rows, num_inputs), read)
    y_MN = memory(lies[1], (num_rows, num_outputs), kept)
    share_product(x_MD, weight_at(place, kept), y_MN, WRITE, summed, threads)


@compiled()
def share_product(x_MD: Any, weight: Any, y_MN: Any, purpose: int, zero: Any, threads: int) -> None:
    """Run `multiply` on several threads."""
    panel_PSC, _ = weight
    parts, members = cut(panel_PSC.size * len(x_MD) // PART_PRODUCT, threads)
    parts = min(parts, len(panel_PSC))
    share_out(multiply, (x_MD, weight, y_MN, (purpose, zero), parts), parts, min(parts, members))


@compiled()
def multiply(x_MD: Any, weight: Any, y_MN: Any, then: Any, num_parts: int, part: int) -> None:
    """Compute one part of the columns of y.

    `weight` is panels and bias from `weight_at`; `then` is WRITE, ADD or GATE, and a number of the
    accumulator's type.
    """
    (panel_PSC, bias_N), (purpose, zero) = weight, then
    num_outputs = y_MN.shape[1]
    halves = 2 if purpose == GATE else 1
    columns = panel_PSC.shape[1] * panel_PSC.shape[2] // x_MD.shape[1]
    low, high = bounds(len(panel_PSC) // halves, num_parts, part)
    sum_HRC = room((halves, CHUNK_ROWS, columns), zero)
    for start in range(0, len(x_MD), BLOCK_ROWS):
        x_BD, y_BN = x_MD[start : start + BLOCK_ROWS], y_MN[start : start + BLOCK_ROWS]
        for index in range(low, high):
            begin = index * columns
            width = min(columns, num_outputs - begin)
            for first in range(0, len(x_BD), CHUNK_ROWS):
                last = min(first + CHUNK_ROWS, len(x_BD))
                for half in range(halves):
                    p = index * halves + half
                    soon_SC = panel_PSC[min(p + halves, len(panel_PSC) - 1)]
                    multiply_rows(x_BD[first:last], panel_PSC[p], sum_HRC[half], soon_SC)
                    if len(bias_N):
                        _add_bias(sum_HRC[half, : last - first], bias_N, half * num_outputs + begin, width)
                place = y_BN[first:last], begin, begin + width
                if purpose == GATE:
                    _gate(sum_HRC[0], sum_HRC[halves - 1], place)
                elif purpose == ADD:
                    _add(sum_HRC[0], place)
                else:
                    _write(sum_HRC[0], place)


@compiled()
def _add_bias(sum_RC: Any, bias_N: Any, begin: int, width: int) -> None:
    for r in range(len(sum_RC)):
        for c in range(width):
            sum_RC[r, c] += number_of(bias_N[begin + c])


# Each row is sliced separately: the compiler does not vectorize over a slice of a matrix. A call for each row
# would add reference counting.
@compiled()
def _write(x_RC: Any, place: Any) -> None:
    y_RN, begin, end = place
    for r in range(len(y_RN)):
        x_C, y_C = x_RC[r], y_RN[r][begin:end]
        for c in range(len(y_C)):
            put(y_C, c, x_C[c])


@compiled()
def _add(x_RC: Any, place: Any) -> None:
    y_RN, begin, end = place
    for r in range(len(y_RN)):
        x_C, y_C = x_RC[r], y_RN[r][begin:end]
        for c in range(len(y_C)):
            put(y_C, c, number_of(y_C[c]) + x_C[c])


@compiled()
def _gate(gate_RC: Any, x_RC: Any, place: Any) -> None:
    y_RN, begin, end = place
    for r in range(len(y_RN)):
        gate_C, x_C, y_C = gate_RC[r], x_RC[r], y_RN[r][begin:end]
        for c in range(len(y_C)):
            gate = np.float64(gate_C[c])
            power = exponential(-abs(gate))
            share = 1 / (1 + power)
            put(y_C, c, gate * (share if gate > 0 else power * share) * x_C[c])
