"""Functions compiled for the CPU by numba; bfloat16, which numba does not support, is passed as uint16."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.numpy_support import as_dtype
from torch import Tensor

# A number of each type, as `memory` takes it.
NUMBERS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}

LOG2_E = 1.4426950408889634
# log 2 as the sum of two numbers; the first times a small integer is exact.
LOG_2_HIGH, LOG_2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
# Adding this rounds a number to an integer, held in the lowest bits of the sum.
ROUND = 1.5 * 2**52
EXPONENT_BIAS, EXPONENT_SHIFT = np.uint64(1023), np.uint64(52)
# Below this an exponential counts as 0.
LOWEST = -700.0
# Bytes of a cache line, and the L2 locality hint of prefetch instructions: L1 would soon be full.
LINE_BYTES, SECOND_LEVEL = 64, 2
NAN_BITS = np.uint16(0x7FC0)
TAYLOR = tuple(1 / math.factorial(k) for k in range(12, -1, -1))


def compiled(*fastmath: str, inline: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that compiles a function to machine code which releases the GIL.

    The code is cached on disk if numba finds a writable folder. The cache is valid until the function's file
    or a file of this folder changes. Fast-math flags are such as `contract` (a * b + c rounded once) or
    `reassoc` (sums in another order). Without flags every operation is rounded as written.

    An `inline` function becomes a part of each compiled caller, with the caller's flags. This saves time
    where it calls large functions and has one caller: numba optimizes and translates a function together with
    all that it calls, and does so again for each caller.
    """
    # Division by 0 gives an infinity or NaN, as in torch; a check for it would prevent vectorization.
    options = {
        "nogil": True,
        "fastmath": set(fastmath),
        "error_model": "numpy",
        "inline": "always" if inline else "never",
    }

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            made = njit(cache=True, **options)(function)
        except RuntimeError:
            return njit(**options)(function)
        # By default numba would reuse cached code whenever the function's own file is unchanged.
        if hasattr(made, "_cache"):  # not with NUMBA_DISABLE_JIT
            kept = made._cache._cache_file
            kept._source_stamp = kept._source_stamp, _sources()
        return made

    return decorate


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether the code of a `compiled` function is cached on disk: numba found a writable folder."""
    return hasattr(function, "_cache") and hasattr(function._cache, "_cache_file")


@cache
def _sources() -> bytes:
    """Return a digest of this folder's files: their functions may be inlined into each other."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).digest()


def readable(*tensors: Tensor) -> bool:
    """Return whether memory can be read directly: on the CPU, of one dtype, not sharded or traced."""
    dtype = tensors[0].dtype
    for x in tensors:  # a loop, since this is called several times a layer
        if type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cpu or x.dtype is not dtype:
            return False
    return True


def array(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor as a contiguous array; bfloat16 as uint16."""
    x = x.detach().contiguous()
    return x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


def memory(address: int, shape: tuple[int, ...], number: Any) -> np.ndarray[Any, Any]:
    """Return the contiguous array at an address, with the dtype of `number`.

    Calling a compiled function with addresses takes half the time of calling it with arrays, and numpy holds
    no reference to the memory.
    """
    size = int(math.prod(shape)) * number.itemsize
    return np.frombuffer((ctypes.c_byte * size).from_address(int(address)), number.dtype).reshape(shape)


@overload(memory, strict=False)
def _memory_compiled(address: Any, shape: Any, number: Any) -> Callable[..., Any]:
    return lambda address, shape, number: carray(_pointer(address, number), shape)


@intrinsic
def _pointer(context: Any, address: Any, number: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(signature.return_type))

    return types.CPointer(number)(address, number), generate


def room(shape: tuple[int, ...], number: Any) -> np.ndarray[Any, Any]:
    """Allocate an uninitialized array with the dtype of `number`."""
    return np.empty(shape, number.dtype)


@overload(room, strict=False)
def _room_compiled(shape: Any, number: Any) -> Callable[..., Any]:
    dtype = as_dtype(number)
    return lambda shape, number: np.empty(shape, dtype)


def number_of(x: Any) -> Any:
    """Return the value of an array element; 16-bit elements are bfloat16."""
    return wide(x) if isinstance(x, np.uint16) else x


@overload(number_of, strict=False)
def _number_compiled(x: Any) -> Callable[..., Any]:
    return (lambda x: wide(x)) if x == types.uint16 else (lambda x: x)


def put(array: Any, index: int, x: Any) -> None:
    """Write a number in the dtype of the array."""
    array[index] = narrow(x) if array.dtype == np.uint16 else x


@overload(put, strict=False)
def _put_compiled(array: Any, index: Any, x: Any) -> Callable[..., None]:
    def narrowed(array: Any, index: Any, x: Any) -> None:
        array[index] = narrow(x)

    def as_it_is(array: Any, index: Any, x: Any) -> None:
        array[index] = x

    return narrowed if array.dtype == types.uint16 else as_it_is


@compiled()
def put_all(array_N: Any, x_N: Any) -> None:
    """Fill the array with the first numbers of x, in the dtype of the array."""
    for n in range(len(array_N)):
        put(array_N, n, number_of(x_N[n]))


@compiled()
def wide(bits: Any) -> Any:
    """Convert bfloat16, given as its 16 bits, to float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled()
def narrow(x: Any) -> Any:
    """Round float32 to the 16 bits of the nearest bfloat16, ties to even; every NaN becomes the same NaN."""
    bits = np.float32(x).view(np.uint32)
    half = np.uint32(0x7FFF) + (np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    # For some NaN bit patterns the sum would be a number.
    return np.uint16(np.uint32(bits + half) >> np.uint32(16)) if x == x else NAN_BITS


@compiled("contract")
def exponential(x: float) -> float:
    """e^x of a float64 up to 700, to within rounding, in vectorizable operations; NaN stays NaN."""
    # x = n log 2 + r with |r| < 0.35: e^x is 2^n times a polynomial in r.
    inside = LOWEST if x < LOWEST else x
    rounded = inside * LOG2_E + ROUND
    n = rounded - ROUND
    r = inside - n * LOG_2_HIGH - n * LOG_2_LOW
    y = 0.0
    for k in range(len(TAYLOR)):
        y = y * r + TAYLOR[k]
    exponent = np.float64(rounded).view(np.uint64) + EXPONENT_BIAS
    power = np.uint64(exponent << EXPONENT_SHIFT).view(np.float64)
    return 0.0 if x < LOWEST else y * power


def steps(builder: Any, length: Any, sizes: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    """Emit loops over a length in steps of the first size, then of the other sizes over the remainder."""
    done = ir.Constant(length.type, 0)
    for size in sizes:
        step = ir.Constant(length.type, size)
        end = builder.mul(builder.udiv(length, step), step)
        with cgutils.for_range_slice(builder, done, end, step) as (index, _):
            yield size, index
        done = end


def fetch(builder: Any, start: Any, count: int) -> None:
    """Emit prefetches of the cache lines that hold `count` numbers from `start` on."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    bits = int(start.type.pointee.intrinsic_name[1:])  # of i16, f32 or f64
    for first in range(0, count, LINE_BYTES * 8 // bits):
        there = builder.bitcast(builder.gep(start, [word(first)]), byte)
        builder.call(prefetch, [there, word(0), word(SECOND_LEVEL), word(1)])
