"""The plain reference of attention over the pool, against attention over the same tokens side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from millrace.kernels.paged_attention import new_pool, paged_attention_plain, store_kv_plain
from tests.close import close_fp32, close_fp64
from tests.kernels.paged_pools import random_case
from tests.kernels.slow_twins import packed_attention_loop

HEADS = [(4, 2), (2, 2), (3, 1), (6, 3)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 7},
    {"softcap": 2.0},
    {"window": 5, "softcap": 1.0},
    {"chunk": 6},
    {"chunk": 6, "window": 4},
]
CPU = torch.device("cpu")


@pytest.mark.slow_beyond(7)
@pytest.mark.parametrize("seed", range(20))
def test_the_pool_gives_what_the_tokens_side_by_side_give(seed: int) -> None:
    size, heads, options = (4, 8, 5)[seed % 3], HEADS[seed % 4], OPTIONS[seed % 7]
    lengths = [1, size - 1, size, size + 1, 2 * size, 17]
    case = random_case(seed, lengths, heads=heads, width=3 + seed % 3, block_size=size, dtype=torch.float64)
    tokens = case.query_THK, case.key_TJK, case.value_TJK
    expected = packed_attention_loop(*tokens, case.length_B, scale=0.7, **options)
    close_fp64(paged_attention_plain(*case.arguments(), scale=0.7, **options), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_chunk_gives_the_tail_of_the_whole(options: dict[str, Any]) -> None:
    case = random_case(3, [9, 20, 6], dtype=torch.float64)
    whole = paged_attention_plain(*case.arguments(), scale=0.5, **options)
    part = case.chunk([8, 13], [1, 4], which=[0, 1])
    index = [8, *range(9 + 13, 9 + 17)]
    close_fp64(paged_attention_plain(*part.arguments(), scale=0.5, **options), whole[index])


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    case = random_case(1, [5, 30], dtype=torch.bfloat16)
    tokens = [x.float() for x in (case.query_THK, case.key_TJK, case.value_TJK)]
    expected = packed_attention_loop(*tokens, case.length_B, scale=0.4)
    actual = paged_attention_plain(*case.arguments(), scale=0.4)
    assert actual.dtype == torch.bfloat16
    close_fp32(actual, expected, rtol=2**-8, atol=1e-6)


def test_a_token_is_stored_in_its_slot_and_slot_minus_1_nowhere() -> None:
    key, value = new_pool(3, 2, 4, 5, dtype=torch.bfloat16, device=CPU)
    key_TJK, value_TJK = torch.arange(60.0).view(2, 3, 2, 5)
    store_kv_plain(key_TJK, value_TJK, key, value, torch.tensor([11, -1, 5]))
    assert key[2, :, 3].tolist() == key_TJK[0].tolist() and value[2, :, 3].tolist() == value_TJK[0].tolist()
    assert key[1, :, 1].tolist() == key_TJK[2].tolist() and value[1, :, 1].tolist() == value_TJK[2].tolist()
    assert int((key != 0).sum()) == 19 and int((value != 0).sum()) == 20  # the first number of the keys is 0


def test_on_a_cpu_the_slots_of_a_key_stand_side_by_side() -> None:
    key, value = new_pool(3, 2, 4, 5, dtype=torch.float32, device=CPU)
    assert key.shape == value.shape == (3, 2, 4, 5)
    assert key.stride() == (40, 20, 1, 4) and value.stride() == (40, 20, 5, 1)
    meta, _ = new_pool(3, 2, 4, 5, dtype=torch.float32, device=torch.device("meta"))
    assert meta.stride() == (40, 20, 5, 1) and meta.device.type == "meta"
