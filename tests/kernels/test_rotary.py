from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels.rotary import rotate, rotate_plain
from tests.close import close_bf16, close_fp32, close_fp64

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
CLOSE: dict[torch.dtype, Any] = {
    torch.float32: close_fp32,
    torch.float64: close_fp64,
    torch.bfloat16: close_bf16,
}


def inputs(seed: int, dtype: torch.dtype, *, width: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two query heads to one key head over five tokens; sines and cosines that are nobody's."""
    generator = torch.Generator().manual_seed(seed)
    query, key, cos, sin = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((5, 3, width), (5, 2, width), (5, width), (5, width))
    )
    return query.transpose(0, 1), key.transpose(0, 1), cos, sin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_every_bit_is_that_of_the_plain_twin(seed: int, dtype: torch.dtype) -> None:
    query, key, cos, sin = inputs(seed, dtype)
    for recorded in (False, True):
        query_turned, key_turned = rotate(query.requires_grad_(recorded), key, cos, sin)
        assert (type(query_turned.grad_fn).__name__ == "TransposeBackward0") is recorded
        assert torch.equal(query_turned, rotate_plain(query, cos, sin))
        assert torch.equal(key_turned, rotate_plain(key, cos, sin))
        assert query_turned.transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_slopes_are_those_of_the_plain_twin(seed: int, dtype: torch.dtype) -> None:
    query, key, cos, sin = inputs(seed, dtype)
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    query_slope, key_slope, _, _ = inputs(seed + 100, dtype)
    ours = torch.autograd.grad(rotate(query, key, cos, sin), (query, key), (query_slope, key_slope))
    for slope, x, given in zip(ours, (query, key), (query_slope, key_slope), strict=True):
        (expected,) = torch.autograd.grad(rotate_plain(x, cos, sin), x, given)
        # In bfloat16 autograd adds two rounded products, and so do we.
        CLOSE[dtype](slope, expected)
        assert slope.shape == x.shape


def test_a_key_that_alone_is_trained_gets_its_slope() -> None:
    query, key, cos, sin = inputs(0, torch.float32)
    key = key.detach().requires_grad_()
    _, turned = rotate(query, key, cos, sin)
    turned.sum().backward()
    (expected,) = torch.autograd.grad(rotate_plain(key, cos, sin).sum(), key)
    assert key.grad is not None
    close_fp32(key.grad, expected)


def test_a_quarter_turn_swaps_the_halves() -> None:
    query, key = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[[5.0, 6.0, 7.0, 8.0]]])
    cos, sin = torch.zeros(1, 4), torch.ones(1, 4)
    query_turned, key_turned = rotate(query, key, cos, sin)
    assert query_turned.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]
    assert key_turned.tolist() == [[[-7.0, -8.0, 5.0, 6.0]]]


@pytest.mark.parametrize("width", [1, 5, 7])
def test_an_odd_width_is_left_to_the_plain_twin(width: int) -> None:
    query, key, cos, sin = inputs(0, torch.float32, width=width)
    query_turned, _ = rotate(query, key, cos, sin)
    half = width // 2
    expected = query * cos + torch.cat([-query[..., half:], query[..., :half]], -1) * sin
    assert torch.equal(query_turned, expected)


def test_other_dtypes_and_broadcast_angles_are_left_to_the_plain_twin() -> None:
    query, key, cos, sin = inputs(0, torch.bfloat16)
    turned, _ = rotate(query, key, cos.float(), sin.float())
    assert turned.dtype == torch.float32
    assert torch.equal(turned, rotate_plain(query, cos.float(), sin.float()))
    turned, _ = rotate(query, key, cos[:1], sin[:1])
    assert torch.equal(turned, rotate_plain(query, cos[:1], sin[:1]))
    half, _ = rotate(query.half(), key.half(), cos.half(), sin.half())
    assert torch.equal(half, rotate_plain(query.half(), cos.half(), sin.half()))


def test_no_token_gives_nothing() -> None:
    query, key = rotate(torch.zeros(3, 0, 4), torch.zeros(2, 0, 4), torch.zeros(0, 4), torch.zeros(0, 4))
    assert query.shape == (3, 0, 4)
    assert key.shape == (2, 0, 4)
