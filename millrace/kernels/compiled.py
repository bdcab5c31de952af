"""Functions compiled for the CPU by numba, and bfloat16, which numba does not know, as its 16 bits."""

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

# A number of each kind, as `memory` takes it.
NUMBERS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}

LOG2_E = 1.4426950408889634
# log 2 in two numbers, of which the first times a small integer is exact.
LOG_2_HIGH, LOG_2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
# A number plus this is rounded to an integer, which then stands in the lowest bits.
ROUND = 1.5 * 2**52
EXPONENT_BIAS, EXPONENT_SHIFT = np.uint64(1023), np.uint64(52)
# Below this an exponential is taken for 0.
LOWEST = -700.0
# A line of the cache, and the second level, as prefetch instructions count: the first would soon be full.
LINE_BYTES, SECOND_LEVEL = 64, 2
NAN_BITS = np.uint16(0x7FC0)
TAYLOR = tuple(1 / math.factorial(k) for k in range(12, -1, -1))


def compiled(*fastmath: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes machine code which lets other threads run.

    The code is kept on disk where numba finds a folder it may write to, until the function's file or one in
    this folder changes.

    Args:
        fastmath: liberties the compiler may take, such as `contract` (a * b + c rounded once) or `reassoc`
            (sums in another order). None: every operation is rounded as written.
    """
    # Division by 0 gives an infinity or NaN as everywhere else, and no check for it stops the use of vectors.
    options = {"nogil": True, "fastmath": set(fastmath), "error_model": "numpy"}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            made = njit(cache=True, **options)(function)
        except RuntimeError:
            return njit(**options)(function)
        # numba would take code from the disk whenever the function's own file is as it was then.
        if hasattr(made, "_cache"):  # not with NUMBA_DISABLE_JIT
            kept = made._cache._cache_file
            kept._source_stamp = kept._source_stamp, _sources()
        return made

    return decorate


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether a function that `compiled` made is kept on disk: numba found a folder that it may write to."""
    return hasattr(function, "_cache") and hasattr(function._cache, "_cache_file")


@cache
def _sources() -> bytes:
    """A digest of this folder's files, whose functions may be part of any other's code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).digest()


def readable(*tensors: Tensor) -> bool:
    """Whether their memory may be read as it is: on the CPU, of one dtype, not sharded or traced."""
    dtype = tensors[0].dtype
    for x in tensors:  # a loop, since this is asked several times a layer
        if type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cpu or x.dtype is not dtype:
            return False
    return True


def array(x: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a tensor, contiguous; bfloat16 as uint16."""
    x = x.detach().contiguous()
    return x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


def memory(address: int, shape: tuple[int, ...], number: Any) -> np.ndarray[Any, Any]:
    """The contiguous array at an address, of numbers of the kind of `number`.

    A compiled function that takes addresses is called in half the time of one that takes arrays, and numpy
    holds on to nothing.
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
    """An array of numbers of the kind of `number`, with anything in it."""
    return np.empty(shape, number.dtype)


@overload(room, strict=False)
def _room_compiled(shape: Any, number: Any) -> Callable[..., Any]:
    dtype = as_dtype(number)
    return lambda shape, number: np.empty(shape, dtype)


def number_of(x: Any) -> Any:
    """What a number of an array stands for; one of 16 bits is a bfloat16."""
    return wide(x) if isinstance(x, np.uint16) else x


@overload(number_of, strict=False)
def _number_compiled(x: Any) -> Callable[..., Any]:
    return (lambda x: wide(x)) if x == types.uint16 else (lambda x: x)


def put(array: Any, index: int, x: Any) -> None:
    """Write a number as the array keeps it."""
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
    """Write the numbers that stand at the beginning of x as the array keeps them."""
    for n in range(len(array_N)):
        put(array_N, n, number_of(x_N[n]))


@compiled()
def wide(bits: Any) -> Any:
    """The float32 that 16 bits of bfloat16 stand for."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled()
def narrow(x: Any) -> Any:
    """The 16 bits of the bfloat16 next to a float32, the even one of two that are as near; NaN is one NaN."""
    bits = np.float32(x).view(np.uint32)
    half = np.uint32(0x7FFF) + (np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    # Of some NaN the sum would be a number.
    return np.uint16(np.uint32(bits + half) >> np.uint32(16)) if x == x else NAN_BITS


@compiled("contract")
def exponential(x: float) -> float:
    """e^x of a float64 up to 700 to within rounding, in operations that run on vectors; NaN stays NaN."""
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
    """Machine code for loops over a length in steps of the first size, and of the others what that leaves."""
    done = ir.Constant(length.type, 0)
    for size in sizes:
        step = ir.Constant(length.type, size)
        end = builder.mul(builder.udiv(length, step), step)
        with cgutils.for_range_slice(builder, done, end, step) as (index, _):
            yield size, index
        done = end


def fetch(builder: Any, start: Any, count: int) -> None:
    """Machine code that asks for the lines in which so many numbers begin."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    bits = int(start.type.pointee.intrinsic_name[1:])  # of i16, f32 or f64
    for first in range(0, count, LINE_BYTES * 8 // bits):
        there = builder.bitcast(builder.gep(start, [word(first)]), byte)
        builder.call(prefetch, [there, word(0), word(SECOND_LEVEL), word(1)])
