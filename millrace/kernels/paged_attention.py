"""Causal attention over a paged pool of keys and values: the layout and the plain reference.

T = packed query tokens, B = rows (one request each), H = query heads, J = key heads, K = width of queries and
keys, V = width of values, P = blocks of the pool, S = slots of a block, C = blocks of the longest row.

A pool is a pair of tensors, keys [P, J, S, K] and values [P, J, S, V], for each layer. Position i of row b is
slot i % S of block `block_BC[b, i // S]`. On a CPU the keys of a block are stored transposed, [P, J, K, S] in
memory, since products then run along the slots; the tensor is a view of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The queries of a forward, and the blocks of each row; block table int32, other tables int64.

    In `block_BC` entries after a row's last block are arbitrary. Row b has `count_B` queries, at least 1,
    contiguous from `first_B` on in the packed row of T queries and from position `start_B` on. `slot_T` is
    block * S + slot of each query's own key and value; -1 is not stored. `max_count` is the largest of
    count_B, `max_length` of start_B + count_B: keys of the longest row. `exact` is batch-invariant: a query's
    bits must not depend on the number of queries, so one kernel computes all.
    """

    block_BC: Tensor
    start_B: Tensor
    first_B: Tensor
    count_B: Tensor
    slot_T: Tensor
    max_count: int
    max_length: int
    exact: bool = False

    def last(self, last_B: Tensor) -> PagedRows:
        """Keep only the last query of each row, which has the index `last_B`; every key is still stored."""
        start_B = self.start_B + self.count_B - 1
        return replace(self, start_B=start_B, first_B=last_B, count_B=torch.ones_like(last_B), max_count=1)


def new_pool(
    num_blocks: int,
    num_heads: int,
    block_size: int,
    width: int,
    value_width: int | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Allocate keys [P, J, S, K] and values [P, J, S, V] of one layer, zeros; V defaults to K."""
    value_width = width if value_width is None else value_width
    if device.type == "cpu":
        key = torch.zeros(num_blocks, num_heads, width, block_size, dtype=dtype).transpose(2, 3)
    else:
        key = torch.zeros(num_blocks, num_heads, block_size, width, dtype=dtype, device=device)
    return key, torch.zeros(num_blocks, num_heads, block_size, value_width, dtype=dtype, device=device)


def store_kv_plain(
    key_TJK: Tensor, value_TJK: Tensor, key_PJSK: Tensor, value_PJSK: Tensor, slot_T: Tensor
) -> None:
    """Write each token's key and value into its slot; tokens with slot -1 are skipped."""
    size = key_PJSK.shape[2]
    stored_T = slot_T >= 0
    slot_N = slot_T[stored_T]
    key_PJSK[slot_N // size, :, slot_N % size] = key_TJK[stored_T].to(key_PJSK.dtype)
    value_PJSK[slot_N // size, :, slot_N % size] = value_TJK[stored_T].to(value_PJSK.dtype)


def paged_attention_plain(
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
    """Compute `dispatch.paged_attention` with its arguments, row by row, in float32 or wider."""
    wide = torch.promote_types(query_THK.dtype, torch.float32)
    groups = query_THK.shape[1] // key_PJSK.shape[1]
    out_THV = query_THK.new_empty(*query_THK.shape[:2], value_PJSK.shape[3])
    size = key_PJSK.shape[2]
    triples = zip(rows.start_B.tolist(), rows.first_B.tolist(), rows.count_B.tolist(), strict=True)
    for b, (start, first, count) in enumerate(triples):
        length = start + count
        block_N = rows.block_BC[b, : -(-length // size)].long()
        key_HLK, value_HLK = (
            pool[block_N].transpose(0, 1).flatten(1, 2)[:, :length].to(wide).repeat_interleave(groups, 0)
            for pool in (key_PJSK, value_PJSK)
        )
        query_HNK = query_THK[first : first + count].to(wide).transpose(0, 1)
        score_HNL = query_HNK @ key_HLK.transpose(1, 2) * scale
        if softcap is not None:
            score_HNL = softcap * torch.tanh(score_HNL / softcap)
        position_N = torch.arange(start, length, device=query_THK.device)[:, None]
        key_position_L = torch.arange(length, device=query_THK.device)
        seen_NL = key_position_L <= position_N
        if window is not None:
            seen_NL &= key_position_L > position_N - window
        if chunk is not None:
            seen_NL &= key_position_L >= position_N // chunk * chunk
        share_HNL = score_HNL.masked_fill(~seen_NL, float("-inf")).softmax(-1)
        out_THV[first : first + count] = (share_HNL @ value_HLK).transpose(0, 1).to(out_THV.dtype)
    return out_THV
