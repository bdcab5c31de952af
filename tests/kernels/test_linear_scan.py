"""The plain twins: by hand, against the definition, against each other."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from millrace.kernels.linear_scan import chunked, gae, linear_scan, loop
from tests.close import close_fp32, close_fp64
from tests.kernels.packed_rows import Rows, gae_by_sums, random_rows


def double(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_four_tokens_by_hand() -> None:
    x_T, w_T = double(1.0, -2.0, 3.0, 0.5), double(0.5, 0.25, 2.0, 0.0)
    # 3 + 2 * 0.5 = 4, -2 + 0.25 * 4 = -1, 1 + 0.5 * -1 = 0.5
    assert loop(x_T, w_T, reverse=True).tolist() == [0.5, -1.0, 4.0, 0.5]
    # -2 + 0.25 * 1 = -1.75, 3 + 2 * -1.75 = -0.5, 0.5 + 0 * -0.5 = 0.5
    assert loop(x_T, w_T, reverse=False).tolist() == [1.0, -1.75, -0.5, 0.5]


def test_nothing_crosses_a_share_of_zero_not_even_nan() -> None:
    x_T, w_T = double(1.0, float("nan"), 3.0, 4.0), double(0.0, 0.5, 0.0, 0.5)
    close_fp64(loop(x_T, w_T, reverse=True), [1.0, float("nan"), 3.0, 4.0], equal_nan=True)
    close_fp64(loop(x_T, w_T, reverse=False), [1.0, float("nan"), 3.0, 5.5], equal_nan=True)


def test_the_loop_carries_in_float64() -> None:
    x_T = torch.full((3000,), 0.1)
    carried_T = loop(x_T, torch.ones(3000), reverse=True)
    assert carried_T.dtype == torch.float64
    close_fp64(carried_T, x_T.double().cumsum(0).flip(0))


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_chunks_equal_the_loop(seed: int, chunk: int, reverse: bool) -> None:
    x_T, w_T = random_rows(seed, torch.float64).scan()
    close_fp64(chunked(x_T, w_T, reverse=reverse, chunk=chunk), loop(x_T, w_T, reverse=reverse))


def test_chunks_of_64_carry_float32_and_bfloat16_in_float32() -> None:
    assert inspect.signature(chunked).parameters["chunk"].default == 64
    for dtype in (torch.float32, torch.bfloat16):
        x_T, w_T = random_rows(3, dtype).scan()
        chunked_T = chunked(x_T, w_T, reverse=True)
        assert chunked_T.dtype == torch.float32
        close_fp32(chunked_T, loop(x_T, w_T, reverse=True), atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_chunks_refuse_what_they_would_spread(bad: float) -> None:
    fine_T, bad_T = double(1.0, 2.0), double(1.0, bad)
    for name, rows in (("x_T", (bad_T, fine_T)), ("w_T", (fine_T, bad_T))):
        message = f"{name} holds NaN or infinity; the scan 'chunked' takes finite numbers only"
        with pytest.raises(ValueError, match=message):
            chunked(*rows, reverse=True)


def test_an_empty_row_stays_empty() -> None:
    for scan in (loop, chunked):
        assert scan(double(), double(), reverse=True).shape == (0,)


def test_a_scan_goes_into_a_buffer_of_any_dtype() -> None:
    out_T = torch.zeros(2, dtype=torch.bfloat16)
    linear_scan(double(1.0, 2.0), double(0.5, 0.0), out_T, reverse=True, scan=loop)
    assert out_T.tolist() == [2.0, 2.0]


def plain_gae(rows: Rows, scan: object, gamma: float) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(rows.value_T), torch.empty_like(rows.value_T)
    gae(
        rows.reward_T,
        rows.value_T,
        rows.length_B,
        out,
        gamma=gamma,
        decay_B=gamma * rows.lam_B,
        bootstrap_B=rows.bootstrap_B,
        scan=scan,
    )
    return out


@pytest.mark.parametrize("scan", [loop, chunked])
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_its_definition(seed: int, scan: object) -> None:
    rows = random_rows(seed, torch.float64)
    for ours_T, sums_T in zip(plain_gae(rows, scan, 0.93), gae_by_sums(rows, 0.93), strict=True):
        close_fp64(ours_T, sums_T)


def test_gae_of_float32_is_rounded_once() -> None:
    rows = random_rows(1, torch.float32)
    for ours_T, sums_T in zip(plain_gae(rows, loop, 0.93), gae_by_sums(rows, 0.93), strict=True):
        assert ours_T.tolist() == sums_T.float().tolist()
    for ours_T, sums_T in zip(plain_gae(rows, chunked, 0.93), gae_by_sums(rows, 0.93), strict=True):
        close_fp32(ours_T, sums_T)
