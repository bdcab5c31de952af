"""Generated machine code for a tile of a product: some rows by the columns of a panel, kept in registers.

A panel holds some columns of the right side, step by step. A step is a row of numbers, or a row of pairs if
the processor multiplies pairs of bfloat16. So every result is one chain of fused multiply-adds in the order
of the steps, independent of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, overload

from millrace.kernels.compiled import fetch, steps

# The features that numba compiles for: those of this processor, unless its settings name others.
LISTED = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
FEATURES = {name.removeprefix("+") for name in LISTED.split(",") if name.startswith("+")}
WIDE = "avx512f" in FEATURES
# Whether one instruction multiplies pairs of bfloat16 and adds them to a float32.
PAIRS = "avx512bf16" in FEATURES
# Bytes of a vector, and of the accumulators of a panel's columns for one row: several vectors.
VECTOR_BYTES = 64 if WIDE else 32
VECTORS = 2
PANEL_BYTES = VECTORS * VECTOR_BYTES
# Rows of a tile: 8 fill 16 of 32 vector registers, 4 fill 8 of 16. Each size divides the previous one.
TILE_ROWS = (8, 4, 2, 1) if WIDE else (4, 2, 1)
UNROLLED = (4, 1)
# Alignment of vector loads, in bytes: any address.
ALIGNED = 1
ADD_PAIRS = "llvm.x86.avx512bf16.dpbf16ps"
WORD = ir.IntType(32)


def multiply_rows(x_RD: Any, panel_SC: Any, sum_RC: Any, soon_SC: Any) -> None:
    """Write x @ panel over the first rows of `sum_RC`; meanwhile `soon_SC` is prefetched.

    Rows and steps are contiguous. If both sides are bfloat16, as uint16, a step is a pair of inputs.
    """
    each = 2 if x_RD.dtype == np.uint16 else 1
    panel_SCE = panel_SC.reshape(len(panel_SC), -1, each)
    x_RD, panel_SCE = (
        (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x for x in (x_RD, panel_SCE)
    )
    sum_RC[: len(x_RD)] = 0
    for d in range(x_RD.shape[1]):
        sum_RC[: len(x_RD)] += x_RD[:, d : d + 1] * panel_SCE[d // each, :, d % each]


@overload(multiply_rows, strict=False)
def _multiply_rows_compiled(x_RD: Any, panel_SC: Any, sum_RC: Any, soon_SC: Any) -> Callable[..., None]:
    return lambda x_RD, panel_SC, sum_RC, soon_SC: _multiply_in_tiles(x_RD, panel_SC, sum_RC, soon_SC)


@intrinsic
def _multiply_in_tiles(
    context: Any, left: Any, panel: Any, total: Any, soon: Any
) -> tuple[Any, Callable[..., Any]]:
    """Emit `multiply_rows`, one tile of rows at a time, which stays in registers for all steps."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [
            target.make_array(kind)(target, builder, value)
            for kind, value in zip(signature.args, arguments, strict=True)
        ]
        num_rows, _ = cgutils.unpack_tuple(builder, arrays[0].shape, 2)
        for rows, row in steps(builder, num_rows, TILE_ROWS):
            _tile(builder, arrays, row, rows)
        return target.get_dummy_value()

    return types.void(left, panel, total, soon), generate


def _tile(builder: Any, arrays: Any, row: Any, rows: int) -> None:
    left, panel, total, soon = arrays
    num_steps, _ = cgutils.unpack_tuple(builder, panel.shape, 2)
    number = total.data.type.pointee
    vector = ir.VectorType(number, VECTOR_BYTES // (8 if number == ir.DoubleType() else 4))
    pairs = left.data.type.pointee == ir.IntType(16)
    width = VECTORS * vector.count * (2 if pairs else 1)

    def index(number: int) -> Any:
        return ir.Constant(row.type, number)

    lefts = [_row(builder, left, builder.add(row, index(r))) for r in range(rows)]
    if pairs:
        lefts = [builder.bitcast(start, WORD.as_pointer()) for start in lefts]
    sums = [[cgutils.alloca_once(builder, vector) for _ in range(VECTORS)] for _ in range(rows)]
    for place in (place for line in sums for place in line):
        builder.store(ir.Constant(vector, None), place)
    # Each tile prefetches its part of the next panel, which spreads the memory traffic over the tiles.
    ahead = builder.udiv(builder.mul(row, num_steps), index(TILE_ROWS[0] * UNROLLED[0]))
    for unrolled, step in steps(builder, num_steps, UNROLLED):
        if unrolled > 1:
            there = builder.add(ahead, builder.udiv(step, index(unrolled)))
            fetch(builder, builder.gep(soon.data, [builder.mul(there, index(width))]), width)
        for u in range(unrolled):
            this = builder.add(step, index(u))
            start = builder.gep(panel.data, [builder.mul(this, index(width))])
            rights = [_right(builder, start, v, vector, pairs) for v in range(VECTORS)]
            for begin, line in zip(lefts, sums, strict=True):
                one = _everywhere(builder, builder.load(builder.gep(begin, [this])), vector.count)
                for right, place in zip(rights, line, strict=True):
                    builder.store(_added(builder, builder.load(place), one, right), place)
    for r, line in enumerate(sums):
        start = _row(builder, total, builder.add(row, index(r)))
        for v, place in enumerate(line):
            there = builder.bitcast(builder.gep(start, [WORD(v * vector.count)]), vector.as_pointer())
            builder.store(builder.load(place), there, align=ALIGNED)


def _row(builder: Any, array: Any, row: Any) -> Any:
    stride = cgutils.unpack_tuple(builder, array.strides, 2)[0]
    return cgutils.pointer_add(builder, array.data, builder.mul(row, stride))


def _right(builder: Any, start: Any, v: int, vector: Any, pairs: bool) -> Any:
    lanes, stored, bits = vector.count, start.type.pointee, ir.VectorType(WORD, vector.count)
    kind = bits if pairs else ir.VectorType(stored, lanes)
    place = builder.gep(start, [WORD(v * lanes * (2 if pairs else 1))])
    found = builder.load(builder.bitcast(place, kind.as_pointer()), align=ALIGNED)
    if pairs or stored != ir.IntType(16):
        return found
    # bfloat16 is the upper half of a float32.
    return builder.bitcast(builder.shl(builder.zext(found, bits), ir.Constant(bits, [16] * lanes)), vector)


def _everywhere(builder: Any, number: Any, lanes: int) -> Any:
    anything = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = builder.insert_element(anything, number, WORD(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(WORD, lanes), None))


def _added(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Emit total + left * right, rounded once; integers are pairs of bfloat16."""
    vector = total.type
    if left.type.element == WORD:
        pair = ir.VectorType(_BFloat(), 2 * vector.count)
        add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector, pair, pair]), f"{ADD_PAIRS}.{32 * vector.count}"
        )
        return builder.call(add, [total, builder.bitcast(left, pair), builder.bitcast(right, pair)])
    name = f"llvm.fma.v{vector.count}{vector.element.intrinsic_name}"
    add = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
    return builder.call(add, [left, right, total])


class _BFloat(ir.types.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)
