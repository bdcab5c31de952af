"""Compile the CPU kernels before their first use, in several processes.

Numba compiles a kernel at its first call with given dtypes, and caches it on disk. Here each kernel is called
with tiny arguments of every dtype that a run or an engine uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from numba.core import event
from torch import Tensor

from millrace.kernels import (
    linear_scan_cpu,
    packed_attention_cpu,
    paged_attention_cpu,
    product_cpu,
    rotary,
    sampling_cpu,
)
from millrace.kernels.compiled import is_kept
from millrace.kernels.decode import Layers, LayerWeights
from millrace.kernels.norm import rms_norm
from millrace.kernels.paged_attention import PagedRows, new_pool

NARROW = (torch.float32, torch.bfloat16)
WIDE = (torch.float32, torch.float64)
EVERY = (torch.float32, torch.bfloat16, torch.float64)
SCALE, EPS = 0.5, 1e-6


class KernelsNotKeptError(RuntimeError):
    """Compiled kernels cannot be cached on disk, so every process would compile them again."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """Compilation of a group of kernels: `num_compiled` were not on disk; `seconds` is wall-clock time."""

    group: str
    num_compiled: int
    seconds: float


def warm(num_workers: int) -> Iterator[Warmed]:
    """Compile all kernels, the costliest group first; yield each group when it is done.

    One process compiles all kernels of a file: two would overwrite each other's index on disk. One worker
    compiles in this process. Without a writable cache folder it raises a KernelsNotKeptError.
    """
    if not is_kept(product_cpu.multiply):
        raise KernelsNotKeptError(
            "compiled kernels cannot be kept: neither millrace's folder nor the user's cache folder can be "
            "written to; set NUMBA_CACHE_DIR to a folder that can"
        )
    if num_workers == 1:
        yield from map(warm_group, GROUPS)
        return
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(warm_group, GROUPS)


def warm_group(name: str) -> Warmed:
    """Compile the kernels of one group in this process."""
    started_s = time.perf_counter()
    with counted() as compiled:
        GROUPS[name]()
    return Warmed(name, len(compiled), time.perf_counter() - started_s)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the names of the functions that numba compiles inside the context, as each begins."""

    class Names(event.Listener):
        def on_start(self, event: event.Event) -> None:
            function = event.data["dispatcher"].py_func
            names.append(f"{function.__module__}.{function.__qualname__}")

        def on_end(self, event: event.Event) -> None:
            pass

    names: list[str] = []
    with event.install_listener("numba:compile", Names()):
        yield names


def _numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).to(dtype)


def _rows(num_tokens: int, blocks: Tensor) -> PagedRows:
    zero, count = torch.zeros(1, dtype=torch.int64), torch.tensor([num_tokens])
    return PagedRows(blocks, zero, zero, count, torch.arange(num_tokens), num_tokens, num_tokens)


def _pool(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return new_pool(1, 1, 4, 8, dtype=dtype, device=torch.device("cpu"))


BLOCKS = torch.zeros(1, 1, dtype=torch.int32)


def _decode() -> None:
    for dtype in NARROW:
        if product_cpu.usable(dtype):
            shapes = (24, 8), (8, 8), (16, 8), (8, 16)
            weights = [_numbers(*shape, dtype=dtype) for shape in shapes]
            given, attended, mixed = (product_cpu.pack(weights[index]) for index in (0, 1, 3))
            gate = product_cpu.pack(weights[2], weights[2], gated=True)
            one = torch.ones(8, dtype=dtype)
            layer = LayerWeights(
                (one, one), (one, one), (EPS,) * 3, (given, attended, gate, mixed), (None,) * 4, SCALE
            )
            angles = _numbers(2, 8, dtype=dtype), _numbers(2, 8, dtype=dtype)
            Layers([layer], one, eps=EPS)(
                _numbers(2, 8, dtype=dtype), angles, [_pool(dtype)], _rows(2, BLOCKS)
            )


def _sampling() -> None:
    for dtype in WIDE:
        logit_NV = _numbers(2, 8, dtype=dtype)
        temperature_N, half_N = torch.ones(2, dtype=dtype), torch.full((2,), 0.5, dtype=torch.float64)
        sampling_cpu.sample(logit_NV, temperature_N, half_N)
        sampling_cpu.row_logprob(logit_NV, torch.tensor([0, 1]), temperature_N)
        sampling_cpu.truncate(logit_NV, temperature_N, torch.tensor([4, 4]), half_N, 0 * half_N)


def _paged_attention() -> None:
    for dtype in EVERY:
        pools, new = _pool(dtype), _numbers(2, 1, 8, dtype=dtype)
        paged_attention_cpu.store_kv(new, new, *pools, torch.arange(2))
        paged_attention_cpu.paged_attention(new, *pools, _rows(2, BLOCKS), scale=SCALE)


def _packed_attention() -> None:
    segments = torch.arange(2)[None], torch.tensor([2]), torch.tensor([0])
    for dtype in WIDE:
        query, key, value = (_numbers(2, 1, 8, dtype=dtype).requires_grad_() for _ in range(3))
        packed_attention_cpu.short_attention(query, key, value, segments, scale=SCALE).sum().backward()


def _products() -> None:
    for dtype in EVERY:
        if product_cpu.usable(dtype):
            product_cpu.product(_numbers(2, 8, dtype=dtype), product_cpu.pack(_numbers(8, 8, dtype=dtype)))


def _scans() -> None:
    for dtype in WIDE:
        row_T, decay_B = _numbers(4, dtype=dtype), torch.full((1,), 0.9, dtype=torch.float64)
        for reverse in (False, True):
            linear_scan_cpu.linear_scan(row_T, row_T, torch.empty_like(row_T), reverse=reverse)
        linear_scan_cpu.gae(
            row_T,
            row_T,
            torch.tensor([4]),
            (torch.empty_like(row_T), torch.empty_like(row_T)),
            gamma=1.0,
            decay_B=decay_B,
            bootstrap_B=torch.zeros(1, dtype=dtype),
        )


def _norms() -> None:
    for dtype in EVERY:
        x, weight_D = _numbers(2, 8, dtype=dtype).requires_grad_(), torch.ones(8, dtype=dtype)
        rms_norm(x, weight_D.requires_grad_(), EPS, form="llama").sum().backward()


def _rotary() -> None:
    for dtype in EVERY:
        query = _numbers(1, 2, 8, dtype=dtype).requires_grad_()
        angle_TK = _numbers(2, 8, dtype=dtype)
        rotated = rotary.rotate(query, query, angle_TK, angle_TK)
        (rotated[0].sum() + rotated[1].sum()).backward()


# Costliest first, so that workers finish at about the same time.
GROUPS: dict[str, Callable[[], None]] = {
    "decode": _decode,
    "sampling": _sampling,
    "packed attention": _packed_attention,
    "scans": _scans,
    "paged attention": _paged_attention,
    "products": _products,
    "norms": _norms,
    "rotary": _rotary,
}
