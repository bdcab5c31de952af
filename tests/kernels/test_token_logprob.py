from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.kernels import token_logprob as kernel
from millrace.kernels.token_logprob import (
    Head,
    rows_per_chunk,
    token_divergence,
    token_logprob,
    token_squares,
)
from tests.close import close_bf16, close_fp32, close_fp64
from tests.kernels.heads import CASES, Made, gradients, in_double, random_case, random_reference
from tests.kernels.slow_twins import token_divergence_whole, token_logprob_whole, token_squares_whole


@pytest.mark.slow_beyond(8)
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_chunks_equal_the_whole_in_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, seed: int, case: str, rows: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    options = dict(CASES[case])
    temperature = options.pop("temperature", 1.0)
    hidden_ND, head, target_N = random_case(seed, torch.float64, **options)
    actual = token_logprob(hidden_ND, head, target_N, temperature=temperature)
    expected = token_logprob_whole(hidden_ND, head, target_N, temperature=temperature)
    close_fp64(actual[0], expected[0])
    close_fp64(actual[1], expected[1])
    for lean in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.7)):
        actual = token_logprob(hidden_ND, head, target_N, temperature=temperature)
        expected = token_logprob_whole(hidden_ND, head, target_N, temperature=temperature)
        ours = gradients(actual, hidden_ND, head, lean=lean)
        theirs = gradients(expected, hidden_ND, head, lean=lean)
        for one, other in zip(ours, theirs, strict=True):
            close_fp64(one, other)


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_float64(case: str) -> None:
    options = dict(CASES[case])
    temperature = options.pop("temperature", 1.0)
    found = []
    for dtype in (torch.float32, torch.float64):
        hidden_ND, head, target_N = random_case(7, dtype, **options)
        result = token_logprob(hidden_ND, head, target_N, temperature=temperature)
        assert result[0].dtype == result[1].dtype == dtype
        found.append([*result, *gradients(result, hidden_ND, head)])
    for single, double in zip(*found, strict=True):
        close_fp32(single, double, atol=1e-5)


def test_bfloat16_weights_give_float32_logprobs_and_bfloat16_gradients() -> None:
    hidden_ND, head, target_N = random_case(3, torch.bfloat16, bias=True)
    actual = token_logprob(hidden_ND, head, target_N, temperature=1.0)
    assert actual[0].dtype == torch.float32
    wide = Head(
        head.weight_VD.detach().double(), None if head.bias_V is None else head.bias_V.detach().double()
    )
    expected = token_logprob_whole(hidden_ND.detach().double(), wide, target_N, temperature=1.0)
    close_bf16(actual[0], expected[0], atol=0.02)
    parts = gradients(actual, hidden_ND, head)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 3
    hidden_64, head_64, _ = random_case(3, torch.float64, bias=True)
    exact = gradients(token_logprob_whole(hidden_64, head_64, target_N, temperature=1.0), hidden_64, head_64)
    for part, whole in zip(parts, exact, strict=True):
        close_bf16(part, whole, atol=0.1)


def test_two_words_by_hand() -> None:
    head = Head(torch.tensor([[0.0], [math.log(3)]]))
    logprob_N, entropy_N = token_logprob(torch.ones(2, 1), head, torch.tensor([0, 1]), temperature=1.0)
    close_fp32(logprob_N, [math.log(0.25), math.log(0.75)])
    close_fp32(entropy_N, [-0.25 * math.log(0.25) - 0.75 * math.log(0.75)] * 2)
    cooler_N, _ = token_logprob(torch.ones(2, 1), head, torch.tensor([0, 1]), temperature=0.5)
    close_fp32(cooler_N, [math.log(0.1), math.log(0.9)])


@pytest.mark.parametrize(
    # Softmax, two for the slope, its transpose; the entropy adds five. What one chunk held is kept; otherwise
    # logits and division come again. With a cap nothing is kept: three to make it, four for its derivative.
    ("rows", "softcap", "expected"),
    [(13, None, [4, 9, 9]), (12, None, [6, 11, 11]), (13, 2.0, [13, 18, 18])],
)
def test_an_entropy_outside_the_loss_costs_the_backward_nothing(
    monkeypatch: pytest.MonkeyPatch, rows: int, softcap: float | None, expected: list[int]
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    counts = []
    for lean in ((1.0, 0.0), (1.0, -0.7), (0.0, 1.0)):
        hidden_ND, head, target_N = random_case(0, torch.float32, softcap=softcap)
        result = token_logprob(hidden_ND, head, target_N, temperature=0.7)
        with Made(size=rows * 17) as made:
            gradients(result, hidden_ND, head, lean=lean)
        counts.append(made.count)
    assert counts == expected


def test_a_second_backward_through_a_retained_graph_gives_the_same_again() -> None:
    hidden_ND, head, target_N = random_case(3, torch.float64, bias=True)
    logprob_N, entropy_N = token_logprob(hidden_ND, head, target_N, temperature=0.7)
    divergence_N = token_divergence(hidden_ND, head, *random_reference(3), temperature=0.7)
    total = (logprob_N + 0.3 * entropy_N + divergence_N).sum()
    first = torch.autograd.grad(total, [hidden_ND, head.weight_VD], retain_graph=True)
    again = torch.autograd.grad(total, [hidden_ND, head.weight_VD])
    for one, other in zip(first, again, strict=True):
        close_fp64(one, other)


def test_without_a_gradient_of_the_entropy_the_backward_is_onehot_minus_softmax_to_the_bit() -> None:
    hidden_ND, head, target_N = random_case(5, torch.float32)
    ours = gradients(
        token_logprob(hidden_ND, head, target_N, temperature=1.0), hidden_ND, head, lean=(1.0, 0.0)
    )
    slope_N = torch.linspace(-1, 2, 13)
    with torch.no_grad():
        slope_NV = head.logits(hidden_ND).softmax(1).mul_(-slope_N[:, None])
        slope_NV.scatter_add_(1, target_N[:, None], slope_N[:, None])
        assert torch.equal(ours[0], slope_NV @ head.weight_VD)
        assert torch.equal(ours[1], torch.zeros(17, 5).addmm_(slope_NV.T, hidden_ND))


def test_logits_far_apart_give_an_entropy_of_0_and_finite_gradients() -> None:
    weight_VD = torch.tensor([[-1e4], [1e4], [0.0]], requires_grad=True)
    result = token_logprob(torch.ones(2, 1), Head(weight_VD), torch.tensor([1, 0]), temperature=1.0)
    close_fp32(result[0], [0.0, -2e4])
    close_fp32(result[1], [0.0, 0.0])
    (result[0] + result[1]).sum().backward()
    close_fp32(weight_VD.grad, [[1.0], [-1.0], [0.0]])


def test_a_logit_shared_by_all_leaves_the_entropy_exact() -> None:
    hidden_ND, head, target_N = random_case(2, torch.float32)
    expected_N = token_logprob_whole(hidden_ND.double(), in_double(head), target_N, temperature=1.0)[1]
    raised = Head(head.weight_VD, torch.full((17,), 512.0))
    close_fp32(token_logprob(hidden_ND, raised, target_N, temperature=1.0)[1], expected_N, atol=1e-4)


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 3 * 17)
    hidden_ND, head, target_N = random_case(4, torch.float64, bias=True)
    found, counts = [], []
    for _ in range(2):
        result = token_logprob(hidden_ND, head, target_N, temperature=0.7)
        with Made(size=17 * 5) as made:
            found.append(gradients(result, hidden_ND, head, inputs=[hidden_ND])[0])
        counts.append(made.count)
        head.weight_VD.requires_grad_(False)
    assert torch.equal(found[0], found[1])
    # Each of five chunks transposes the weight for its logits; a gradient is made once, then added to.
    assert counts == [11, 5]


def test_a_second_derivative_is_refused() -> None:
    hidden_ND, head, target_N = random_case(0, torch.float64)
    total = token_logprob(hidden_ND, head, target_N, temperature=1.0)[0].sum()
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.autograd.grad(total, [hidden_ND], create_graph=True)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(("elements", "held"), [(301, 300), (100, 100), (99, 100), (1, 100)])
def test_never_more_than_one_chunk_of_logits_is_held(
    monkeypatch: pytest.MonkeyPatch, elements: int, held: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", elements)
    hidden_ND = torch.linspace(-1, 1, 64)[:, None].requires_grad_()
    head = Head(torch.linspace(-1, 1, 100)[:, None].requires_grad_(), None, 0.5, 3.0)
    other = torch.linspace(1, 2, 64)[:, None], Head(torch.linspace(2, -1, 100)[:, None])
    target_N = torch.zeros(64, dtype=torch.long)
    calls: list[tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Any, ...]]] = [
        (token_logprob, (target_N,)),
        (token_divergence, other),
        (token_squares, ()),
        (token_logprob_whole, (target_N,)),
        (token_divergence_whole, other),
        (token_squares_whole, ()),
    ]
    seen = []
    for function, more in calls:
        with Made() as made:
            result = function(hidden_ND, head, *more, temperature=0.9)
            total = sum(x_N.sum() for x_N in (result if isinstance(result, tuple) else (result,)))
            if isinstance(total, Tensor) and total.requires_grad:
                total.backward()
        seen.append(made.largest)
    # The twins show that the measurement would see a whole [N, V].
    assert seen == [held] * 3 + [6400] * 3


def test_a_chunk_is_28_mebibytes_or_an_eighth_of_the_head_but_at_least_a_row() -> None:
    assert kernel.CHUNK_ELEMENTS * 4 == 28 * 2**20
    sizes = [(32_000, 256), (32_000, 2048), (152_000, 1024), (8_000_000, 7)]
    assert [rows_per_chunk(torch.empty(*size, device="meta")) for size in sizes] == [229, 256, 128, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hidden_state_that_is_not_finite_spoils_only_its_own_token(bad: float) -> None:
    hidden_ND, head, target_N = random_case(0, torch.float64)
    reference = random_reference(0)
    spoiled_ND = hidden_ND.detach().clone()
    spoiled_ND[4, 2] = bad
    for function, more in ((token_logprob, (target_N,)), (token_divergence, reference), (token_squares, ())):
        numbers = []
        for each_ND in (spoiled_ND, hidden_ND.detach()):
            result = function(each_ND, head, *more, temperature=1.0)
            numbers.append(torch.stack(result) if isinstance(result, tuple) else result[None])
        close_fp64(numbers[0].isnan().any(0), torch.arange(13) == 4)
        assert numbers[0][:, 4].isnan().all()
        clean = torch.arange(13) != 4
        close_fp64(numbers[0][:, clean], numbers[1][:, clean])


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_above_0_is_an_error(temperature: float) -> None:
    hidden_ND, head, target_N = random_case(0, torch.float64)
    for call in (
        lambda: token_logprob(hidden_ND, head, target_N, temperature=temperature),
        lambda: token_squares(hidden_ND, head, temperature=temperature),
        lambda: token_divergence(hidden_ND, head, hidden_ND, head, temperature=temperature),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == f"temperature is {temperature}; it must be above 0"


def test_shapes_that_do_not_fit_are_an_error() -> None:
    hidden_ND, head, target_N = random_case(0, torch.float64)
    wide_ND, other = torch.zeros(13, 6), Head(torch.zeros(18, 5))
    calls = {
        "target_N has shape (12,); hidden_ND holds 13 tokens": lambda: token_logprob(
            hidden_ND, head, target_N[1:], temperature=1.0
        ),
        "target_N has shape (13, 1); hidden_ND holds 13 tokens": lambda: token_logprob(
            hidden_ND, head, target_N[:, None], temperature=1.0
        ),
        "hidden_ND has shape (13, 6), but its head is (17, 5); [N, 5] is needed": lambda: token_squares(
            wide_ND, head, temperature=1.0
        ),
        "hidden_ND has shape (1, 13, 5), but its head is (17, 5); [N, 5] is needed": lambda: token_logprob(
            hidden_ND[None], head, target_N, temperature=1.0
        ),
        "reference_hidden_ND has shape (13, 6), but its head is (17, 5); [N, 5] is needed": lambda: (
            token_divergence(hidden_ND, head, wide_ND, head, temperature=1.0)
        ),
        "reference_hidden_ND holds 12 tokens, hidden_ND 13": lambda: token_divergence(
            hidden_ND, head, hidden_ND[1:], head, temperature=1.0
        ),
        "reference_head has a vocabulary of 18 tokens, head one of 17": lambda: token_divergence(
            hidden_ND, head, hidden_ND, other, temperature=1.0
        ),
    }
    for sentence, call in calls.items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == sentence
