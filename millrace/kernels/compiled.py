"""Functions compiled for the CPU by numba, and bfloat16, which numba does not know, as its 16 bits."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

# A number of each kind, as `memory` takes it.
NUMBERS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}


def compiled(*fastmath: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes machine code which lets other threads run.

    The code is kept on disk where numba finds a folder it may write to.

    Args:
        fastmath: liberties the compiler may take, such as `contract` (a * b + c rounded once) or `reassoc`
            (sums in another order). None: every operation is rounded as written.
    """
    # Division by 0 gives an infinity or NaN as everywhere else, and no check for it stops the use of vectors.
    options = {"nogil": True, "fastmath": set(fastmath), "error_model": "numpy"}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:
            return njit(**options)(function)

    return decorate


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
    size = math.prod(shape) * number.itemsize
    return np.frombuffer((ctypes.c_byte * size).from_address(address), number.dtype).reshape(shape)


@overload(memory, strict=False)
def _memory_compiled(address: Any, shape: Any, number: Any) -> Callable[..., Any]:
    return lambda address, shape, number: carray(_pointer(address, number), shape)


@intrinsic
def _pointer(context: Any, address: Any, number: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(signature.return_type))

    return types.CPointer(number)(address, number), generate


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
def wide(bits: Any) -> Any:
    """The float32 that 16 bits of bfloat16 stand for."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled()
def narrow(x: Any) -> Any:
    """The 16 bits of the bfloat16 next to a float32, the even one of two that are as near."""
    bits = np.float32(x).view(np.uint32)
    half = np.uint32(0x7FFF) + (np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + half) >> np.uint32(16))
