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


class EnvironmentConfig(Section):
    """Episodes of several turns: an environment replies to each completion until the episode ends."""

    kind: Literal["function", "tools", "calculator", "guess"] = Field(
        description="function is a class or function of your own, tools runs the calls of the tools that "
        "environment.tools names; the others are built in"
    )
    function: str | None = Field(
        None, description="module:name of your class or function; looked up from the folder you start in too"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    tools: tuple[str, ...] = Field(
        (),
        description="functions that the policy may call, each module:function, or python for programs in "
        "environment.sandbox, for kind tools",
    )
    sandbox: Literal["bubblewrap", "monty", "none"] = Field(
        "bubblewrap", description="where the tool python runs programs; none isolates nothing"
    )
    parallel_calls: PositiveInt = Field(8, description="calls of a turn that run at once, for kind tools")
    reply_tokens: PositiveInt = Field(
        512, description="tokens of a tool's reply, whose middle is left out if it has more, for kind tools"
    )
    max_invalid_calls: NonNegativeInt = Field(
        3,
        description="turns of an episode with a call that cannot be run, each of which gets a reply; one "
        "more ends the episode as invalid, for kind tools",
    )
    tool_format: ToolFormat | None = Field(
        None,
        description="how tool calls are read from completions: auto is the format of the tokenizer's chat "
        "template, pattern is environment.tool_pattern; null is auto for kind tools, "
        "and does not read them for others",
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

    @field_validator("tools")
    @classmethod
    def _forms(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        for tool in tools:
            if tool != "python" and not is_function(tool):
                raise ValueError(f"{tool!r} is not of the form module:function, and not python")
        return tools

    @property
    def call_format(self) -> ToolFormat | None:
        """The format of tool calls; None where they are not read."""
        return "auto" if self.tool_format is None and self.kind == "tools" else self.tool_format

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        if self.workers is None:
            return int(self.kind in ("function", "tools"))
        return self.workers


def idle_environment(environment: EnvironmentConfig) -> Iterator[str]:
    """One sentence for each setting that is missing, or given without an effect."""
    if environment.kind == "function" and environment.function is None:
        yield "environment kind function needs environment.function, module:name of your class or function"
    if environment.kind != "function" and environment.function is not None:
        yield f"environment.function has no effect with kind {environment.kind}; remove it"
    yield from _idle_tools(environment)
    yield from _idle_tool_format(environment)
    if environment.num_workers == 0:
        for name in sorted(given_in(environment) & {"begin_s", "step_s", "episode_s", "env_vars"}):
            yield (
                f"environment.{name} has no effect in the trainer's process; remove it, or set "
                "environment.workers to 1 or more"
            )


def _idle_tools(environment: EnvironmentConfig) -> Iterator[str]:
    if environment.kind != "tools":
        for name in ("tools", "parallel_calls", "reply_tokens", "max_invalid_calls"):
            if name in given_in(environment):
                yield f"environment.{name} has no effect with kind {environment.kind}; remove it"
        if "sandbox" in given_in(environment):
            yield f"environment.sandbox has no effect with kind {environment.kind}; remove it"
        return
    if "sandbox" in given_in(environment) and "python" not in environment.tools:
        yield "environment.sandbox has no effect without the tool python; remove it"
    if not environment.tools:
        yield "environment kind tools needs environment.tools, a list of functions module:function"
    if environment.options:
        yield "environment.options has no effect with kind tools; remove it"
    if environment.workers == 0:
        yield "environment kind tools runs in worker processes; set environment.workers to 1 or more"


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
