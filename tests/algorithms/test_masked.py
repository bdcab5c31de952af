from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.algorithms.masked import (
    Chosen,
    chosen,
    goes_on,
    segment_max,
    segment_mean,
    segment_sum,
    whiten,
)
from tests.close import close_fp32, close_fp64


def random_row(seed: int) -> tuple[Tensor, Tensor, int]:
    """Mask and segments of a row of five segments, of which some are empty and some have no chosen token."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.randint(0, 6, (5,), generator=generator)
    segment_T = torch.arange(5).repeat_interleave(length_B)
    mask_T = torch.rand(len(segment_T), generator=generator) < 0.6
    return mask_T & (segment_T != seed % 5), segment_T, 5


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_chosen_tokens_by_hand() -> None:
    mask_T = torch.tensor([0, 1, 1, 0, 1, 0, 0]) > 0
    found = chosen(mask_T, torch.tensor([0, 0, 0, 0, 2, 2, 3]), 5)
    assert found.index_N.tolist() == [1, 2, 4]
    assert found.length_B.tolist() == [2, 0, 1, 0, 0]
    assert found.num_tokens == 7
    assert found.segment_N.tolist() == [0, 0, 2]
    assert found.position_N.tolist() == [0, 1, 0]
    assert found.take(torch.arange(10.0, 17.0)).tolist() == [11, 12, 14]
    assert found.put(torch.tensor([5, -6, 7])).tolist() == [0, 5, -6, 0, 7, 0, 0]


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(20))
def test_chosen_tokens_equal_the_loop(seed: int) -> None:
    mask_T, segment_T, num_segments = random_row(seed)
    found = chosen(mask_T, segment_T, num_segments)
    x_T = numbers(len(mask_T), seed)
    close_fp64(found.put(found.take(x_T)), [x if m else 0.0 for x, m in zip(x_T, mask_T, strict=True)])
    segments = [s for s, m in zip(segment_T.tolist(), mask_T.tolist(), strict=True) if m]
    assert found.segment_N.tolist() == segments
    assert found.length_B.tolist() == [segments.count(segment) for segment in range(num_segments)]
    assert found.position_N.tolist() == [segments[:i].count(s) for i, s in enumerate(segments)]


def test_a_gradient_reaches_the_chosen_tokens_and_no_others() -> None:
    found = Chosen(torch.tensor([0, 2]), torch.tensor([2]), 3)
    x_T = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (found.put(found.take(x_T) ** 2) * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert x_T.grad is not None
    assert x_T.grad.tolist() == [2, 0, 600]


def test_a_row_without_tokens_has_none_chosen() -> None:
    nothing = torch.zeros(0, dtype=torch.long)
    found = chosen(nothing > 0, nothing, 2)
    assert found.length_B.tolist() == [0, 0]
    assert found.segment_N.tolist() == found.position_N.tolist() == []
    assert found.put(found.take(torch.zeros(0))).tolist() == []


@pytest.mark.parametrize(
    ("mask", "segment", "sentence"),
    [
        ([1, 1], [0], r"segment_T has shape \(1,\), but action_mask_T \(2,\)"),
        ([1, 0, 1, 1], [0, 2, 1, 3], r"segment_T\[2\] is 1; it must not be below the segment before it"),
        ([1, 0, 1], [0, 0, 4], r"segment_T\[2\] is 4; it must lie in \[0, 4\)"),
        ([1, 0, 1], [-1, 0, 0], r"segment_T\[0\] is -1; it must lie in \[0, 4\)"),
    ],
)
def test_segments_that_make_no_row_are_refused(mask: list[int], segment: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        chosen(torch.tensor(mask) > 0, torch.tensor(segment), 4)


def test_rows_of_another_length_are_refused() -> None:
    found = Chosen(torch.tensor([0, 2]), torch.tensor([2]), 3)
    with pytest.raises(ValueError, match=r"x_T has shape \[2\]; the row has 3 tokens"):
        found.take(torch.zeros(2))
    with pytest.raises(ValueError, match=r"x_N has shape \[3\]; 2 tokens were chosen"):
        found.put(torch.zeros(3))


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("seed", range(20))
def test_sums_and_means_equal_the_loop_in_any_order(seed: int) -> None:
    x_T = numbers(12, seed)
    segment_T = torch.randint(0, 5, (12,), generator=torch.Generator().manual_seed(seed))
    members = [[x for x, s in zip(x_T.tolist(), segment_T, strict=True) if s == b] for b in range(6)]
    close_fp64(segment_sum(x_T, segment_T, 6), [sum(xs) for xs in members])
    close_fp64(segment_mean(x_T, segment_T, 6), [sum(xs) / len(xs) if xs else 0.0 for xs in members])


def test_the_largest_of_a_segment_may_be_negative_and_is_0_where_the_segment_is_empty():
    x_T, segment_T = torch.tensor([-3.0, 2.0, -1.0, 5.0]), torch.tensor([0, 3, 0, 3])
    assert segment_max(x_T, segment_T, 4).tolist() == [-1.0, 0.0, 0.0, 5.0]


@pytest.mark.parametrize("function", [segment_max, segment_sum, segment_mean])
def test_one_number_for_each_token_is_summed(function: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"segment_T has shape \(3,\), but x_T \(2,\)"):
        function(torch.zeros(2), torch.tensor([0, 0, 1]), 2)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_token_goes_on_while_its_segment_does(num_steps: int) -> None:
    found_T = goes_on(torch.tensor([3, 0, 1, 2, 0]), num_steps)
    segments = [0, 0, 0, 2, 3, 3]
    assert found_T.tolist() == [
        segments[t + num_steps : t + num_steps + 1] == [s] for t, s in enumerate(segments)
    ]


def test_whitening_by_hand() -> None:
    # Mean 3, unbiased variance (4 + 1 + 9) / 2 = 7.
    x_T = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    close_fp64(whiten(x_T), [d / 7**0.5 for d in (-2, -1, 3)], rtol=1e-8)
    close_fp64(whiten(x_T, epsilon=2.0), [d / 3 for d in (-2, -1, 3)])
    close_fp64(whiten(torch.tensor([0.0, 2e-4], dtype=torch.float64)), [-((1 / 3) ** 0.5), (1 / 3) ** 0.5])


def test_one_number_or_none_whitens_to_0() -> None:
    assert whiten(torch.tensor([7.0])).tolist() == [0]
    assert whiten(torch.zeros(0)).tolist() == []
    close_fp32(whiten(torch.tensor([1.0, 3.0])), [-(0.5**0.5), 0.5**0.5])


def test_equal_numbers_whiten_to_0_however_large() -> None:
    close_fp32(whiten(torch.full((7,), 12345.67)), [0.0] * 7, atol=1e-6)
    close_fp64(whiten(torch.full((7,), 0.1, dtype=torch.float64)), [0.0] * 7, atol=1e-12)


def test_float32_keeps_its_type_and_whitens_as_float64_does() -> None:
    x_T = 1000 + torch.arange(5) * 2.0**-13  # five neighbours in float32, whose mean is one of them
    found_T = whiten(x_T)
    assert found_T.dtype == torch.float32
    close_fp32(found_T, whiten(x_T.double()), rtol=1e-6)


def test_whitening_with_an_epsilon_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="epsilon is -1.0; it must be above 0"):
        whiten(torch.ones(3), epsilon=-1.0)
