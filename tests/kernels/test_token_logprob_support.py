"""Draws among some tokens only: the policy is the one that knows no other words."""

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
    Supports,
    runs,
    token_divergence,
    token_logprob,
    token_squares,
)
from tests.close import close_fp32, close_fp64
from tests.kernels.heads import (
    CASES,
    Made,
    gradients,
    leaves,
    one_by_one,
    random_case,
    random_reference,
    random_support,
    support_of,
)
from tests.kernels.slow_twins import token_divergence_whole, token_logprob_whole, token_squares_whole


def case_of(seed: int, case: str) -> tuple[Tensor, Head, Tensor, float]:
    options = dict(CASES[case])
    temperature = options.pop("temperature", 1.0)
    return *random_case(seed, torch.float64, **options), temperature


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_chunks_equal_a_policy_that_knows_no_other_words_in_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, seed: int, case: str, rows: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    hidden_ND, head, target_N, temperature = case_of(seed, case)
    support = random_support(seed, target_N)
    for lean in ((1.0, 0.0), (0.0, 1.0), (1.0, -0.7)):
        actual = token_logprob(hidden_ND, head, target_N, temperature=temperature, support=support)
        expected = one_by_one(
            token_logprob_whole, support, (hidden_ND, head), target_N, temperature=temperature
        )
        close_fp64(actual[0], expected[0])
        close_fp64(actual[1], expected[1])
        ours = gradients(actual, hidden_ND, head, lean=lean)
        theirs = gradients(expected, hidden_ND, head, lean=lean)
        for one, other in zip(ours, theirs, strict=True):
            close_fp64(one, other)


@pytest.mark.slow_beyond(4)
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_squares_and_divergence_are_over_the_support_too(
    monkeypatch: pytest.MonkeyPatch, seed: int, case: str, rows: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    hidden_ND, head, target_N, temperature = case_of(seed, case)
    support, reference = random_support(seed, target_N), random_reference(seed)
    square_N = token_squares(hidden_ND, head, temperature=temperature, support=support)
    (expected_N,) = one_by_one(token_squares_whole, support, (hidden_ND, head), temperature=temperature)
    close_fp64(square_N, expected_N)
    actual_N = token_divergence(hidden_ND, head, *reference, temperature=temperature, support=support)
    (expected_N,) = one_by_one(
        token_divergence_whole, support, (hidden_ND, head), reference, temperature=temperature
    )
    close_fp64(actual_N, expected_N)
    ours = gradients((actual_N,), hidden_ND, head, lean=(1.0,))
    theirs = gradients((expected_N,), hidden_ND, head, lean=(1.0,))
    for one, other in zip(ours, theirs, strict=True):
        close_fp64(one, other)


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("rows", [4, 100])
def test_the_derivatives_are_slopes(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    hidden_ND, head, target_N = random_case(1, torch.float64, bias=True, softcap=2.0)
    support, reference = random_support(1, target_N), random_reference(1)

    def numbers(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor) -> tuple[Tensor, ...]:
        made = Head(weight_VD, bias_V, 0.5, 2.0)
        divergence_N = token_divergence(hidden_ND, made, *reference, temperature=0.7, support=support)
        return *token_logprob(hidden_ND, made, target_N, temperature=0.7, support=support), divergence_N

    assert torch.autograd.gradcheck(numbers, leaves(hidden_ND, head), check_undefined_grad=False)


def test_two_words_of_three_by_hand_whatever_the_third() -> None:
    head = Head(torch.tensor([[0.0], [1e4], [math.log(3)]]))
    support = support_of([2, 0], [], [0, 2], [1])
    logprob_N, entropy_N = token_logprob(
        torch.ones(4, 1), head, torch.tensor([0, 1, 2, 1]), temperature=1.0, support=support
    )
    close_fp32(logprob_N, [math.log(0.25), 0.0, math.log(0.75), 0.0])
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    close_fp32(entropy_N, [entropy, 0.0, entropy, 0.0])
    square_N = token_squares(torch.ones(4, 1), head, temperature=1.0, support=support)
    close_fp32(square_N, [0.625, 1.0, 0.625, 1.0])


def test_words_outside_of_every_support_get_no_gradient_at_all() -> None:
    hidden_ND, head, target_N = random_case(0, torch.float32, bias=True)
    support = support_of(*([3, target, 11] for target in (target_N % 7).tolist()))
    result = token_logprob(hidden_ND, head, target_N % 7, temperature=0.7, support=support)
    _, weight_VD, bias_V = gradients(result, hidden_ND, head)
    inside_V = torch.zeros(17, dtype=torch.bool)
    inside_V[support.token_M] = True
    assert 3 <= inside_V.sum() <= 8
    assert torch.equal((weight_VD != 0).any(1), inside_V)
    assert torch.equal(bias_V != 0, inside_V)


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_what_was_drawn_among_all_words_stays_as_it_was_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", rows * 17)
    hidden_ND, head, target_N = random_case(2, torch.float32)
    some = random_support(2, target_N)
    whole = token_logprob(hidden_ND, head, target_N, temperature=0.7)
    mixed = token_logprob(hidden_ND, head, target_N, temperature=0.7, support=some)
    free_N = some.count_N == 0
    assert 1 <= free_N.sum() < 13
    for one_N, other_N in zip(whole, mixed, strict=True):
        assert torch.equal(one_N[free_N], other_N[free_N])
        assert not torch.equal(one_N, other_N)
    before, after = (gradients(one, hidden_ND, head, inputs=[hidden_ND])[0] for one in (whole, mixed))
    assert torch.equal(before[free_N], after[free_N])
    # All words by name are all words, in whatever order, and some may be named twice.
    every = support_of(*[[16, *range(16), 5]] * 13)
    named = token_logprob(hidden_ND, head, target_N, temperature=0.7, support=every)
    assert torch.equal(whole[0], named[0]) and torch.equal(whole[1], named[1])
    again = token_logprob(hidden_ND, head, target_N, temperature=0.7)
    for one, other in zip(gradients(named, hidden_ND, head), gradients(again, hidden_ND, head), strict=True):
        assert torch.equal(one, other)


def test_a_second_backward_through_a_retained_graph_gives_the_same_again() -> None:
    hidden_ND, head, target_N = random_case(3, torch.float64, bias=True)
    support = random_support(3, target_N)
    logprob_N, entropy_N = token_logprob(hidden_ND, head, target_N, temperature=0.7, support=support)
    divergence_N = token_divergence(hidden_ND, head, *random_reference(3), temperature=0.7, support=support)
    total = (logprob_N + 0.3 * entropy_N + divergence_N).sum()
    first = torch.autograd.grad(total, [hidden_ND, head.weight_VD], retain_graph=True)
    again = torch.autograd.grad(total, [hidden_ND, head.weight_VD])
    for one, other in zip(first, again, strict=True):
        close_fp64(one, other)


def test_never_more_than_one_chunk_of_logits_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 300)
    hidden_ND = torch.linspace(-1, 1, 64)[:, None].requires_grad_()
    head = Head(torch.linspace(-1, 1, 100)[:, None].requires_grad_(), None, 0.5, 3.0)
    other = torch.linspace(1, 2, 64)[:, None], Head(torch.linspace(2, -1, 100)[:, None])
    support = support_of(*[[0, 7]] * 64)
    with Made() as made:
        target_N = torch.zeros(64, dtype=torch.long)
        numbers = (
            *token_logprob(hidden_ND, head, target_N, temperature=0.9, support=support),
            token_divergence(hidden_ND, head, *other, temperature=0.9, support=support),
        )
        torch.stack(numbers).sum().backward()
        token_squares(hidden_ND, head, temperature=0.9, support=support)
    assert made.largest == 300


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_hidden_state_that_is_not_finite_spoils_only_its_own_token(bad: float) -> None:
    hidden_ND, head, target_N = random_case(0, torch.float64)
    # Words whose logits all are minus infinity for one of the bad values, plus infinity for the other.
    low = (head.weight_VD[:, 2] < 0).nonzero()[:, 0].tolist()
    assert 2 < len(low) < 15
    target_N[:] = low[1]
    support = support_of(*[low] * 13)
    spoiled_ND = hidden_ND.detach().clone()
    spoiled_ND[4, 2] = bad
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (token_logprob, (target_N,)),
        (token_divergence, random_reference(0)),
        (token_squares, ()),
    ]
    for function, more in calls:
        numbers = []
        for each_ND in (spoiled_ND, hidden_ND.detach()):
            result = function(each_ND, head, *more, temperature=1.0, support=support)
            numbers.append(torch.stack(result) if isinstance(result, tuple) else result[None])
        clean = torch.arange(13) != 4
        assert numbers[0][:, 4].isnan().all()
        close_fp64(numbers[0][:, clean], numbers[1][:, clean])


def test_a_batch_without_tokens_may_have_supports() -> None:
    weight_VD = torch.ones(4, 2, requires_grad=True)
    nothing = support_of()
    result = token_logprob(
        torch.zeros(0, 2), Head(weight_VD), torch.zeros(0, dtype=torch.long), temperature=1.0, support=nothing
    )
    assert result[0].shape == result[1].shape == (0,)
    result[0].sum().backward()
    assert weight_VD.grad is not None and weight_VD.grad.eq(0).all()


def test_runs_by_hand() -> None:
    found = runs(torch.tensor([5, 9, 0, 3]), torch.tensor([2, 0, 1, 3]))
    assert found.tolist() == [5, 6, 0, 3, 4, 5]
    assert runs(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long)).shape == (0,)


def test_supports_are_indexed_like_a_column() -> None:
    support = support_of([4, 1], [], [2], [3, 0, 5])

    def lists(one: Supports) -> list[list[int]]:
        return [part.tolist() for part in one.token_M.split(one.count_N.tolist())]

    assert support.row_M.tolist() == [0, 0, 2, 3, 3, 3]
    assert lists(support[torch.tensor([3, 0, 1, 3])]) == [[3, 0, 5], [4, 1], [], [3, 0, 5]]
    assert lists(support[torch.tensor([False, True, True, False])]) == [[], [2]]
    assert lists(support[1:3]) == [[], [2]]
    assert lists(support[2:99]) == [[2], [3, 0, 5]]
    assert lists(support[4:]) == []
    moved = support.to("meta")
    assert moved.token_M.is_meta and moved.count_N.is_meta


def test_supports_that_do_not_fit_are_an_error() -> None:
    hidden_ND, head, target_N = random_case(0, torch.float64)
    target_N[:] = 7
    fits = support_of(*[[7, 3]] * 13)
    needed = "one for each of the 13 hidden states is needed, 0 or more"
    negative_N = fits.count_N.clone()
    negative_N[4:6] = torch.tensor([-1, 5])
    cases = {
        f"support has counts of shape (12,) that add up to 24, for 24 tokens; {needed}": fits[1:],
        f"support has counts of shape (13,) that add up to 26, for 25 tokens; {needed}": Supports(
            fits.token_M[1:], fits.count_N
        ),
        f"support has counts of shape (13,) that add up to 26, for 26 tokens; {needed}": Supports(
            fits.token_M, negative_N
        ),
        "support holds token 17; the vocabulary has 17": support_of(*[[7, 16]] * 12, [7, 17]),
        "support holds token -1; the vocabulary has 17": support_of([0, -1, 7], *[[7]] * 12),
    }
    for sentence, support in cases.items():
        for function, more in (
            (token_logprob, (target_N,)),
            (token_squares, ()),
            (token_divergence, random_reference(0)),
        ):
            with pytest.raises(ValueError) as error:
                function(hidden_ND, head, *more, temperature=1.0, support=support)
            assert str(error.value) == sentence


def test_a_support_without_its_target_is_an_error() -> None:
    hidden_ND, head, _ = random_case(0, torch.float64)
    target_N = torch.arange(13)
    support = support_of(*[[t, 16] for t in range(9)], [], [11, 9], [11], [12])
    with pytest.raises(ValueError) as error:
        token_logprob(hidden_ND, head, target_N, temperature=1.0, support=support)
    assert str(error.value) == (
        "the support of target_N[10] lacks the target itself, token 10; "
        "give the tokens that it was drawn among"
    )
    target_N[10] = 11
    logprob_N, _ = token_logprob(hidden_ND, head, target_N, temperature=1.0, support=support)
    assert logprob_N[11] == 0.0 and logprob_N[10] < 0
