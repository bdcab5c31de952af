"""Build the rewards that work outside this process without a reward worker: tests in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from millrace.config.reward_sections import CodeRewardConfig
from millrace.environments.sandbox.code_reward import CodeReward, TestsError, read_tests
from millrace.environments.sandbox.execution import MIB, RunLimits, SandboxError
from millrace.environments.sandbox.open_sandbox import open_sandbox
from millrace.errors import SetupError
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
            limits=limits,
            fraction=entry.credit == "fraction",
            answer_s=entry.answer_s,
            num_workers=entry.workers,
        )
    except SandboxError as error:
        raise SetupError(f"a reward of kind code runs what the policy writes, but {error}") from None


def check_tests(column: str, prompts: Sequence[Prompt]) -> None:
    """Raise SetupError if none of the first prompts has tests that can be read."""
    first = None
    for prompt in prompts[:_CHECKED]:
        try:
            read_tests(prompt.row, column)
        except TestsError as error:
            first = first or f"reward code: the tests of prompt {prompt.id} {error}"
        else:
            return
    if first:
        raise SetupError(first)
