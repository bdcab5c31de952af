"""What is added to rewards."""

from __future__ import annotations

import pytest
import torch

from millrace.algorithms.shaping import overlong_penalty
from tests.close import close_fp64


def test_the_penalty_sinks_over_the_last_tokens_to_minus_one() -> None:
    length_N = torch.tensor([0, 5, 6, 7, 9, 10, 11, 30])
    found_N = overlong_penalty(length_N, max_tokens=10, buffer=4)
    close_fp64(found_N, [0.0, 0.0, 0.0, -0.25, -0.75, -1.0, -1.0, -1.0])
    assert found_N.dtype == torch.float64


def test_a_buffer_of_all_tokens_is_allowed_and_of_one_punishes_the_last_alone() -> None:
    close_fp64(overlong_penalty(torch.tensor([0, 1, 4]), max_tokens=4, buffer=4), [0.0, -0.25, -1.0])
    close_fp64(overlong_penalty(torch.tensor([3, 4]), max_tokens=4, buffer=1), [0.0, -1.0])


@pytest.mark.parametrize("buffer", [-1, 0, 9])
def test_a_buffer_that_is_no_part_of_the_answer_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError) as error:
        overlong_penalty(torch.tensor([3]), max_tokens=8, buffer=buffer)
    assert str(error.value) == f"buffer is {buffer}; it must be between 1 and max_tokens (8)"


def test_no_answers_have_no_penalties() -> None:
    assert overlong_penalty(torch.zeros(0, dtype=torch.long), max_tokens=8, buffer=2).shape == (0,)
