from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import decode
from millrace.kernels.decode import attend_new
from millrace.kernels.paged_attention import PagedRows, new_pool, paged_attention_plain, store_kv_plain
from tests.close import close_bf16, close_fp32

SIZES = [(4, 2, 6), (3, 1, 8), (1, 1, 2)]
NUM_BLOCKS, SIZE = 6, 5
# A row of three new tokens behind four known ones, one new token at the beginning, and one behind six.
ROWS = PagedRows(
    block_BC=torch.tensor([[2, 0], [5, 5], [1, 4]], dtype=torch.int32),
    start_B=torch.tensor([4, 0, 6]),
    first_B=torch.tensor([0, 3, 4]),
    count_B=torch.tensor([3, 1, 1]),
    slot_T=torch.tensor([14, 0, 1, 25, 21]),
    max_count=3,
    max_length=7,
)
NO_NORM = {"norms": None, "scale": 0.7}


def random_heads(seed: int, heads: int, keys: int, width: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Queries, keys and values one behind the other; cosines and sines."""
    generator = torch.Generator().manual_seed(seed)
    heads_TN = torch.randn(5, (heads + 2 * keys) * width, generator=generator)
    angle_TK = (torch.randn(5, width // 2, generator=generator) * 3).repeat(1, 2)
    return heads_TN, (angle_TK.cos(), angle_TK.sin())


def turned(x_TNK: Tensor, angles: tuple[Tensor, Tensor], gain_K: Tensor | None, eps: float) -> Tensor:
    """The equations, one after the other."""
    cos_TK, sin_TK = angles
    if gain_K is not None:
        x_TNK = x_TNK / (x_TNK.square().mean(-1, keepdim=True) + eps).sqrt() * gain_K
    first, second = x_TNK.chunk(2, dim=-1)
    return x_TNK * cos_TK[:, None] + torch.cat([-second, first], -1) * sin_TK[:, None]


def random_pool(keys: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pool = new_pool(NUM_BLOCKS, keys, SIZE, width, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(9)
    for half in pool:
        half.copy_(torch.randn(half.shape, generator=generator))
    return pool


@pytest.mark.parametrize("part", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("limits", [{}, {"window": 3, "softcap": 1.5}])
def test_heads_are_normed_turned_stored_and_attended(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    normed: bool,
    dtype: torch.dtype,
    part: int,
    limits: dict[str, Any],
) -> None:
    heads, keys, width = sizes
    monkeypatch.setattr(decode, "PART_TOKENS", part)
    monkeypatch.setattr(decode, "PART_WORK", part)
    monkeypatch.setattr(decode, "num_threads", lambda: 2)
    gains = torch.linspace(0.5, 2, width).to(dtype), torch.linspace(-1, 3, width).to(dtype)
    for seed in range(3):
        heads_TN, angles = random_heads(seed, heads, keys, width)
        heads_TN, angles = heads_TN.to(dtype), (angles[0].to(dtype), angles[1].to(dtype))
        pool, expected_pool = random_pool(keys, width, dtype), random_pool(keys, width, dtype)
        norms = (*gains, 0.3) if normed else None
        out_TN = attend_new(heads_TN, angles, pool, ROWS, norms=norms, scale=0.7, **limits)
        parts = heads_TN.float().unflatten(1, (-1, width)).split([heads, keys, keys], dim=1)
        wide = angles[0].float(), angles[1].float()
        query_THK, key_TJK = (
            turned(x_TNK, wide, gain_K.float() if normed else None, 0.3)
            for x_TNK, gain_K in zip(parts[:2], gains, strict=True)
        )
        store_kv_plain(key_TJK, parts[2], *expected_pool, ROWS.slot_T)
        expected_THK = paged_attention_plain(query_THK, *expected_pool, ROWS, scale=0.7, **limits)
        close = close_fp32 if dtype == torch.float32 else close_bf16
        assert out_TN.shape == (5, heads * width) and out_TN.dtype == dtype
        close(out_TN, expected_THK.flatten(1))
        for half, expected_half in zip(pool, expected_pool, strict=True):
            close(half, expected_half)


def test_a_token_without_a_slot_is_stored_nowhere() -> None:
    heads_TN, angles = random_heads(0, 4, 2, 6)
    pool, before = random_pool(2, 6, torch.float32), random_pool(2, 6, torch.float32)
    rows = replace(ROWS, slot_T=torch.full((5,), -1))
    attend_new(heads_TN, angles, pool, rows, **NO_NORM)
    assert all(torch.equal(half, known) for half, known in zip(pool, before, strict=True))


def check_refused(message: str, **changes: Any) -> None:
    """An error with this message, and nothing is stored."""
    heads_TN, angles = random_heads(0, 4, 2, 6)
    pool, before = random_pool(2, 6, torch.float32), random_pool(2, 6, torch.float32)
    heads_TN = heads_TN.to(changes.pop("dtype", torch.float32))
    with pytest.raises(ValueError, match=message):
        attend_new(heads_TN, angles, pool, replace(ROWS, **changes), **NO_NORM)
    assert all(torch.equal(half, known) for half, known in zip(pool, before, strict=True))


def test_what_is_not_there_is_refused_before_anything_is_stored() -> None:
    slot_T = ROWS.slot_T.clone()
    slot_T[2] = 30
    check_refused("slot_T holds 30; the pool has 6 blocks of 5 slots", slot_T=slot_T)
    message = r"row 1 has 1 queries at 5, the first at position 0, .* there are 5 queries and 6 blocks of 5"
    check_refused(message, first_B=torch.tensor([0, 5, 4]))


def test_two_dtypes_are_refused() -> None:
    check_refused(
        r"torch.bfloat16, torch.float32.*all must be float32, or all bfloat16", dtype=torch.bfloat16
    )
    heads_TN, angles = random_heads(0, 1, 1, 2)
    pool = random_pool(1, 2, torch.float64)
    with pytest.raises(ValueError, match="all must be float32, or all bfloat16"):
        attend_new(heads_TN.double(), (angles[0].double(), angles[1].double()), pool, ROWS, **NO_NORM)
