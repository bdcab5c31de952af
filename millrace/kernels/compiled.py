"""Functions compiled for the CPU by numba, and bfloat16, which numba does not know, as its 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor


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
