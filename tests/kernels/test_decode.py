from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import decode
from millrace.kernels.decode import turn_and_store
from millrace.kernels.paged_attention import new_pool, store_kv_plain
from tests.close import close_bf16, close_fp32

SIZES = [(4, 2, 6), (3, 1, 8), (1, 1, 2)]
SLOT_T = torch.tensor([5, 0, 14, -1, 7, 3, 11])


def random_parts(seed: int, heads: int, keys: int, width: int) -> tuple[Any, Any]:
    """Queries, keys and values side by side; cosines and sines."""
    generator = torch.Generator().manual_seed(seed)
    parts = tuple(torch.randn(7, n * width, generator=generator) for n in (heads, keys, keys))
    angle_TK = (torch.randn(7, width // 2, generator=generator) * 3).repeat(1, 2)
    return parts, (angle_TK.cos(), angle_TK.sin())


def plain(x_TN: Tensor, angles: tuple[Tensor, Tensor], gain_K: Tensor | None, eps: float) -> Tensor:
    """The equations, one after the other."""
    cos_TK, sin_TK = (angle.float() for angle in angles)
    x_TNK = x_TN.float().unflatten(1, (-1, cos_TK.shape[1]))
    if gain_K is not None:
        x_TNK = x_TNK / (x_TNK.square().mean(-1, keepdim=True) + eps).sqrt() * gain_K.float()
    first, second = x_TNK.chunk(2, dim=-1)
    return x_TNK * cos_TK[:, None] + torch.cat([-second, first], -1) * sin_TK[:, None]


def empty_pool(keys: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    pool = new_pool(3, keys, 5, width, dtype=dtype, device=torch.device("cpu"))
    for half in pool:
        half.fill_(-7)
    return pool


@pytest.mark.parametrize("part_tokens", [8, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_turned_and_stored(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    normed: bool,
    dtype: torch.dtype,
    part_tokens: int,
) -> None:
    heads, keys, width = sizes
    monkeypatch.setattr(decode, "PART_TOKENS", part_tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    gains = torch.linspace(0.5, 2, width).to(dtype), torch.linspace(-1, 3, width).to(dtype)
    for seed in range(3):
        parts, angles = random_parts(seed, heads, keys, width)
        parts, angles = tuple(x.to(dtype) for x in parts), tuple(x.to(dtype) for x in angles)
        pool, expected_pool = empty_pool(keys, width, dtype), empty_pool(keys, width, dtype)
        query_THK = turn_and_store(parts, angles, pool, SLOT_T, gains=gains if normed else None, eps=0.3)
        expected_THK, key_TJK = (
            plain(x_TN, angles, gain_K if normed else None, 0.3)
            for x_TN, gain_K in zip(parts[:2], gains, strict=True)
        )
        store_kv_plain(key_TJK, parts[2].unflatten(1, (-1, width)), *expected_pool, SLOT_T)
        assert query_THK.shape == (7, heads, width) and query_THK.dtype == torch.float32
        close_fp32(query_THK, expected_THK)
        close = close_fp32 if dtype == torch.float32 else close_bf16
        for half, expected_half in zip(pool, expected_pool, strict=True):
            close(half, expected_half)
        # Nobody else's slot is touched.
        assert int((pool[1] == -7).all(-1).sum()) == (15 - 6) * keys


def test_tokens_are_cut_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(decode, "cuts", lambda most: asked.append(most) or (1, 1))
    parts, angles = random_parts(0, 4, 2, 6)
    for part_tokens in (7, 8, 3):
        monkeypatch.setattr(decode, "PART_TOKENS", part_tokens)
        turn_and_store(parts, angles, empty_pool(2, 6, torch.float32), SLOT_T, gains=None, eps=0.0)
    assert asked == [1, 0, 2]


def test_a_slot_that_is_not_there_is_refused_before_anything_is_stored() -> None:
    parts, angles = random_parts(0, 4, 2, 6)
    pool = empty_pool(2, 6, torch.float32)
    slot_T = SLOT_T.clone()
    slot_T[4] = 15
    with pytest.raises(ValueError, match="slot_T holds 15; the pool has 3 blocks of 5 slots"):
        turn_and_store(parts, angles, pool, slot_T, gains=None, eps=0.0)
    assert all(bool((half == -7).all()) for half in pool)
