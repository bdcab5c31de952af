"""Attention over the pool by torch's own attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from millrace.kernels import paged_attention_torch as of_torch
from millrace.kernels.paged_attention import paged_attention_plain
from tests.close import close_fp32
from tests.kernels.paged_pools import random_case

LENGTHS = [9, 20, 1, 33, 8]


@pytest.mark.slow_beyond(5)
@pytest.mark.parametrize("most", [1, 900, 64 << 20])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 8}, {"softcap": 2.0}], ids=str)
def test_rectangles_of_any_size_give_what_rows_alone_give(
    options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_torch, "MAX_ELEMENTS", most)
    case = random_case(3, LENGTHS, value_width=10)
    parts = [
        case,
        case.chunk([length - 1 for length in LENGTHS], [1] * len(LENGTHS)),
        case.chunk([2, 15, 0, 7], [7, 2, 1, 20], which=[0, 1, 2, 3]),
    ]
    for part in parts:
        found = of_torch.paged_attention_torch(*part.arguments(), scale=0.4, **options)
        close_fp32(found, paged_attention_plain(*part.arguments(), scale=0.4, **options), atol=3e-6)


def test_tables_may_hold_anything_after_a_rows_last_block_and_heads_be_as_many_as_numbers_or_slots() -> None:
    case = random_case(5, [16, 33, 8, 9], heads=(8, 2), width=2, block_size=8)
    rows = case.rows
    expected = paged_attention_plain(*case.arguments(), scale=0.4)
    used_B = -(-(rows.start_B + rows.count_B) // 8)
    beyond_BC = torch.arange(rows.block_BC.shape[1]) >= used_B[:, None]
    case = replace(case, rows=replace(rows, block_BC=rows.block_BC.masked_fill(beyond_BC, 1 << 30)))
    close_fp32(of_torch.paged_attention_torch(*case.arguments(), scale=0.4), expected, atol=3e-6)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_rectangle_has_as_many_rows_as_the_limit_allows_and_no_more(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [*range(3, 43), 400]
    # Of a key: two heads of a key and a value, and a score for each query of four heads.
    numbers = 2 * (6 + 10) + 4 * queries
    limit = 10 * lengths[9] * numbers
    found = []
    monkeypatch.setattr(of_torch, "MAX_ELEMENTS", limit)
    monkeypatch.setattr(of_torch, "_rectangle", lambda query, pools, rows, *_, **__: found.append(rows))
    case = random_case(3, lengths, heads=(4, 2), width=6, value_width=10)
    part = case.chunk([length - queries for length in lengths], [queries] * len(lengths))
    of_torch.paged_attention_torch(*part.arguments(), scale=0.4)
    assert sum(len(rows.start_B) for rows in found) == len(lengths)
    assert len(found[0].start_B) == 10
    begin = 0
    for rows in found:
        end = begin + len(rows.start_B)
        assert rows.max_length == lengths[end - 1] and rows.max_count == queries
        assert end - begin == 1 or (end - begin) * lengths[end - 1] * numbers <= limit
        assert end == len(lengths) or (end + 1 - begin) * lengths[end] * numbers > limit
        begin = end


def test_exact_rows_have_the_same_bits_in_any_batch() -> None:
    case = random_case(3, LENGTHS)
    case = replace(case, rows=replace(case.rows, exact=True))
    whole = of_torch.paged_attention_torch(*case.arguments(), scale=0.4)
    begin = 0
    for b, length in enumerate(LENGTHS):
        one = case.chunk([0], [length], which=[b])
        one = replace(one, rows=replace(one.rows, exact=True))
        found = of_torch.paged_attention_torch(*one.arguments(), scale=0.4)
        assert torch.equal(found, whole[begin : begin + length])
        begin += length
