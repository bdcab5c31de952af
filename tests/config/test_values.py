"""Values that no setting may have, and the kind a section is of where it does not say."""

from __future__ import annotations

import math
from typing import Any

import pytest

from millrace.config.recipe import validate
from millrace.config.settings import RunConfig
from tests.config.trees import BASE, data, kl, message_of, reject

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"steps": -1}, "steps is -1: input should be greater than or equal to 0"),
    (
        {"steps": "many"},
        "steps is 'many': input should be a valid integer, unable to parse string as an integer",
    ),
    ({"name": "a/b"}, "name: 'a/b' is not a plain folder name (letters, digits, dot, dash, underscore)"),
    ({"name": ".."}, "name: '..' is not a plain folder name (letters, digits, dot, dash, underscore)"),
    (
        data(answer_pattern="[0-9]+"),
        "data.answer_pattern: '[0-9]+' has no group; put the answer in parentheses",
    ),
    (
        data(answer_pattern="("),
        "data.answer_pattern: '(' is not a regular expression: missing ), unterminated subpattern at "
        "position 0",
    ),
    (data(template="Say it."), "data.template: 'Say it.' does not contain {prompt}"),
    (
        {"sft": {"steps": 1, "stop_accuracy": [0.6, 0.4]}},
        "sft: stop_accuracy [0.6, 0.4] is not a range [low, high] within 0 and 1",
    ),
    (
        {"sft": {"steps": 1, "stop_accuracy": [0.6, 1.4]}},
        "sft: stop_accuracy [0.6, 1.4] is not a range [low, high] within 0 and 1",
    ),
    (
        {"rewards": [{"kind": "format", "pattern": "("}]},
        "rewards.0.pattern: '(' is not a regular expression: missing ), unterminated subpattern at "
        "position 0",
    ),
    (
        {"rewards": [{"kind": "function", "function": "score"}]},
        "rewards.0.function: 'score' is not of the form module:function",
    ),
    (
        {"rollout": {"samples_per_prompt": 0}},
        "rollout.samples_per_prompt is 0: input should be greater than 0",
    ),
    (
        {"advantage": {"kind": "returns", "gamma": 1.01}},
        "advantage.gamma is 1.01: input should be less than or equal to 1",
    ),
    (
        {"advantage": {"kind": "gae", "critic_lam": -0.1}, "critic": {}},
        "advantage.critic_lam is -0.1: input should be greater than or equal to 0",
    ),
    ({"advantage": {"epsilon": 0.0}}, "advantage.epsilon is 0.0: input should be greater than 0"),
    (
        {"policy": {"loss": {"kind": "clip_cov", "covariance_low": 5.0}}},
        "policy.loss: covariance_low 5 must lie below covariance_high 5",
    ),
    (
        {"policy": {"loss": {"kind": "clip_cov", "covariance_low": math.nan}}},
        "policy.loss: covariance_low nan must lie below covariance_high 5",
    ),
    (
        {"policy": {"entropy_coefficient_final": math.nan}},
        "policy.entropy_coefficient_final is nan: input should be a finite number",
    ),
    (
        {"policy": {"entropy_coefficient": math.inf}},
        "policy.entropy_coefficient is inf: input should be a finite number",
    ),
    (
        {"policy": {"proximal": "recompute", "correction": {"action": "mask", "low": 2.0}}},
        "policy.correction: low 2 must lie below high 2",
    ),
    (
        {"policy": {"proximal": "recompute", "correction": {"low": 0.5}}},
        "policy.correction: low has no effect with action truncate; remove it, or set action: mask",
    ),
    (
        reject(estimator="k2", low=0.5),
        "policy.correction.reject: low has no effect with estimator k2; remove it",
    ),
    (reject(low=2.0), "policy.correction.reject: low 2 must lie below high 2"),
    (reject(high=1.0), "policy.correction.reject: low 1 must lie below high 1"),
    (
        reject(level="max"),
        "policy.correction.reject: the largest of a sequence is taken of k2 or k3; set estimator to one of "
        "them",
    ),
    (
        {"policy": kl(place="rewards")},
        "policy.kl.place is 'rewards': input should be 'loss' or 'reward'",
    ),
    (
        {"policy": {"kl": {"coefficient": 0}}},
        "policy.kl.coefficient is 0: input should be greater than 0",
    ),
    (
        {"policy": {"loss": {"dual_clip": 1.0}}},
        "policy.loss.dual_clip is 1.0: input should be greater than 1",
    ),
    (
        {"device": "tpu"},
        "device is 'tpu': input should be 'auto', 'cpu' or 'cuda'",
    ),
]


@pytest.mark.parametrize(("tree", "sentence"), WRONG, ids=[sentence[:60] for _, sentence in WRONG])
def test_a_wrong_value_says_what_it_should_be(tree: dict[str, Any], sentence: str) -> None:
    assert message_of(tree) == f"recipe mine: {sentence}"


def test_chat_is_a_template_without_a_place_for_the_prompt() -> None:
    assert validate({**BASE, **data(template="chat")}, "mine").data.template == "chat"


def test_a_config_cannot_be_changed() -> None:
    config = RunConfig.model_validate(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, ("group", "ppo_clip")),
        ({"advantage": {}, "policy": {"loss": {}}}, ("group", "ppo_clip")),
        ({"advantage": {"epsilon": 0.5}, "policy": {"loss": {"clip_low": 0.2}}}, ("group", "ppo_clip")),
        ({"advantage": {"kind": "gpg"}, "policy": {"loss": {"kind": "topr"}}}, ("gpg", "topr")),
    ],
    ids=str,
)
def test_a_section_without_its_kind_is_of_the_default_one(
    tree: dict[str, Any], expected: tuple[str, str]
) -> None:
    config = validate({**BASE, **tree}, "mine")
    assert (config.advantage.kind, config.policy.loss.kind) == expected


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"low": 0.9, "high": 1.1}, (0.9, 1.1)),
        ({"high": 1.1}, (None, 1.1)),
        ({"estimator": "k3", "level": "max", "high": 0.5}, (None, 0.5)),
    ],
    ids=str,
)
def test_a_rejection_has_two_bounds_or_one(given: dict[str, Any], bounds: tuple[float | None, float]) -> None:
    correction = validate({**BASE, **reject(**given)}, "mine").policy.correction
    assert correction is not None and correction.reject is not None
    assert (correction.reject.low, correction.reject.high) == bounds
