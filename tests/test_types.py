from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from millrace.types import Completion, Outcome, SamplingParams, Trajectory, Turn


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0 (greedy) or more"),
        ({"top_k": -1}, "top_k is -1; it must be 0 (off) or more"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be above 0 and at most 1"),
        (
            {"stop": ("a", "")},
            "stop holds an empty string, which would end every completion at once",
        ),
    ],
)
def test_sampling_no_distribution_has_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**params)
    assert str(error.value) == message


def test_the_extremes_of_sampling_are_allowed() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, top_k=0, top_p=1.0)
    assert (params.max_tokens, params.temperature) == (1, 0.0)


def completion(num_tokens: int, num_logprobs: int, num_versions: int, text: str = "") -> Completion:
    logprobs, versions = np.zeros(num_logprobs, np.float32), np.zeros(num_versions, np.int32)
    return Completion(tuple(range(num_tokens)), logprobs, versions, "stop", text)


@pytest.mark.parametrize("sizes", [(3, 2, 3), (3, 3, 4), (2, 3, 3)])
def test_a_completion_whose_arrays_do_not_fit_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError) as error:
        completion(*sizes)
    assert str(error.value) == (
        f"completion has {sizes[0]} tokens, {sizes[1]} log-probabilities and {sizes[2]} versions; "
        "the three must agree"
    )


def test_a_trajectory_counts_its_tokens_and_ends_with_its_last_text() -> None:
    turns = (Turn((1, 2), completion(3, 3, 3, "first")), Turn((9,), completion(1, 1, 1, "last")))
    trajectory = Trajectory(turns)
    assert (trajectory.num_tokens, trajectory.num_actions, trajectory.text) == (7, 4, "last")
    scored = trajectory.scored(Outcome("score", 0.5))
    assert scored.outcome is not None and scored.outcome.value == 0.5
    assert trajectory.outcome is None and scored.turns is turns


def test_a_failure_is_not_a_score_of_zero() -> None:
    failure = Outcome.failure("the judge hung")
    assert failure.kind == "failed" and math.isnan(failure.value) and failure.reason == "the judge hung"
