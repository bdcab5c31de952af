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


# Settings that one kind alone has.
_OF_KIND = {
    "function": ("function",),
    "tools": ("tools", "parallel_calls", "reply_tokens", "max_invalid_calls"),
    "program": ("command", "readable", "model_name", "task_columns"),
}
# Kinds of which environment.options are no arguments, and which run in workers alone.
_WITHOUT_OPTIONS = ("tools", "program")


class EnvironmentConfig(Section):
    """Episodes of several turns: an environment replies to each completion until the episode ends."""

    kind: Literal["function", "tools", "program", "calculator", "guess"] = Field(
        description="function is a class or function of your own, tools runs the calls of the tools that "
        "environment.tools names, program an agent program that calls the policy by OpenAI's API; the others "
        "are built in"
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
        "bubblewrap",
        description="where an agent program runs, or programs of the tool python: bubblewrap lets an agent "
        "reach the policy and nothing else; none isolates nothing",
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
    command: tuple[str, ...] = Field(
        (),
        description="command line of a program, one word each, in the folder you start in; python is the "
        "interpreter that runs millrace",
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
        "template, pattern is environment.tool_pattern; null is auto for the kinds tools and program; other "
        "kinds then do not read them",
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
    def num_workers(self) -> int:
        """Number of worker processes."""
        if self.workers is None:
            return int(self.kind in ("function", "tools", "program"))
        return self.workers

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of what the kind makes an environment from."""
        if self.kind == "tools":
            rules = {"parallel_calls": self.parallel_calls, "max_invalid_calls": self.max_invalid_calls}
            return {"functions": self.tools, "sandbox": self.sandbox, **rules}
        if self.kind == "program":
            return {name: getattr(self, name) for name in ("sandbox", *_OF_KIND["program"])}
        return self.options


def idle_environment(environment: EnvironmentConfig) -> Iterator[str]:
    """One sentence for each setting that is missing, or given without an effect."""
    if environment.kind == "function" and environment.function is None:
        yield "environment kind function needs environment.function, module:name of your class or function"
    if environment.kind == "tools" and not environment.tools:
        yield "environment kind tools needs environment.tools, a list of functions module:function"
    if environment.kind == "program" and not environment.command:
        yield "environment kind program needs environment.command, such as [python, agent.py]"
    yield from _idle_of_kind(environment)
    yield from _idle_tool_format(environment)
    if environment.num_workers == 0 and environment.kind in _WITHOUT_OPTIONS:
        yield f"environment kind {environment.kind} runs in workers; set environment.workers to 1 or more"
    elif environment.num_workers == 0:
        for name in sorted(given_in(environment) & {"begin_s", "step_s", "episode_s", "env_vars"}):
            yield (
                f"environment.{name} has no effect in the trainer's process; remove it, or set "
                "environment.workers to 1 or more"
            )


def _idle_of_kind(environment: EnvironmentConfig) -> Iterator[str]:
    given = given_in(environment)
    others = {name for kind, names in _OF_KIND.items() if kind != environment.kind for name in names}
    others |= {"options"} if environment.kind in _WITHOUT_OPTIONS else {"sandbox"}
    for name in sorted(given & others):
        yield f"environment.{name} has no effect with kind {environment.kind}; remove it"
    if environment.kind == "tools" and "sandbox" in given and "python" not in environment.tools:
        yield "environment.sandbox has no effect without the tool python; remove it"
    if environment.kind == "program" and environment.sandbox == "monty":
        yield "environment.sandbox monty is for the tool python; set bubblewrap or none"
    if environment.kind == "program" and environment.readable and environment.sandbox == "none":
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
