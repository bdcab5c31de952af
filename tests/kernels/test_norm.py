from __future__ import annotations

import pytest
import torch
from torch import Tensor

from millrace.kernels.norm import FORMS, Form, rms_norm, rms_norm_plain
from tests.close import close_bf16, close_fp32


def inputs(seed: int, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, slope = torch.randn(2, *shape, generator=generator)
    weight_D = torch.rand(shape[-1], generator=generator) + 0.5
    return x.to(dtype), weight_D.to(dtype), slope.to(dtype)


def slopes(out: Tensor, x: Tensor, weight_D: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, (x, weight_D), slope)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(5))
def test_the_norm_equals_its_twin_forward_and_backward(seed: int, form: Form) -> None:
    x, weight_D, slope = inputs(seed, torch.float32, 2, 3, 5 + seed)
    x, weight_D = x.requires_grad_(), weight_D.requires_grad_()
    ours = rms_norm(x, weight_D, 0.3, form=form)
    plain = rms_norm_plain(x, weight_D, 0.3, form=form)
    assert type(ours.grad_fn).__name__ == "_NormBackward"
    close_fp32(ours.detach(), plain.detach())
    for one, other in zip(slopes(ours, x, weight_D, slope), slopes(plain, x, weight_D, slope), strict=True):
        close_fp32(one, other)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight_D, 0.3, form=form), ours)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_is_rounded_where_each_form_rounds_it(seed: int, form: Form) -> None:
    x, weight_D, slope = inputs(seed, torch.bfloat16, 9, 7)
    x, weight_D = x.requires_grad_(), weight_D.requires_grad_()
    ours = rms_norm(x, weight_D, 1e-3, form=form)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, rms_norm_plain(x, weight_D, 1e-3, form=form))
    # Slopes are rounded once, at the end, so they are those of float32.
    wide_x, wide_D = x.detach().float().requires_grad_(), weight_D.detach().float().requires_grad_()
    plain = rms_norm_plain(wide_x, wide_D, 1e-3, form=form)
    expected = slopes(plain, wide_x, wide_D, slope.float())
    for one, other in zip(slopes(ours, x, weight_D, slope), expected, strict=True):
        assert one.dtype == torch.bfloat16
        close_bf16(one, other)


def test_the_three_forms_differ_as_transformers_classes_do() -> None:
    x = torch.tensor([[3.0, 4.0]])
    weight_D = torch.tensor([2.0, 0.5])
    close_fp32(rms_norm(x, weight_D, 0.0, form="llama"), [[1.69705627, 0.56568542]])
    close_fp32(rms_norm(x, weight_D, 0.0, form="olmo2"), [[1.69705627, 0.56568542]])
    close_fp32(rms_norm(x, weight_D, 0.0, form="gemma"), [[2.54558441, 1.69705627]])
    x, weight_D, _ = inputs(0, torch.bfloat16, 20, 11)
    llama, olmo2 = (rms_norm(x, weight_D, 0.0, form=form) for form in ("llama", "olmo2"))
    assert int((llama != olmo2).sum()) == int(
        (
            rms_norm_plain(x, weight_D, 0.0, form="llama") != rms_norm_plain(x, weight_D, 0.0, form="olmo2")
        ).sum()
    )
    assert not torch.equal(llama, olmo2)


def test_eps_is_added_to_the_mean_square() -> None:
    close_fp32(rms_norm(torch.full((1, 4), 3.0), torch.ones(4), 16.0, form="llama"), [[0.6] * 4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_wherever_it_stands(dtype: torch.dtype, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    row, weight_D, _ = inputs(0, dtype, 1, 37)
    expected = rms_norm(row, weight_D, 1e-6, form="llama")
    for num_rows in (2, 3, 17, 70):
        x, _, _ = inputs(num_rows, dtype, num_rows, 37)
        for place in (0, num_rows // 2, num_rows - 1):
            x[place] = row[0]
            assert torch.equal(rms_norm(x, weight_D, 1e-6, form="llama")[place], expected[0])
    torch.set_num_threads(before)


def test_a_frozen_weight_or_frozen_input_is_left_without_a_slope() -> None:
    x, weight_D, slope = inputs(0, torch.float32, 3, 5)
    for frozen, trained in ((x, weight_D), (weight_D, x)):
        frozen.requires_grad_(False)
        trained.requires_grad_(True)
        ours = rms_norm(x, weight_D, 1e-6, form="llama")
        plain = rms_norm_plain(x, weight_D, 1e-6, form="llama")
        (one,) = torch.autograd.grad(ours, trained, slope)
        (other,) = torch.autograd.grad(plain, trained, slope)
        close_fp32(one, other)


def test_a_view_is_normed_by_its_own_rows() -> None:
    x, weight_D, _ = inputs(0, torch.float32, 5, 3)
    close_fp32(
        rms_norm(x.T, torch.ones(5), 1e-6, form="llama"),
        rms_norm_plain(x.T, torch.ones(5), 1e-6, form="llama"),
    )
    assert weight_D.shape == (3,)


@pytest.mark.parametrize("form", FORMS)
def test_what_the_kernel_does_not_know_is_left_to_the_twin(form: Form) -> None:
    x, weight_D, _ = inputs(0, torch.float64, 4, 6)
    x.requires_grad_()
    ours = rms_norm(x, weight_D, 1e-6, form=form)
    assert type(ours.grad_fn).__name__ != "_NormBackward"
    assert torch.equal(ours, rms_norm_plain(x, weight_D, 1e-6, form=form))
    empty = rms_norm(torch.zeros(0, 6), torch.ones(6), 1e-6, form=form)
    assert empty.shape == (0, 6)
    with pytest.raises(RuntimeError, match="must match"):
        rms_norm(torch.zeros(2, 6), torch.ones(5), 1e-6, form=form)


def test_slopes_of_many_rows_are_added_in_float64() -> None:
    """10,000 slopes of a hundredth on one of a million: in float32 each would be lost or misrounded."""
    x = torch.ones(3001, 1)
    weight_D = torch.ones(1, requires_grad=True)
    slope = torch.full((3001, 1), 0.01)
    slope[0] = 1e6
    rms_norm(x, weight_D, 0.0, form="llama").backward(slope)
    assert weight_D.grad is not None
    close_fp32(weight_D.grad, [1e6 + 30.0], rtol=1e-7)
