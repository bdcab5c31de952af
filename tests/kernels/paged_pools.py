"""Rows of a paged forward whose pool holds NaN wherever nothing was stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from millrace.kernels.paged_attention import PagedRows, new_pool, store_kv_plain


@dataclass(frozen=True, slots=True)
class Case:
    """Whole sequences laid end to end, and a pool with the keys and values of all their tokens."""

    query_THK: Tensor
    key_TJK: Tensor
    value_TJK: Tensor
    length_B: Tensor
    pool: tuple[Tensor, Tensor]
    rows: PagedRows

    def chunk(self, start: list[int], count: list[int], which: list[int] | None = None) -> Case:
        """Only the tokens from `start` on of some of the sequences, which read the same pool."""
        which = list(range(len(self.length_B))) if which is None else which
        offset_B = self.length_B.cumsum(0) - self.length_B
        index = [torch.arange(n) + offset_B[b] + at for b, at, n in zip(which, start, count, strict=True)]
        index_T = torch.cat(index)
        tables = _rows(self.rows.block_BC[which], torch.tensor(start), torch.tensor(count))
        return replace(
            self,
            query_THK=self.query_THK[index_T],
            rows=replace(tables, slot_T=self.rows.slot_T[index_T]),
        )

    def arguments(self) -> tuple[Any, ...]:
        return self.query_THK, *self.pool, self.rows


def _rows(block_BC: Tensor, start_B: Tensor, count_B: Tensor) -> PagedRows:
    stop_B = start_B + count_B
    first_B = count_B.cumsum(0) - count_B
    largest = int(count_B.max()), int(stop_B.max())
    return PagedRows(block_BC, start_B, first_B, count_B, torch.empty(0, dtype=torch.int64), *largest)


def random_case(
    seed: int,
    lengths: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    width: int = 6,
    value_width: int | None = None,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    placement: int = 0,
) -> Case:
    """Sequences of these lengths; `placement` draws where their blocks lie and changes nothing else."""
    draw = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def normal(num_heads: int, width: int = width) -> Tensor:
        return torch.randn(num_tokens, num_heads, width, generator=draw, dtype=torch.float64).to(dtype)

    query_THK, key_TJK, value_TJK = normal(heads[0]), normal(heads[1]), normal(heads[1], value_width or width)
    length_B = torch.tensor(lengths)
    num_blocks_B = -(-length_B // block_size)
    num_blocks = int(num_blocks_B.sum()) + 2
    shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(placement)).int()
    # What lies beyond a row's last block may be anything.
    block_BC = torch.full((len(lengths), int(num_blocks_B.max()) + 1), -9, dtype=torch.int32)
    slots = []
    for b, (length, blocks) in enumerate(zip(lengths, num_blocks_B.tolist(), strict=True)):
        block_BC[b, :blocks], shuffled = shuffled[:blocks], shuffled[blocks:]
        position = torch.arange(length)
        slots.append(block_BC[b, position // block_size].long() * block_size + position % block_size)
    sizes = num_blocks, heads[1], block_size, width, value_width
    pool = new_pool(*sizes, dtype=dtype, device=torch.device("cpu"))
    for part in pool:
        part.fill_(float("nan"))
    rows = replace(_rows(block_BC, torch.zeros_like(length_B), length_B), slot_T=torch.cat(slots))
    store_kv_plain(key_TJK, value_TJK, *pool, rows.slot_T)
    return Case(query_THK, key_TJK, value_TJK, length_B, pool, rows)
