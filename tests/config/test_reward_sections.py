"""Rewards of a recipe: what contradicts itself, and what is no value."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config.recipe import ConfigError, validate
from millrace.config.reward_sections import reward_names
from tests.config.trees import BASE

JUDGE = {"kind": "judge", "base_url": "http://localhost:8000/v1", "model": "m", "rubric": "10 is right."}


def loaded(*rewards: dict[str, Any], **given: Any) -> Any:
    return validate({**BASE, "rewards": list(rewards), **given}, "mine")


def test_the_kinds_have_names():
    config = loaded(JUDGE, {"kind": "code"}, {"kind": "function", "function": "a:b", "concurrency": 9})
    assert reward_names(config.rewards) == ["judge", "code", "b"]
    assert config.rewards[1].sandbox == "bubblewrap" and config.rewards[2].concurrency == 9


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (JUDGE | {"votes": 3}, "3 votes of a reward of kind judge are equal at temperature 0; set its"),
        (JUDGE | {"lowest": 10}, "has lowest 10 and highest 10; raise highest"),
        (
            JUDGE | {"deadline_s": 5},
            "has timeout_s 60 above deadline_s 5, which ends a request before",
        ),
        (
            JUDGE | {"base_url": "localhost:8000"},
            "'localhost:8000' is no URL of the form http://host:port/v1",
        ),
        (JUDGE | {"base_url": "http://key@host/v1"}, "is no URL of the form"),
        (JUDGE | {"rubric": " "}, "it is empty; write what a good answer is"),
        (
            {"kind": "code", "answer_s": 5},
            "has timeout_s 10 above answer_s 5, which ends a test before",
        ),
        ({"kind": "code", "sandbox": "monty"}, "sandbox"),
    ],
)
def test_what_contradicts_itself_is_refused(reward, message):
    with pytest.raises(ConfigError) as caught:
        loaded(reward)
    assert message in str(caught.value)


def test_a_comparison_needs_several_samples():
    advantage = {"kind": "returns"}
    with pytest.raises(ConfigError, match="is relative compares the samples of a prompt, and rollout"):
        loaded(JUDGE | {"relative": True}, rollout={"samples_per_prompt": 1}, advantage=advantage)
