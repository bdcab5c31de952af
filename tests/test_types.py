from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from millrace.types import Completion, Outcome, SamplingParams, Support, Trajectory, Turn


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"min_tokens": -1}, "min_tokens is -1; it must lie between 0 and max_tokens, 128"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; it must lie between 0 and max_tokens, 8"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0 (greedy) or finite, from 1e-05"),
        ({"temperature": 9e-6}, "temperature is 9e-06; it must be 0 (greedy) or finite, from 1e-05"),
        ({"temperature": math.nan}, "temperature is nan; it must be 0 (greedy) or finite, from 1e-05"),
        ({"temperature": math.inf}, "temperature is inf; it must be 0 (greedy) or finite, from 1e-05"),
        ({"top_k": -1}, "top_k is -1; it must be 0 (off) or more"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be between 0 (off) and 1"),
        ({"min_p": 1.1}, "min_p is 1.1; it must be between 0 (off) and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0 (1 is off)"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf; it must be above 0 (1 is off)"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; it must be a finite number"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty is -inf; it must be a finite number"),
        ({"stop_token_ids": (4, -1)}, "stop_token_ids holds the token -1; tokens are 0 or more"),
        ({"allowed_token_ids": (-2, 1)}, "allowed_token_ids holds the token -2; tokens are 0 or more"),
        ({"forbidden_token_ids": (-3,)}, "forbidden_token_ids holds the token -3; tokens are 0 or more"),
        ({"logit_bias": ((-4, 1.0),)}, "logit_bias holds the token -4; tokens are 0 or more"),
        ({"logit_bias": ((2, 1.0), (2, 1.0))}, "logit_bias names a token twice; give each token one bias"),
        (
            {"logit_bias": ((2, -math.inf),)},
            "logit_bias gives token 2 the bias -inf; it must be finite "
            "(forbidden_token_ids and allowed_token_ids rule tokens out)",
        ),
        (
            {"allowed_token_ids": (5, 4, 3), "forbidden_token_ids": (9, 3, 4)},
            "token 3 is in allowed_token_ids and in forbidden_token_ids; take it out of one",
        ),
        (
            {"logit_bias": ((5, 1.0),), "forbidden_token_ids": (5,)},
            "token 5 is in logit_bias and in forbidden_token_ids; take it out of one",
        ),
        (
            {"allowed_token_ids": (5, 4), "stop_token_ids": (1, 4, 5), "min_tokens": 1},
            "every token of allowed_token_ids is a stop token, so min_tokens, 1, leaves nothing to sample",
        ),
        ({"stop": "ab"}, "stop is the string 'ab'; give a tuple of strings, ('ab',)"),
        (
            {"stop": ("a", "")},
            "stop holds an empty string, which would end every completion at once",
        ),
        ({"logprobs": "both"}, "logprobs is 'both'; it must be 'processed' or 'raw'"),
    ],
)
def test_sampling_no_distribution_has_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**params)
    assert str(error.value) == message


def test_the_extremes_of_sampling_are_allowed() -> None:
    params = SamplingParams(max_tokens=1, min_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=1.0)
    assert (params.max_tokens, params.temperature) == (1, 0.0)
    assert SamplingParams(temperature=1e-5, top_p=1e-9).temperature == 1e-5
    tokens = {"allowed_token_ids": (0, 4), "forbidden_token_ids": (5,), "logit_bias": ((4, -9.0),)}
    params = SamplingParams(**tokens, stop_token_ids=(4, 5), min_tokens=1)
    assert params.token_ids() == {
        "stop_token_ids": (4, 5),
        "allowed_token_ids": (0, 4),
        "forbidden_token_ids": (5,),
        "logit_bias": (4,),
    }
    assert SamplingParams(allowed_token_ids=(4,), stop_token_ids=(4,)).min_tokens == 0
    assert len({params, SamplingParams(), SamplingParams(seed=1), SamplingParams()}) == 3


def test_positions_of_the_first_fields_stay() -> None:
    params = SamplingParams(9, 0.7, 5, 0.9, (0, 2), ("a",), 3)
    named = {"max_tokens": 9, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}
    assert params == SamplingParams(**named, stop_token_ids=(0, 2), stop=("a",))


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


def test_a_support_that_does_not_fit_is_refused() -> None:
    ids, zeros = np.array([3, 1, 2], np.int32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=r"^support has 3 tokens, but its counts add up to 4$"):
        Support(ids, np.array([1, 3]), zeros)
    with pytest.raises(ValueError, match=r"^support has 2 counts and 1 logprobs; the two must agree$"):
        Support(ids, np.array([1, 2]), zeros[:1])
    support = Support(ids, np.array([1, 2]), zeros)
    with pytest.raises(ValueError, match=r"^completion has 3 tokens, its support is of 2$"):
        Completion((1, 2, 3), np.zeros(3), np.zeros(3), "length", "", support)
    fitting = Completion((1, 2), zeros, zeros, "abort", "", support, reason="the client left")
    assert fitting.support is support and fitting.prompt_logprobs is None


def test_a_trajectory_counts_its_tokens_and_ends_with_its_last_text() -> None:
    turns = (Turn((1, 2), completion(3, 3, 3, "first")), Turn((9,), completion(1, 1, 1, "last")))
    trajectory = Trajectory(turns)
    assert (trajectory.num_tokens, trajectory.num_actions, trajectory.text) == (7, 4, "last")
    scored = trajectory.scored(Outcome("score", 0.5))
    assert scored.outcome is not None and scored.outcome.value == 0.5
    assert trajectory.outcome is None and scored.turns is turns


def test_the_return_of_an_episode_is_its_turn_rewards_and_its_outcome() -> None:
    made = [Turn((1,), completion(1, 1, 1, "x"), reward) for reward in (0.25, 0.0, -2.0)]
    trajectory = Trajectory(tuple(made), Outcome("score", 0.5))
    assert trajectory.turn_rewards == (0.25, 0.0, -1.5)
    assert trajectory.episode_return == -1.25
    assert math.isnan(trajectory.scored(Outcome.failure("it hung")).episode_return)
    with pytest.raises(ValueError, match="^a trajectory without an outcome has no rewards yet"):
        _ = Trajectory(tuple(made)).episode_return


@pytest.mark.parametrize("value", [0.1, 0.0, -0.0, 1 / 3])
def test_without_turn_rewards_the_return_is_the_outcome_bit_for_bit(value: float) -> None:
    turn = Turn((1,), completion(1, 1, 1, "x"))
    found = Trajectory((turn, turn, turn), Outcome("score", value)).episode_return
    assert found.hex() == value.hex()


def test_a_failure_is_not_a_score_of_zero() -> None:
    failure = Outcome.failure("the judge hung")
    assert failure.kind == "failed" and math.isnan(failure.value) and failure.reason == "the judge hung"
