"""The rewards a recipe may name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt, field_validator

from millrace.config.section import Section, compiled, is_function

Weight = Annotated[FiniteFloat, Field(description="factor in the sum of rewards")]
Timeout = Annotated[
    PositiveFloat,
    Field(description="seconds that scoring one completion may take before its reward worker is killed"),
]
Workers = Annotated[PositiveInt, Field(description="processes that score at the same time, at most")]


class ExactRewardConfig(Section):
    """1 where the completion is the answer, white space at the ends aside."""

    kind: Literal["exact"]
    weight: Weight = 1.0


class Gsm8kRewardConfig(Section):
    """1 where the number after the last `####` is the answer's."""

    kind: Literal["gsm8k"]
    weight: Weight = 1.0


class NumberRewardConfig(Section):
    """1 where math-verify finds the completion's final expression equal to the answer."""

    kind: Literal["number"]
    weight: Weight = 1.0
    timeout_s: Timeout = 10.0
    workers: Workers = 2


class TaskRewardConfig(Section):
    """The score of the reasoning-gym task the prompts come from."""

    kind: Literal["task"]
    weight: Weight = 1.0
    timeout_s: Timeout = 10.0
    workers: Workers = 2


class FormatRewardConfig(Section):
    """1 where a regular expression matches the whole completion."""

    kind: Literal["format"]
    weight: Weight = 1.0
    pattern: str = Field(description="regular expression for the whole completion")
    timeout_s: Timeout = 10.0
    workers: Workers = 2

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        return compiled(pattern).pattern


class FunctionRewardConfig(Section):
    """Your own function: `f(prompt, completion, answer, row) -> float`, or None for an invalid answer.

    It may be an `async def`.
    """

    kind: Literal["function"]
    weight: Weight = 1.0
    function: str = Field(
        description="module:function; the module is looked up from the folder you start in too"
    )
    timeout_s: Timeout = 10.0
    workers: Workers = 2
    concurrency: PositiveInt | None = Field(
        None, description="calls of an `async def` at once on each worker; null is 64"
    )
    network: bool = Field(False, description="it may open network connections")
    env_vars: tuple[str, ...] = Field(
        (), description="environment variables that it sees beside harmless ones such as PATH, secrets too"
    )
    writable: tuple[str, ...] = Field(
        (), description="folders that it may write to, beside one of its own for temporary files"
    )
    memory_gb: PositiveFloat = Field(4.0, description="GiB that each of its processes may allocate")

    @field_validator("function")
    @classmethod
    def _form(cls, function: str) -> str:
        if not is_function(function):
            raise ValueError(f"{function!r} is not of the form module:function")
        return function


class CodeRewardConfig(Section):
    """Tests of a program that the completion has, run in a sandbox of its own."""

    kind: Literal["code"]
    weight: Weight = 1.0
    tests: str = Field(
        "tests", description="column of tests: a list of {input, output} or of Python code, or its JSON text"
    )
    credit: Literal["all", "fraction"] = Field(
        "all", description="1 only for a program that passes all tests, or the fraction that it passes"
    )
    sandbox: Literal["bubblewrap", "none"] = Field(
        "bubblewrap",
        description="none runs programs without isolation: they can read, write and connect as you can",
    )
    timeout_s: PositiveFloat = Field(10.0, description="seconds that a test may take")
    answer_s: PositiveFloat = Field(
        60.0, description="seconds that all tests of a completion may take; the rest counts as not passed"
    )
    memory_mb: PositiveInt = Field(512, description="MiB that a program may take")
    output_kb: PositiveInt = Field(1024, description="KiB that a program may print")
    workers: PositiveInt = Field(2, description="programs that are tested at the same time, at most")


class ModelRewardConfig(Section):
    """The score of a reward model, such as `millrace reward-model` trains."""

    kind: Literal["model"]
    weight: Weight = 1.0
    path: str = Field(description="sequence-classification folder with one label, and its tokenizer")


RewardConfig = Annotated[
    ExactRewardConfig
    | Gsm8kRewardConfig
    | NumberRewardConfig
    | TaskRewardConfig
    | FormatRewardConfig
    | FunctionRewardConfig
    | CodeRewardConfig
    | ModelRewardConfig,
    Field(discriminator="kind"),
]


def reward_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """The name of each reward in metrics and messages: its kind, or its function's name."""
    return distinct(
        [
            reward.function.partition(":")[2] if isinstance(reward, FunctionRewardConfig) else reward.kind
            for reward in rewards
        ]
    )


def distinct(names: Sequence[str]) -> list[str]:
    """The names, each once: one that was taken gets a number, as in format, format-2."""
    found: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in found:
            number += 1
            candidate = f"{name}-{number}"
        found.append(candidate)
    return found
