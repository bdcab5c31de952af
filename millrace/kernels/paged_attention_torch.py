"""Attention over the paged pool with torch's scaled dot-product attention, for devices without our kernels.

The blocks of a few rows at a time are gathered into rectangles. Letters are those of `paged_attention`, and
Q = most queries of a row, L = most keys, R = rows of a rectangle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.kernels.paged_attention import PagedRows, paged_attention_plain

# Keys, values and scores of one rectangle, in numbers.
MAX_ELEMENTS = 64 << 20


def paged_attention_torch(
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
    """Compute `dispatch.paged_attention` with its arguments, by rectangles of rows.

    Exact rows and soft caps, which torch's attention does not have, take the plain implementation. That one
    computes row by row, so a row has the same bits in any batch, but not in any chunks.
    """
    limits: dict[str, Any] = {"window": window, "chunk": chunk}
    if rows.exact or softcap is not None:
        return paged_attention_plain(
            query_THK, key_PJSK, value_PJSK, rows, scale=scale, softcap=softcap, **limits
        )
    out_THV = query_THK.new_empty(*query_THK.shape[:2], value_PJSK.shape[3])
    count_B, length_B = rows.count_B.tolist(), (rows.start_B + rows.count_B).tolist()
    # Rows of similar shape share a rectangle.
    order = sorted(range(len(count_B)), key=lambda b: (count_B[b], length_B[b]))
    numbers = key_PJSK.shape[1] * (key_PJSK.shape[3] + value_PJSK.shape[3])
    begin = 0
    while begin < len(order):
        end, most_queries, most_keys = begin, 0, 0
        while end < len(order):
            queries = max(most_queries, count_B[order[end]])
            keys = max(most_keys, length_B[order[end]])
            size = (end + 1 - begin) * keys * (numbers + queries * query_THK.shape[1])
            if end > begin and size > MAX_ELEMENTS:
                break
            end, most_queries, most_keys = end + 1, queries, keys
        which_R = torch.tensor(order[begin:end], device=query_THK.device)
        _rectangle(
            query_THK,
            (key_PJSK, value_PJSK),
            _some(rows, which_R, most_queries, most_keys),
            out_THV,
            scale=scale,
            **limits,
        )
        begin = end
    return out_THV


def _some(rows: PagedRows, which_R: Tensor, max_count: int, max_length: int) -> PagedRows:
    tables = {name: getattr(rows, name)[which_R] for name in ("block_BC", "start_B", "first_B", "count_B")}
    return replace(rows, **tables, max_count=max_count, max_length=max_length)


def _rectangle(
    query_THK: Tensor,
    pools: tuple[Tensor, Tensor],
    rows: PagedRows,
    out_THV: Tensor,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
) -> None:
    """Compute the queries of rows whose keys and queries are laid out in one rectangle each."""
    size, device = pools[0].shape[2], query_THK.device
    num_blocks = -(-rows.max_length // size)
    # Entries after a row's last block are arbitrary.
    length_R = rows.start_B + rows.count_B
    used_RC = torch.arange(num_blocks, device=device) * size < length_R[:, None]
    block_RC = rows.block_BC[:, :num_blocks].long().where(used_RC, 0)
    place_L = torch.arange(num_blocks * size, device=device)
    stored_R1L1 = (place_L < length_R[:, None])[:, None, :, None]
    # A slot without a token may hold anything, and 0 x NaN is NaN.
    key_RJLK, value_RJLV = (
        pool[block_RC].transpose(1, 2).flatten(2, 3).to(query_THK.dtype).masked_fill(~stored_R1L1, 0)
        for pool in pools
    )
    offset_Q = torch.arange(rows.max_count, device=device)
    asked_RQ = offset_Q < rows.count_B[:, None]
    index_RQ = (rows.first_B[:, None] + offset_Q).where(asked_RQ, rows.first_B[:, None])
    position_RQ1 = (rows.start_B[:, None] + offset_Q).where(asked_RQ, rows.start_B[:, None])[:, :, None]
    seen_RQL = place_L <= position_RQ1
    if window is not None:
        seen_RQL &= place_L > position_RQ1 - window
    if chunk is not None:
        seen_RQL &= place_L >= position_RQ1 // chunk * chunk
    result_RHQV = F.scaled_dot_product_attention(
        query_THK[index_RQ].transpose(1, 2),
        key_RJLK,
        value_RJLV,
        attn_mask=seen_RQL[:, None],
        scale=scale,
        enable_gqa=query_THK.shape[1] != pools[0].shape[1],
    )
    out_THV[index_RQ[asked_RQ]] = result_RHQV.transpose(1, 2)[asked_RQ].to(out_THV.dtype)
