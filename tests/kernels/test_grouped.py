from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from millrace.kernels import grouped as module
from millrace.kernels.grouped import grouped_linear
from tests.close import close_bf16, close_fp32

COUNTS = [(3, 0, 5, 1), (0, 0, 9, 0), (0, 4, 0, 0), (2, 2, 2, 2), (0, 0, 0, 0)]
DOOR = [
    ((4, 3), (2, 5, 4), (2, 2), r"x_ND has shape \(4, 3\) and weight_EMD \(2, 5, 4\); they must be"),
    ((3,), (2, 5, 3), (2, 1), r"x_ND has shape \(3,\)"),
    ((4, 3), (5, 3), (2, 2), r"weight_EMD \(5, 3\); they must be \[N, D\] and \[E, M, D\]"),
    (
        (4, 3),
        (2, 5, 3),
        (2, 1),
        r"count_E is \[2, 1\]; it must have for each of 2 experts how many of 4 rows",
    ),
    ((4, 3), (2, 5, 3), (2, 1, 1), r"count_E is \[2, 1, 1\]"),
    ((4, 3), (2, 5, 3), (5, -1), r"count_E is \[5, -1\]"),
]


def inputs(
    seed: int,
    count_E: tuple[int, ...],
    *,
    num_in: int = 5,
    num_out: int = 3,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights, and a slope of the product."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(sum(count_E), num_in), (len(count_E), num_out, num_in), (sum(count_E), num_out)]
    x, weight, slope = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return x.requires_grad_(), weight.requires_grad_(), slope


def one_by_one(x_ND: Tensor, weight_EMD: Tensor, count_E: tuple[int, ...]) -> Tensor:
    """Each row times a weight of its own."""
    expert_N = torch.arange(len(count_E)).repeat_interleave(torch.tensor(count_E))
    return torch.einsum("nd,nmd->nm", x_ND, weight_EMD[expert_N])


@pytest.mark.parametrize("count_E", COUNTS)
@pytest.mark.parametrize("seed", range(4))
def test_values_and_slopes_equal_those_of_rows_one_by_one(seed: int, count_E: tuple[int, ...]) -> None:
    x, weight, slope = inputs(seed, count_E)
    ours, plain = grouped_linear(x, weight, count_E), one_by_one(x, weight, count_E)
    assert ours.shape == plain.shape
    close_fp32(ours, plain)
    expected = torch.autograd.grad(plain, [x, weight], slope)
    for one, other in zip(torch.autograd.grad(ours, [x, weight], slope), expected, strict=True):
        close_fp32(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count_E", COUNTS[:-1])
def test_the_product_of_torch_equals_the_loop(
    monkeypatch: pytest.MonkeyPatch, count_E: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight, slope = inputs(1, count_E, num_in=16, num_out=8, dtype=dtype)
    close = partial(close_bf16, atol=0.02) if dtype is torch.bfloat16 else close_fp32
    loop = grouped_linear(x, weight, count_E)
    expected = torch.autograd.grad(loop, [x, weight], slope)
    asked = []
    monkeypatch.setattr(module, "_native", lambda *what: asked.append(what) or True)
    native = grouped_linear(x, weight, count_E)
    close(native, loop)
    for one, other in zip(torch.autograd.grad(native, [x, weight], slope), expected, strict=True):
        close(one, other)
    # Both widths of each product matter to it.
    assert asked == [("cpu", dtype, 8, 16), ("cpu", dtype, 16, 8), ("cpu", dtype, 8, 16)]


def test_a_slope_that_is_one_number_seen_many_times_is_read_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = inputs(2, (3, 0, 1, 4), num_in=16, num_out=8)
    monkeypatch.setattr(module, "_native", lambda *_: True)
    (x_slope,) = torch.autograd.grad(grouped_linear(x, weight, (3, 0, 1, 4)).sum(), x)
    close_fp32(x_slope, weight.sum(1)[[0, 0, 0, 2, 3, 3, 3, 3]])


@pytest.mark.parametrize("trained", [0, 1])
def test_only_what_is_trained_gets_a_slope(trained: int) -> None:
    x, weight, slope = inputs(3, (2, 1))
    leaves = [x.detach(), weight.detach()]
    leaves[trained].requires_grad_()
    grouped_linear(leaves[0], leaves[1], (2, 1)).backward(slope)
    (expected,) = torch.autograd.grad(one_by_one(x, weight, (2, 1)), [x, weight][trained], slope)
    grad = leaves[trained].grad
    assert grad is not None
    close_fp32(grad, expected)
    assert leaves[1 - trained].grad is None


def test_torch_multiplies_bfloat16_on_cuda_whose_rows_are_aligned() -> None:
    assert module._native("cuda", torch.bfloat16, 8, 48)
    assert not module._native("cuda", torch.bfloat16, 8, 20)
    assert not module._native("cuda", torch.bfloat16, 9, 16)
    assert not module._native("cuda", torch.float32, 8, 48)
    assert not module._native("cpu", torch.bfloat16, 8, 48)


@pytest.mark.parametrize(("x_size", "weight_size", "count_E", "sentence"), DOOR)
def test_what_does_not_fit_is_refused(
    x_size: tuple[int, ...], weight_size: tuple[int, ...], count_E: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        grouped_linear(torch.zeros(x_size), torch.zeros(weight_size), count_E)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x_ND is torch\.bfloat16 and weight_EMD torch\.float32"):
        grouped_linear(torch.zeros(1, 3).bfloat16(), torch.zeros(1, 2, 3), (1,))
