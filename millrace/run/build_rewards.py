"""Build the rewards that work elsewhere without a reward worker: tests in a sandbox, a chat endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial

from millrace.config.reward_sections import ChatRewardConfig, CodeRewardConfig, RewardConfig
from millrace.config.section import api_key
from millrace.environments.sandbox.code_reward import CodeReward, TestsError, read_tests
from millrace.environments.sandbox.execution import MIB, RunLimits, SandboxError
from millrace.environments.sandbox.open_sandbox import open_sandbox
from millrace.errors import SetupError
from millrace.rewards.chat_endpoint import ChatEndpoint
from millrace.rewards.chat_scores import ChatReward, ChatSettings
from millrace.types import Prompt

_CHECKED = 100


def code_reward(entry: CodeRewardConfig) -> CodeReward:
    """Open the first sandbox of a reward of kind code.

    Raises:
        SetupError: there is no such sandbox here; the message has what to install.
    """
    limits = RunLimits(
        wall_s=entry.timeout_s,
        cpu_s=entry.timeout_s,
        memory_bytes=entry.memory_mb * MIB,
        output_bytes=entry.output_kb << 10,
    )
    try:
        return CodeReward(
            partial(open_sandbox, entry.sandbox, limits),
            column=entry.tests,
            with_code=can_test_code(entry),
            limits=limits,
            fraction=entry.credit == "fraction",
            answer_s=entry.answer_s,
            num_workers=entry.workers,
        )
    except SandboxError as error:
        raise SetupError(f"a reward of kind code runs what the policy writes, but {error}") from None


def can_test_code(entry: CodeRewardConfig) -> bool:
    """Return whether tests can be Python code: its process and that of the program are kept apart."""
    return entry.sandbox != "wasm"


def chat_reward(entry: ChatRewardConfig) -> ChatReward:
    """Build a reward of kind judge; nothing is sent yet.

    Raises:
        SetupError: the variable of the key is not set.
    """
    key = ""
    if entry.api_key_env is not None:
        key = api_key(entry.api_key_env, "a reward of kind judge")
    settings = {field.name: getattr(entry, field.name) for field in fields(ChatSettings)}
    return ChatReward(ChatEndpoint(entry.base_url, key), ChatSettings(**settings))


def records_scores(rewards: Sequence[RewardConfig]) -> bool:
    """Whether a replay cannot compute the outcomes again, so that the run records them."""
    return any(reward.kind == "judge" for reward in rewards)


def check_groups(rewards: Sequence[RewardConfig]) -> None:
    """Raise SetupError for a reward that needs whole groups, where each rank scores a part of the answers."""
    if any(reward.kind == "judge" and reward.relative for reward in rewards):
        raise SetupError(
            "a reward of kind judge that is relative needs all answers of a group in one process, but each "
            "rank scores a part of them; set engine.num_engines to 1 or more, or remove relative"
        )


def check_tests(entry: CodeRewardConfig, prompts: Sequence[Prompt]) -> None:
    """Raise SetupError if none of the first prompts has tests that can be read."""
    first = None
    for prompt in prompts[:_CHECKED]:
        try:
            read_tests(prompt.row, entry.tests, with_code=can_test_code(entry))
        except TestsError as error:
            first = first or f"reward code: the tests of prompt {prompt.id} {error}"
        else:
            return
    if first:
        raise SetupError(first)
