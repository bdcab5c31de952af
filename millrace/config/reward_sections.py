"""The rewards a recipe may name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from millrace.config.section import Section, check_url, compiled, is_function

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
    """Your own `def` or `async def`: `f(prompt, completion, answer, row) -> float`, None if invalid."""

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
    sandbox: Literal["bubblewrap", "wasm", "none"] = Field(
        "bubblewrap",
        description="where programs run; wasm has no tests of Python code, and none does not isolate: "
        "programs can read, write and connect as you can",
    )
    timeout_s: PositiveFloat = Field(10.0, description="seconds that a test may take")
    answer_s: PositiveFloat = Field(
        60.0, description="seconds that all tests of a completion may take; the rest counts as not passed"
    )
    memory_mb: PositiveInt = Field(512, description="MiB that a program may take")
    output_kb: PositiveInt = Field(1024, description="KiB that a program may print")
    workers: PositiveInt = Field(2, description="programs that are tested at the same time, at most")


class ChatRewardConfig(Section):
    """The score that a language model behind an OpenAI-compatible endpoint gives by a rubric."""

    kind: Literal["judge"]
    weight: Weight = 1.0
    base_url: str = Field(description="of the endpoint, such as http://localhost:8000/v1")
    model: str = Field(description="name of the model at the endpoint")
    rubric: str = Field(description="what a good answer is, as text for the model")
    api_key_env: str | None = Field(
        None, description="environment variable that holds the key; null sends none"
    )
    lowest: FiniteFloat = Field(0.0, description="lowest score of the model, which is a reward of 0")
    highest: FiniteFloat = Field(10.0, description="highest score of the model, which is a reward of 1")
    relative: bool = Field(False, description="one request has all answers of a group, to compare them")
    votes: PositiveInt = Field(1, description="requests for each score, which is their median")
    temperature: NonNegativeFloat = Field(0.0, description="of the model")
    max_tokens: PositiveInt = Field(1024, description="tokens of a reply")
    max_characters: PositiveInt = Field(
        20_000, description="characters of a prompt or an answer that are sent; longer ones lose their middle"
    )
    concurrency: PositiveInt = Field(8, description="requests at the same time, at most")
    attempts: PositiveInt = Field(
        5, description="times that a request is sent at most, if the endpoint is busy, gone or gives no score"
    )
    timeout_s: PositiveFloat = Field(60.0, description="seconds that a request may take")
    deadline_s: PositiveFloat = Field(300.0, description="seconds that all attempts of a request may take")

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, base_url: str) -> str:
        return check_url(base_url, "/v1")

    @field_validator("rubric")
    @classmethod
    def _is_text(cls, rubric: str) -> str:
        if not rubric.strip():
            raise ValueError("it is empty; write what a good answer is")
        return rubric


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
    | ChatRewardConfig
    | ModelRewardConfig,
    Field(discriminator="kind"),
]


def idle_rewards(rewards: Sequence[RewardConfig], *, samples_per_prompt: int) -> Iterator[str]:
    """One sentence for each setting that was given and can have no effect, or contradicts another."""
    for reward in rewards:
        if isinstance(reward, CodeRewardConfig) and reward.timeout_s > reward.answer_s:
            yield (
                f"a reward of kind code has timeout_s {reward.timeout_s:g} above answer_s "
                f"{reward.answer_s:g}, which ends a test before; raise answer_s"
            )
        if not isinstance(reward, ChatRewardConfig):
            continue
        if reward.lowest >= reward.highest:
            yield (
                f"a reward of kind judge has lowest {reward.lowest:g} and highest {reward.highest:g}; raise "
                "highest"
            )
        if reward.votes > 1 and reward.temperature == 0 and not reward.relative:
            yield (
                f"{reward.votes} votes of a reward of kind judge are equal at temperature 0; set its "
                "temperature, or remove votes"
            )
        if reward.timeout_s > reward.deadline_s:
            yield (
                f"a reward of kind judge has timeout_s {reward.timeout_s:g} above deadline_s "
                f"{reward.deadline_s:g}, which ends a request before; raise deadline_s"
            )
        if reward.relative and samples_per_prompt == 1:
            yield (
                "a reward of kind judge that is relative compares the samples of a prompt, and "
                "rollout.samples_per_prompt is 1; raise it, or remove relative"
            )


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
