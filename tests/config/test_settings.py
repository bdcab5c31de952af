from __future__ import annotations

from typing import Any

import pytest

from millrace.config.recipe import ConfigError, validate
from millrace.config.settings import RunConfig, ineffective_settings

BASE: dict[str, Any] = {"steps": 3, "data": {"train": "sums.jsonl"}, "rewards": [{"kind": "exact"}]}
TASK: dict[str, Any] = {"data": {"train": "reasoning-gym:chain_sum"}}
IDLE = "has no effect because steps is 0 (supervised training alone); remove it"


def message_of(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        validate({**BASE, **tree}, "mine")
    return str(error.value)


def data(**more: Any) -> dict[str, Any]:
    return {"data": {"train": "sums.jsonl", **more}}


def task(**more: Any) -> dict[str, Any]:
    return {"data": {"train": "reasoning-gym:chain_sum", **more}}


INEFFECTIVE: list[tuple[dict[str, Any], str]] = [
    (
        {"model": {"path": "m", "architecture": "llama"}},
        "model.architecture has no effect because model.path names a folder that fixes it; remove it",
    ),
    (
        {"model": {"path": "m", "shape": {"hidden_size": 8}}},
        "model.shape has no effect because model.path names a folder that fixes it; remove it",
    ),
    (
        {"tokenizer": {"path": "t", "vocab_size": 9}},
        "tokenizer.vocab_size has no effect because the tokenizer comes from a folder; remove it",
    ),
    (
        {"model": {"path": "m"}, "tokenizer": {"vocab_size": 9}},
        "tokenizer.vocab_size has no effect because the tokenizer comes from a folder; remove it",
    ),
    (
        {"tokenizer": {"path": "t", "across_words": True}},
        "tokenizer.across_words has no effect because the tokenizer comes from a folder; remove it",
    ),
    (
        data(task={"size": 3}),
        "data.task has no effect because data.train is not a reasoning-gym: task; remove it",
    ),
    (
        data(task_size=3),
        "data.task_size has no effect because data.train is not a reasoning-gym: task; remove it",
    ),
    (
        data(answer_column=None, answer_pattern="(.)"),
        "data.answer_pattern has no effect without data.answer_column; remove it",
    ),
    (
        data(demonstration_column="proof"),
        "data.demonstration_column has no effect without a warmup; remove it",
    ),
    (
        task(eval="held.jsonl"),
        "data.eval has no effect because a task's held-out problems are drawn from the task itself; "
        "remove it",
    ),
    (
        {"rewards": [{"kind": "exact"}, {"kind": "task"}]},
        "a reward of kind task needs data.train to be a reasoning-gym: task; choose another reward",
    ),
    ({"steps": 0}, "steps is 0 and there is no warmup, so nothing would be trained; set one of them"),
    ({"steps": 0, "warmup": {"steps": 1}, "policy": {"loss": {"low": 0.1}}}, f"policy.loss {IDLE}"),
    (
        {"policy": {"loss": {"high": 0.28}}},
        "policy.loss.high has no effect with one optimizer step per batch, where nothing is clipped; "
        "remove it, or raise policy.optimizer_steps_per_batch",
    ),
    ({"steps": 0, "warmup": {"steps": 1}, "policy": {"kl": {"coefficient": 1}}}, f"policy.kl {IDLE}"),
    (
        {"steps": 0, "warmup": {"steps": 1}, "policy": {"token_weights": "sequence_sum"}},
        f"policy.token_weights {IDLE}",
    ),
    (
        {"steps": 0, "warmup": {"steps": 1}, "policy": {"optimizer_steps_per_batch": 2}},
        f"policy.optimizer_steps_per_batch {IDLE}",
    ),
    (
        {"steps": 0, "warmup": {"steps": 1}, "policy": {"optimizer": {"learning_rate": 1.0}}},
        f"policy.optimizer.learning_rate {IDLE}",
    ),
    ({"steps": 0, "warmup": {"steps": 1}, "advantage": {"divide_by_std": False}}, f"advantage {IDLE}"),
    (
        {"rollout": {"prompts_per_step": 32}, "policy": {"optimizer_steps_per_batch": 3}},
        "policy.optimizer_steps_per_batch 3 does not divide rollout.prompts_per_step 32",
    ),
]


@pytest.mark.parametrize(
    ("tree", "sentence"), INEFFECTIVE, ids=[sentence[:60] for _, sentence in INEFFECTIVE]
)
def test_a_setting_that_can_have_no_effect_is_refused(tree: dict[str, Any], sentence: str) -> None:
    assert message_of(tree) == f"recipe mine: {sentence}"


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"model": {"path": "m"}, "tokenizer": {"path": "t"}},
        {"model": {"architecture": "llama", "shape": {"hidden_size": 8}}, "tokenizer": {"vocab_size": 9}},
        {**task(task={"size": 3}, task_size=5), "rewards": [{"kind": "task"}]},
        data(answer_pattern="(.)", eval="held.jsonl"),
        {**data(demonstration_column="proof"), "warmup": {"steps": 1}},
        {**data(demonstration_column="proof"), "warmup": {"steps": 1}, "steps": 0},
        {"steps": 0, "warmup": {"steps": 1}, "policy": {"optimizer": {"betas": [0.9, 0.95]}}},
        {"rollout": {"prompts_per_step": 32}, "policy": {"optimizer_steps_per_batch": 4}},
        {"rewards": [{"kind": kind} for kind in ("exact", "gsm8k", "number")]},
    ],
    ids=str,
)
def test_settings_with_an_effect_are_accepted(tree: dict[str, Any]) -> None:
    assert ineffective_settings(validate({**BASE, **tree}, "mine")) == []


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
        {"warmup": {"steps": 1, "gate": [0.6, 0.4]}},
        "warmup: gate [0.6, 0.4] is not a band of accuracies [low, high] within 0 and 1",
    ),
    (
        {"warmup": {"steps": 1, "gate": [0.6, 1.4]}},
        "warmup: gate [0.6, 1.4] is not a band of accuracies [low, high] within 0 and 1",
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
        {"rollout": {"samples_per_prompt": 1}},
        "rollout.samples_per_prompt is 1: input should be greater than or equal to 2",
    ),
    (
        {"policy": {"loss": {"dual": 1.0}}},
        "policy.loss.dual is 1.0: input should be greater than 1",
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
