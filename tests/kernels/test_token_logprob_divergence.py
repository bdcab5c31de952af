from __future__ import annotations

import math

import pytest
import torch

from millrace.kernels import token_logprob as kernel
from millrace.kernels.token_logprob import (
    Head,
    token_divergence,
    token_squares,
)
from tests.close import close_bf16, close_fp32, close_fp64
from tests.kernels.heads import CASES, gradients, in_double, leaves, random_case, random_reference
from tests.kernels.slow_twins import token_divergence_whole, token_squares_whole


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_chunked_squares_equal_the_whole(
    monkeypatch: pytest.MonkeyPatch, seed: int, case: str, rows: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    options = dict(CASES[case])
    temperature = options.pop("temperature", 1.0)
    hidden_ND, head, _ = random_case(seed, torch.float64, **options)
    square_N = token_squares(hidden_ND, head, temperature=temperature)
    close_fp64(square_N, token_squares_whole(hidden_ND, head, temperature=temperature))
    assert not square_N.requires_grad


def test_squares_and_divergence_of_two_words_by_hand() -> None:
    one = Head(torch.tensor([[0.0], [math.log(3)]]))
    even = Head(torch.tensor([[2.0], [2.0]], dtype=torch.bfloat16))
    hidden_ND, even_ND = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bfloat16)
    close_fp32(token_squares(hidden_ND, one, temperature=1.0), [0.625, 0.625])
    close_fp32(token_squares(hidden_ND, one, temperature=0.5), [0.82, 0.82])
    half = token_squares(even_ND, even, temperature=0.5)
    close_fp32(half, [0.5, 0.5])
    assert half.dtype == torch.float32
    # p = (1/4, 3/4) and q = (1/2, 1/2); at temperature 1/2 p = (1/10, 9/10).
    warm_N = token_divergence(hidden_ND, one, even_ND, even, temperature=1.0)
    close_fp32(warm_N, [0.25 * math.log(0.5) + 0.75 * math.log(1.5)] * 2)
    cool_N = token_divergence(hidden_ND, one, even_ND, even, temperature=0.5)
    close_fp32(cool_N, [0.1 * math.log(0.2) + 0.9 * math.log(1.8)] * 2)
    # The other way round: the mean is over the policy's distribution.
    back_N = token_divergence(even_ND, even, hidden_ND, one, temperature=1.0)
    close_fp32(back_N, [0.5 * math.log(2) + 0.5 * math.log(2 / 3)] * 2)


@pytest.mark.slow_beyond(14)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_chunked_divergence_equals_the_whole_in_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, seed: int, case: str, rows: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    options = dict(CASES[case])
    temperature = options.pop("temperature", 1.0)
    hidden_ND, head, _ = random_case(seed, torch.float64, **options)
    reference = random_reference(seed)
    actual_N = token_divergence(hidden_ND, head, *reference, temperature=temperature)
    expected_N = token_divergence_whole(hidden_ND, head, *reference, temperature=temperature)
    assert expected_N.min() > 0.01
    close_fp64(actual_N, expected_N)
    ours = gradients((actual_N,), hidden_ND, head, lean=(1.0,))
    theirs = gradients((expected_N,), hidden_ND, head, lean=(1.0,))
    for one, other in zip(ours, theirs, strict=True):
        close_fp64(one, other)


def test_the_reference_gets_no_gradient() -> None:
    hidden_ND, head, _ = random_case(0, torch.float64)
    for function in (token_divergence, token_divergence_whole):
        reference_ND, reference_head = random_reference(0)
        function(hidden_ND, head, reference_ND, reference_head, temperature=0.9).sum().backward()
        assert [x.grad for x in leaves(reference_ND, reference_head)] == [None] * 3


def test_a_policy_that_equals_the_reference_has_no_divergence_and_no_gradient() -> None:
    hidden_ND, head, _ = random_case(1, torch.float64, bias=True, softcap=2.0)
    divergence_N = token_divergence(hidden_ND, head, hidden_ND, head, temperature=0.7)
    close_fp64(divergence_N, torch.zeros(13))
    for gradient in torch.autograd.grad(divergence_N.sum(), leaves(hidden_ND, head)):
        assert gradient.abs().max() < 1e-12


def test_a_bfloat16_reference_may_stand_beside_a_float32_policy() -> None:
    hidden_ND, head, _ = random_case(6, torch.float32)
    reference_ND, reference_head = random_reference(6)
    exact_N = token_divergence(
        hidden_ND.double(), in_double(head), reference_ND, reference_head, temperature=1.0
    )
    narrow = Head(*(x.bfloat16() for x in leaves(reference_ND, reference_head)[1:]), 0.5, 4.0)
    actual_N = token_divergence(hidden_ND, head, reference_ND.bfloat16(), narrow, temperature=1.0)
    assert actual_N.dtype == torch.float32
    close_bf16(actual_N, exact_N, atol=0.03)


def test_no_tokens_have_no_squares_and_no_divergence() -> None:
    weight_VD = torch.ones(4, 2, requires_grad=True)
    nothing_ND = torch.zeros(0, 2, requires_grad=True)
    assert token_squares(nothing_ND, Head(weight_VD), temperature=1.0).shape == (0,)
    divergence_N = token_divergence(nothing_ND, Head(weight_VD), nothing_ND, Head(weight_VD), temperature=1.0)
    assert divergence_N.shape == (0,)
    divergence_N.sum().backward()
    assert weight_VD.grad is not None and weight_VD.grad.eq(0).all()
