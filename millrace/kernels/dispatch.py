"""Kernel dispatch by device, and input validation.

T = packed tokens, B = segments, or rows of a paged forward, H = query heads, J = key heads, K = width of
queries and keys, V = width of values, P = blocks of the pool, S = slots of a block, N = chosen tokens,
D = model width.

| scan | what it is | runs on |
|---|---|---|
| loop | one token at a time in float64; the reference | all devices |
| chunked | matrix products of 64 tokens, carry in the dtype of the row, at least float32 | all devices |
| numba | compiled, on several threads, carry in float64 | CPU |
| triton | one pass over the data, carry in float32 (float64 for float64) | CUDA |

`auto` is triton on CUDA and numba on the CPU. It is the loop on other devices and for short rows on the CPU:
loop and numba are both exact to the rounding of the result, so their results hardly ever differ.

Attention over the paged pool is numba on the CPU, triton on CUDA, and torch's own on other devices. The
log-probability of chosen tokens is triton on CUDA, and chunks of torch elsewhere.

On CUDA a Triton kernel runs only where it was checked on this type of device; see `device_record`. Otherwise
what other devices use takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from millrace.kernels import linear_scan as plain
from millrace.kernels import paged_attention as plain_paged
from millrace.kernels.device_record import Kernel, is_checked
from millrace.kernels.paged_attention import PagedRows
from millrace.kernels.paged_attention_torch import paged_attention_torch

Scan = Literal["auto", "loop", "chunked", "numba", "triton"]

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
# The loop takes about a millisecond for so many tokens; starting numba takes a second.
LOOP_TOKENS = 10_000


def linear_scan(
    x_T: Tensor, w_T: Tensor, *, reverse: bool = True, scan: Scan = "auto", out_T: Tensor | None = None
) -> Tensor:
    """A_t = x_t + w_t A_{t+1}, or x_t + w_t A_{t-1} forward, over a packed row of segments of any lengths.

    w_t = 0 where a segment ends (begins, forward): there A_t = x_t, even if the neighbour is NaN. Both rows
    have one dtype, bfloat16, float32 or float64, which is that of A [T], and no gradient.

    Raises:
        ValueError: a shape, dtype or device does not fit, a row requires a gradient, out_T shares memory with
            an input, or the scan does not exist or does not run on this device.
    """
    rows = {"x_T": x_T, "w_T": w_T}
    _check_rows(rows)
    out_T = _buffer("out_T", out_T, rows)
    scan_into, _ = _implementation(scan, x_T)
    scan_into(x_T.contiguous(), w_T.contiguous(), out_T, reverse=reverse)
    return out_T


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    length_B: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap_B: Tensor | None = None,
    scan: Scan = "auto",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over packed segments in one pass: A and return, both [T].

        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  return_t = A_t + V_t

    After the last token of segment b, A is 0 and V is bootstrap_b (None is 0), the value of the state after a
    truncated segment. A NaN or an infinity affects only earlier tokens of its own segment.

    Rewards and values (of the state before each token) have one dtype, bfloat16, float32 or float64, which is
    that of the results, and no gradient. `length_B` are integers that add up to T; 0 is allowed. gamma and
    lambda are in [0, 1]; lambda is one number, or one for each segment [B]. `out` are output buffers.

    Raises:
        ValueError: gamma or lambda leaves [0, 1], the lengths do not add up or one is negative, or anything
            that `linear_scan` rejects.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage
    estimation".
    """
    rows = {"reward_T": reward_T, "value_T": value_T}
    _check_rows(rows)
    _check_lengths(length_B, len(reward_T))
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; it lies in [0, 1]")
    lam_B = _lambdas(lam, len(length_B))
    if bootstrap_B is None:
        bootstrap_B = value_T.new_zeros(len(length_B))
    _check_like("bootstrap_B", bootstrap_B, "value_T", value_T, len(length_B))
    advantage_T = _buffer("out[0]", out[0] if out else None, rows)
    return_T = _buffer("out[1]", out[1] if out else None, rows | {"out[0]": advantage_T})
    _, gae_into = _implementation(scan, value_T)
    gae_into(
        reward_T.contiguous(),
        value_T.contiguous(),
        length_B.to(value_T.device, torch.int64),
        (advantage_T, return_T),
        gamma=gamma,
        decay_B=gamma * lam_B,
        bootstrap_B=bootstrap_B,
    )
    return advantage_T, return_T


def store_kv(
    key_TJK: Tensor, value_TJK: Tensor, key_PJSK: Tensor, value_PJSK: Tensor, slot_T: Tensor
) -> None:
    """Write each token's key and value into its slot of the pool; tokens with slot -1 are skipped.

    `slot_T` is block * S + slot, int64. Any dtype is converted to that of the pool from `new_pool`.

    Raises:
        ValueError: shapes, devices or dtypes do not fit each other, a tensor requires a gradient, or, on the
            CPU, a slot is outside the pool.
    """
    _check_pool(key_PJSK, value_PJSK)
    _check_table("slot_T", slot_T, torch.int64, (len(slot_T),), key_PJSK.device)
    for name, new_TJK, pool in (("key_TJK", key_TJK, key_PJSK), ("value_TJK", value_TJK, value_PJSK)):
        _check_new(name, new_TJK, pool)
        expected = (len(slot_T), pool.shape[1], pool.shape[3])
        if new_TJK.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(new_TJK.shape)}; expected {expected}: "
                "tokens of slot_T, heads and width of the pool"
            )
    _paged(key_PJSK)[0](key_TJK, value_TJK, key_PJSK, value_PJSK, slot_T)


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
    """softmax(scale q k^T) v of each query over positions 0 to its own; its key and value are already stored.

    The pool is from `new_pool`; J divides H. With `window` a token sees itself and the `window - 1` tokens
    before it, with `chunk` only its own chunk of positions. With `softcap`, scores become softcap *
    tanh(score / softcap). The result is [T, H, V] in the dtype of the queries; undefined without a row.

    Raises:
        ValueError: shapes, devices or dtypes do not fit each other, the queries require a gradient, window,
            softcap or chunk is not positive, or, on the CPU, a row points outside the pool or the queries.
    """
    _check_pool(key_PJSK, value_PJSK)
    _check_new("query_THK", query_THK, key_PJSK)
    num_heads, width = key_PJSK.shape[1], key_PJSK.shape[3]
    if query_THK.dim() != 3 or query_THK.shape[1] % num_heads or query_THK.shape[2] != width:
        raise ValueError(
            f"query_THK has shape {tuple(query_THK.shape)}; expected heads in multiples of {num_heads} and "
            f"width {width}, as the pool has"
        )
    _check_paged_rows(rows, key_PJSK.device)
    for name, limit in (("window", window), ("softcap", softcap), ("chunk", chunk)):
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} is {limit}; it is positive, or None for none")
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "chunk": chunk}
    return _paged(key_PJSK)[1](query_THK, key_PJSK, value_PJSK, rows, **options)


def fused_logprob(hidden_ND: Tensor, weight_VD: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the fused log-probability kernel for such inputs; None where chunks of torch are used instead.

    The kernel takes the arguments of `token_logprob`, except a support and a tile. float64 and mixed dtypes
    always use torch. The weight may be a shard.
    """
    dtype = hidden_ND.dtype
    if dtype not in FUSED_DTYPES or dtype != weight_VD.dtype or not _runs("token_logprob", hidden_ND.device):
        return None
    from millrace.kernels import token_logprob_triton

    return token_logprob_triton.token_logprob


def _implementation(scan: Scan, like_T: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    device = like_T.device.type
    if scan not in get_args(Scan):
        raise ValueError(f"scan is {scan!r}; there are {', '.join(get_args(Scan))}")
    if scan == "auto":
        if _runs("linear_scan", like_T.device):
            scan = "triton"
        else:
            scan = "numba" if device == "cpu" and len(like_T) >= LOOP_TOKENS else "loop"
    if scan == "triton":
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"scan is 'triton', which runs on CUDA, and the row is on {device}")
        from millrace.kernels import linear_scan_triton

        return linear_scan_triton.linear_scan, linear_scan_triton.gae
    if scan == "numba":
        if device != "cpu":
            raise ValueError(f"scan is 'numba', which runs on the CPU, and the row is on {device}")
        from millrace.kernels import linear_scan_cpu

        return linear_scan_cpu.linear_scan, linear_scan_cpu.gae
    chosen = plain.loop if scan == "loop" else plain.chunked
    return partial(plain.linear_scan, scan=chosen), partial(plain.gae, scan=chosen)


def _paged(like: Tensor) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    if like.device.type == "cpu":
        from millrace.kernels import paged_attention_cpu

        return paged_attention_cpu.store_kv, paged_attention_cpu.paged_attention
    if _runs("paged_attention", like.device):
        from millrace.kernels import paged_attention_triton

        return paged_attention_triton.store_kv, paged_attention_triton.paged_attention
    return plain_paged.store_kv_plain, paged_attention_torch


def _runs(kernel: Kernel, device: torch.device) -> bool:
    """Whether a Triton kernel is the implementation for a device."""
    return device.type == "cuda" and is_checked(kernel, device)


def _check_pool(key_PJSK: Tensor, value_PJSK: Tensor) -> None:
    if key_PJSK.dim() != 4 or value_PJSK.dim() != 4 or key_PJSK.shape[:3] != value_PJSK.shape[:3]:
        raise ValueError(
            f"key_PJSK has shape {tuple(key_PJSK.shape)} and value_PJSK {tuple(value_PJSK.shape)}; expected "
            "four dimensions each, of which only the last may differ: blocks, heads, slots, width"
        )
    _check_alike("value_PJSK", value_PJSK, "key_PJSK", key_PJSK)


def _check_new(name: str, new: Tensor, pool_PJSK: Tensor) -> None:
    if new.device != pool_PJSK.device:
        raise ValueError(f"{name} is on {new.device}, but the pool is on {pool_PJSK.device}")
    if new.requires_grad:
        raise ValueError(f"{name} requires a gradient, which the paged pool would drop; detach it")


def _check_paged_rows(rows: PagedRows, device: torch.device) -> None:
    shape = (len(rows.block_BC),)
    _check_table("block_BC", rows.block_BC, torch.int32, (*shape, *rows.block_BC.shape[-1:]), device)
    for name in ("start_B", "first_B", "count_B"):
        _check_table(name, getattr(rows, name), torch.int64, shape, device)


def _check_table(
    name: str, table: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if table.dtype != dtype or table.shape != shape or table.device != device:
        raise ValueError(
            f"{name} is {table.dtype} of shape {tuple(table.shape)} on {table.device}; expected {dtype} of "
            f"shape {shape} on {device}"
        )


def _check_rows(rows: dict[str, Tensor]) -> None:
    first, first_T = next(iter(rows.items()))
    if first_T.dim() != 1:
        raise ValueError(f"{first} has shape {tuple(first_T.shape)}; a packed row has one dimension")
    if first_T.dtype not in DTYPES:
        raise ValueError(f"{first} is {first_T.dtype}; a scan takes {', '.join(map(str, DTYPES))}")
    for name, row_T in rows.items():
        _check_like(name, row_T, first, first_T, len(first_T))


def _check_like(name: str, tensor: Tensor, other: str, like_T: Tensor, length: int) -> None:
    if tensor.shape != (length,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({length},)")
    _check_alike(name, tensor, other, like_T)
    if tensor.requires_grad:
        raise ValueError(f"{name} requires a gradient, which a scan would drop; detach it")


def _check_alike(name: str, tensor: Tensor, other: str, like: Tensor) -> None:
    for what in ("dtype", "device"):
        if getattr(tensor, what) != getattr(like, what):
            raise ValueError(f"{name} is {getattr(tensor, what)}, but {other} is {getattr(like, what)}")


def _check_lengths(length_B: Tensor, num_tokens: int) -> None:
    if length_B.dim() != 1 or length_B.dtype not in INTEGERS:
        raise ValueError(
            f"length_B is {length_B.dtype} of shape {tuple(length_B.shape)}; expected integers of shape (B,)"
        )
    if (length_B < 0).any():
        raise ValueError(f"length_B holds {int(length_B.min())}; a segment has 0 tokens or more")
    if length_B.sum() != num_tokens:
        raise ValueError(f"length_B adds up to {int(length_B.sum())}, but the row has {num_tokens} tokens")


def _lambdas(lam: float | Tensor, num_segments: int) -> Tensor:
    lam_B = torch.as_tensor(lam, dtype=torch.float64, device="cpu")
    if lam_B.shape not in ((), (num_segments,)):
        raise ValueError(f"lam has shape {tuple(lam_B.shape)}; expected one number, or ({num_segments},)")
    outside = ~((lam_B >= 0) & (lam_B <= 1))
    if outside.any():
        raise ValueError(f"lam is {float(lam_B[outside].flatten()[0])}; it lies in [0, 1]")
    return lam_B.expand(num_segments)


def _buffer(name: str, out_T: Tensor | None, rows: dict[str, Tensor]) -> Tensor:
    other, like_T = next(iter(rows.items()))
    if out_T is None:
        return like_T.new_empty(len(like_T))
    _check_like(name, out_T, other, like_T, len(like_T))
    if not out_T.is_contiguous():
        raise ValueError(f"{name} has stride {out_T.stride(0)}; a result goes to a contiguous tensor")
    ours = _memory(out_T)
    for other, row_T in rows.items():
        theirs = _memory(row_T)
        if max(ours.start, theirs.start) < min(ours.stop, theirs.stop):
            raise ValueError(f"{name} shares memory with {other}; a result goes to memory of its own")
    return out_T


def _memory(row_T: Tensor) -> range:
    size = row_T.element_size()
    start = row_T.data_ptr()
    return range(start, start + (len(row_T) - 1) * row_T.stride(0) * size + size)
