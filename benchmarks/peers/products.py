"""The quickest of torch's ways to make one matrix product on this machine.

M = rows, D = input width, N = output width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[[], object]
TRIES = 3


def quickest(calls: Sequence[Call]) -> Call:
    """The call that takes the least time in its best of some tries, after one to warm up."""
    if len(calls) == 1:
        return calls[0]
    for call in calls:
        call()
    return min(calls, key=lambda call: min(_seconds(call) for _ in range(TRIES)))


def product(x_MD: Tensor, weight_ND: Tensor) -> Call:
    """The product x W^T by what is quickest: `F.linear`, which is MKL for float32, or on the CPU oneDNN.

    On a processor without AVX-512, oneDNN has no product in bfloat16.
    """
    calls: list[Call] = [lambda: F.linear(x_MD, weight_ND)]
    if x_MD.device.type == "cpu" and (x_MD.dtype != torch.bfloat16 or has_bf16()):
        calls.append(lambda: torch.ops.mkldnn._linear_pointwise(x_MD, weight_ND, None, "none", [], ""))
    return quickest(calls)


def has_bf16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _seconds(call: Call) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s
