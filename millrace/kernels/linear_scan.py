"""Plain implementations of the scan A_t = x_t + w_t A_{t+1}: a loop, and chunked matrix products.

T = packed tokens, B = segments, N = chunks, C = tokens of a chunk. The loop is the reference for every other
scan. The chunked scan uses matrix products alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def loop(x_T: Tensor, w_T: Tensor, *, reverse: bool) -> Tensor:
    """Compute A_t = x_t + w_t A_{t+1}, or A_{t-1} forward, token by token, in float64.

    Where w_t = 0 the neighbour is ignored, even if it is NaN.
    """
    if reverse:
        return loop(x_T.flip(0), w_T.flip(0), reverse=False).flip(0)
    carry, carries = 0.0, []
    for x, w in zip(x_T.tolist(), w_T.tolist(), strict=True):
        carry = x + w * carry if w else x
        carries.append(carry)
    return torch.tensor(carries, dtype=torch.float64)


def chunked(x_T: Tensor, w_T: Tensor, *, reverse: bool, chunk: int = 64) -> Tensor:
    """Compute `loop` with one matrix product for all chunks and a short loop over chunks for the carry.

    Within a chunk A_j is the sum of reach_ij x_i over i <= j, with reach_ij = w_{i+1} ... w_j; a w of 0 makes
    the reach 0. Then (w_0 ... w_j) times the last A of the previous chunk is added to A_j. Extra memory is T
    C numbers; the carry and the result have the dtype of x_T, at least float32. NaN or infinity in x_T or
    w_T, which a product would propagate to the whole chunk, is a ValueError.

    Source: LiLei 2025, "Chunk-scan GAE" (slime), with segments.
    """
    if reverse:
        return chunked(x_T.flip(0), w_T.flip(0), reverse=False, chunk=chunk).flip(0)
    for name, row_T in (("x_T", x_T), ("w_T", w_T)):
        if not row_T.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity; the scan 'chunked' takes finite numbers only")
    dtype = torch.promote_types(x_T.dtype, torch.float32)
    filler = x_T.new_zeros(-len(x_T) % chunk)
    x_NC, w_NC = (torch.cat([row_T, filler]).to(dtype).view(-1, chunk) for row_T in (x_T, w_T))
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=x_T.device).triu(1)
    reach_NCC = torch.where(later_CC, w_NC[:, None], 1).cumprod(2).triu()
    out_NC = (x_NC[:, None] @ reach_NCC)[:, 0]
    share_NC = w_NC.cumprod(1)
    for n in range(1, len(out_NC)):
        out_NC[n] += share_NC[n] * out_NC[n - 1, -1]
    return out_NC.view(-1)[: len(x_T)]


def linear_scan(
    x_T: Tensor, w_T: Tensor, out_T: Tensor, *, reverse: bool, scan: Callable[..., Tensor]
) -> None:
    """Write the result of `scan` (`loop` or `chunked`) into a buffer."""
    out_T.copy_(scan(x_T, w_T, reverse=reverse))


def gae(
    reward_T: Tensor,
    value_T: Tensor,
    length_B: Tensor,
    out: tuple[Tensor, Tensor],
    *,
    gamma: float,
    decay_B: Tensor,
    bootstrap_B: Tensor,
    scan: Callable[..., Tensor],
) -> None:
    """Write advantage and return into `out`, unfused: the reference for the fused kernels.

    `length_B` adds up to T, int64; `decay_B` is gamma lambda of each segment, float64. The scan is `loop` or
    `chunked`.
    """
    dtype = torch.float64 if scan is loop else torch.promote_types(value_T.dtype, torch.float32)
    reward_T, value_T, bootstrap_B, decay_B = (
        row.to(value_T.device, dtype) for row in (reward_T, value_T, bootstrap_B, decay_B)
    )
    filled_B = length_B > 0
    last_B = (length_B.cumsum(0) - 1)[filled_B]
    next_T = value_T.roll(-1)
    next_T[last_B] = bootstrap_B[filled_B]
    w_T = decay_B.repeat_interleave(length_B)
    w_T[last_B] = 0
    advantage_T = scan(reward_T + gamma * next_T - value_T, w_T, reverse=True).to(value_T.device)
    out[0].copy_(advantage_T)
    out[1].copy_(advantage_T + value_T)
