"""The environment of a recipe's episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from millrace.config.section import Section, given_in, is_function

# How completions are read: `data.tool_calls.FORMATS`.
ToolFormat = Literal[
    "auto", "harmony", "deepseek", "glm", "qwen3_coder", "hermes", "mistral", "llama3", "pattern"
]


# Settings that only programs have.
_OF_PROGRAMS = ("command", "sandbox", "readable", "model_name", "task_columns")


class EnvironmentConfig(Section):
    """Episodes of several turns: an environment replies to each completion until the episode ends."""

    kind: Literal["function", "program", "calculator", "guess"] = Field(
        description="function is a class or function of your own, program an agent program that calls the "
        "policy as an OpenAI-compatible API; the others are built in"
    )
    function: str | None = Field(
        None, description="module:name of your class or function; looked up from the folder you start in too"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    command: tuple[str, ...] = Field(
        (),
        description="command line of a program, one word each, in the folder you start in; python is the "
        "interpreter that runs millrace",
    )
    sandbox: Literal["bubblewrap", "none"] = Field(
        "bubblewrap",
        description="where a program runs: bubblewrap lets it reach the policy and nothing else; none is as "
        "you, with limits only",
    )
    readable: tuple[str, ...] = Field(
        (),
        description="files and folders that a program in bubblewrap may read beside Python's, the system's "
        "and those that its command names",
    )
    model_name: str = Field("policy", description="name of the policy in requests of a program")
    task_columns: tuple[str, ...] = Field(
        (), description="columns of the row that a program gets; that of the answer, too, only if it is here"
    )
    tool_format: ToolFormat | None = Field(
        None,
        description="how tool calls are read from completions: auto is the format of the tokenizer's chat "
        "template, pattern is environment.tool_pattern; null does not read them, but is auto for a program",
    )
    tool_pattern: str | None = Field(
        None,
        description="regular expression (RE2) of a call, with the groups name and arguments (JSON), or with "
        "environment.tool the group argument",
    )
    tool: str | None = Field(
        None,
        description="the tool that every match of environment.tool_pattern calls, with its first parameter",
    )
    max_turns: PositiveInt = Field(8, description="completions after which an episode ends, unless it has")
    max_tokens: PositiveInt | None = Field(
        None, description="tokens of an episode with its prompt; null is what model and micro-batch hold"
    )
    on_length: Literal["end", "continue"] = Field(
        "end", description="whether a completion that reached rollout.max_tokens ends the episode"
    )
    attempts: PositiveInt = Field(
        2, description="how often a sample is played at most, if its environment fails"
    )
    invalid_score: FiniteFloat = Field(
        0.0, description="score of an episode that ends by a limit: turns, tokens or length"
    )
    full_marks: FiniteFloat = Field(1.0, description="score of a right episode")
    workers: NonNegativeInt | None = Field(
        None,
        description="processes that run environments; 0 is the trainer's own, for pure ones; null is 0 for a "
        "built-in environment and 1 for yours",
    )
    begin_s: PositiveFloat = Field(60.0, description="seconds that the begin of an episode may take")
    step_s: PositiveFloat = Field(60.0, description="seconds that a reply may take")
    episode_s: PositiveFloat = Field(1800.0, description="seconds that an episode may take")
    env_vars: tuple[str, ...] = Field(
        (), description="environment variables that workers see beside harmless ones such as PATH"
    )

    @field_validator("function")
    @classmethod
    def _form(cls, function: str | None) -> str | None:
        if function is not None and not is_function(function):
            raise ValueError(f"{function!r} is not of the form module:name")
        return function

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        if self.workers is None:
            return int(self.kind in ("function", "program"))
        return self.workers

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the environment."""
        if self.kind != "program":
            return self.options
        return {name: getattr(self, name) for name in _OF_PROGRAMS}


def idle_environment(environment: EnvironmentConfig) -> Iterator[str]:
    """One sentence for each setting that is missing, or given without an effect."""
    if environment.kind == "function" and environment.function is None:
        yield "environment kind function needs environment.function, module:name of your class or function"
    if environment.kind != "function" and environment.function is not None:
        yield f"environment.function has no effect with kind {environment.kind}; remove it"
    yield from _idle_program(environment)
    yield from _idle_tool_format(environment)
    if environment.num_workers == 0:
        for name in sorted(given_in(environment) & {"begin_s", "step_s", "episode_s", "env_vars"}):
            yield (
                f"environment.{name} has no effect in the trainer's process; remove it, or set "
                "environment.workers to 1 or more"
            )


def _idle_program(environment: EnvironmentConfig) -> Iterator[str]:
    given = given_in(environment)
    if environment.kind != "program":
        for name in sorted(given.intersection(_OF_PROGRAMS)):
            yield f"environment.{name} has no effect with kind {environment.kind}; remove it"
        return
    if not environment.command:
        yield "environment kind program needs environment.command, such as [python, agent.py]"
    if environment.options:
        yield "environment.options has no effect with kind program; remove it"
    if environment.num_workers == 0:
        yield "environment kind program runs in workers; set environment.workers to 1 or more"
    if environment.readable and environment.sandbox == "none":
        yield "environment.readable has no effect with environment.sandbox none; remove it"


def _idle_tool_format(environment: EnvironmentConfig) -> Iterator[str]:
    is_pattern = environment.tool_format == "pattern"
    if environment.kind in ("calculator", "guess") and environment.tool_format is not None:
        yield f"environment.tool_format has no effect with kind {environment.kind}; remove it"
    if is_pattern and environment.tool_pattern is None:
        yield "environment.tool_format pattern needs environment.tool_pattern, the pattern of a call"
    if not is_pattern and environment.tool_pattern is not None:
        yield "environment.tool_pattern has no effect unless environment.tool_format is pattern; set that"
    if environment.tool is not None and environment.tool_pattern is None:
        yield "environment.tool has no effect without environment.tool_pattern; remove it, or give one"
