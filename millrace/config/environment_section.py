"""The environment of a recipe's episodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from millrace.config.section import Section, check_url, given_in, is_function

# How completions are read: `data.tool_calls.FORMATS`.
ToolFormat = Literal[
    "auto", "harmony", "deepseek", "glm", "qwen3_coder", "hermes", "mistral", "llama3", "pattern"
]
InvalidCalls = Annotated[
    NonNegativeInt,
    Field(
        description="turns of an episode with a call that cannot be run, each of which gets a reply; one "
        "more ends the episode as invalid"
    ),
]
Address = Annotated[str, AfterValidator(partial(check_url, path=""))]


class EpisodeSection(Section):
    """Episodes of several turns: an environment replies to each completion until the episode ends."""

    default_workers: ClassVar[int] = 1

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
        "built-in environment and 1 for the others",
    )
    begin_s: PositiveFloat = Field(60.0, description="seconds that the begin of an episode may take")
    step_s: PositiveFloat = Field(60.0, description="seconds that a reply may take")
    episode_s: PositiveFloat = Field(1800.0, description="seconds that an episode may take")
    fault: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of the episodes that fail on purpose, each at one of its replies, to try what "
        "failures cost",
    )
    env_vars: tuple[str, ...] = Field(
        (), description="environment variables that workers see beside harmless ones such as PATH"
    )

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return self.default_workers if self.workers is None else self.workers

    @property
    def visible_env_vars(self) -> tuple[str, ...]:
        """Names of environment variables that workers see."""
        return self.env_vars

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of what makes the environment: the settings of its kind alone."""
        shared = {*CallSection.model_fields, "kind"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in shared}


class CallSection(EpisodeSection):
    """Episodes whose completions may call tools."""

    tool_format: ToolFormat | None = Field(
        None,
        description="how tool calls are read from completions: auto is the format of the tokenizer's chat "
        "template, pattern is environment.tool_pattern; null does not read them for a function, and is auto "
        "for tools and trl, and for a program, verifiers and nemo_gym, whose requests with tools are refused "
        "if there is no such format",
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


class BuiltInEnvironment(EpisodeSection):
    """A game that comes with millrace."""

    default_workers = 0

    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the class."""
        return self.options


class CalculatorEnvironmentConfig(BuiltInEnvironment):
    """Products, answered directly or with a tool."""

    kind: Literal["calculator"]


class GuessEnvironmentConfig(BuiltInEnvironment):
    """A number, guessed from replies."""

    kind: Literal["guess"]


class FunctionEnvironmentConfig(CallSection):
    """A class or function of your own."""

    kind: Literal["function"]
    function: str = Field(
        description="module:name of your class or function; looked up from the folder you start in too"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")

    @field_validator("function")
    @classmethod
    def _form(cls, function: str) -> str:
        if not is_function(function):
            raise ValueError(f"{function!r} is not of the form module:name")
        return function

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of the class or function."""
        return self.options


class McpServerSection(Section):
    """A server of the Model Context Protocol: a program that millrace starts, or the address of one."""

    command: tuple[str, ...] = Field(
        (),
        description="command line of a server that speaks over stdin and stdout, one word each; python is "
        "the interpreter that runs millrace",
    )
    url: str | None = Field(
        None, description="address of a server that runs, such as http://127.0.0.1:8000/mcp"
    )
    api_key_env: str | None = Field(
        None, description="environment variable with the bearer token for url; null sends none"
    )
    tools: tuple[str, ...] | None = Field(
        None, description="names of its tools that the policy may call; null is all"
    )
    shared: bool = Field(
        False,
        description="whether the episodes of a worker share one connection, and so the state of the server; "
        "otherwise each episode that calls a tool has a connection and a program of its own",
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        return None if url is None else check_url(url, "/mcp")

    @model_validator(mode="after")
    def _one_transport(self) -> McpServerSection:
        if bool(self.command) == (self.url is not None):
            raise ValueError("an MCP server has either a command or a url; give one of them")
        if self.api_key_env is not None and self.url is None:
            raise ValueError(
                "api_key_env has no effect with command; name the variable in environment.env_vars instead"
            )
        return self


class ToolEnvironmentConfig(CallSection):
    """Tools that the policy calls, until a completion without a call answers."""

    kind: Literal["tools"]
    tools: tuple[str, ...] = Field(
        (),
        description="functions that the policy may call, each module:function, or python for programs in "
        "environment.sandbox",
    )
    mcp_servers: tuple[McpServerSection, ...] = Field(
        (), description="servers of the Model Context Protocol whose tools the policy may call"
    )
    sandbox: Literal["bubblewrap", "monty", "wasm", "none"] = Field(
        "bubblewrap", description="where the tool python runs programs; none isolates nothing"
    )
    parallel_calls: PositiveInt = Field(8, description="calls of a turn that run at once")
    reply_tokens: PositiveInt = Field(
        512, description="tokens of a tool's reply, whose middle is left out if it has more"
    )
    max_invalid_calls: InvalidCalls = 3

    @field_validator("tools")
    @classmethod
    def _forms(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        for tool in tools:
            if tool != "python" and not is_function(tool):
                raise ValueError(f"{tool!r} is not of the form module:function, and not python")
        return tools

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `kinds.tools_factory`, but for `max_characters`."""
        rules = {"parallel_calls": self.parallel_calls, "max_invalid_calls": self.max_invalid_calls}
        servers = [server.model_dump(mode="json") for server in self.mcp_servers]
        return {"functions": self.tools, "servers": servers, "sandbox": self.sandbox, **rules}

    @property
    def visible_env_vars(self) -> tuple[str, ...]:
        """Those in `env_vars`, and the tokens of servers."""
        tokens = [server.api_key_env for server in self.mcp_servers if server.api_key_env is not None]
        return (*self.env_vars, *tokens)


class ProgramSection(CallSection):
    """Episodes of a program that calls the policy as an OpenAI-compatible API."""

    sandbox: Literal["bubblewrap", "none"] = Field(
        "bubblewrap",
        description="where the program runs: bubblewrap lets it reach the policy and nothing else; none is "
        "as you, with limits only",
    )
    readable: tuple[str, ...] = Field(
        (),
        description="files and folders that a program in bubblewrap may read beside Python's, the system's "
        "and those that its command names",
    )
    model_name: str = Field("policy", description="name of the policy in requests of the program")
    max_branches: PositiveInt = Field(
        16,
        description="conversations of an episode: one for each history that the program edits, begins anew "
        "or asks about twice; a request for one more gets an error, and the episode goes on",
    )


class ProgramEnvironmentConfig(ProgramSection):
    """An agent program that calls the policy as an OpenAI-compatible API."""

    kind: Literal["program"]
    command: tuple[str, ...] = Field(
        min_length=1,
        description="command line of the program, one word each, in the folder you start in; python is the "
        "interpreter that runs millrace",
    )
    task_columns: tuple[str, ...] = Field(
        (),
        description="columns of the row that the program gets; that of the answer only if it is here",
    )


class VerifiersEnvironmentConfig(ProgramSection):
    """An environment of verifiers, from its version 0.4, in a Python of its own."""

    kind: Literal["verifiers"]
    id: str = Field(
        min_length=1,
        description="id of the taskset: its module, looked up from the folder you start in too",
    )
    python: str = Field(
        min_length=1,
        description="the Python that verifiers is installed in, such as venv-verifiers/bin/python",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="the configuration of the environment as verifiers has it in the table env, such as "
        "{agent: {runtime: {type: subprocess}}}",
    )


class GymnasiumEnvironmentConfig(EpisodeSection):
    """An environment of gymnasium that is played in text."""

    kind: Literal["gymnasium"]
    id: str = Field(
        min_length=1,
        description="its id, such as FrozenLake-v1, or module:Name-v0 if importing your module registers it; "
        "looked up from the folder you start in too",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of gymnasium.make, those of the environment too"
    )
    instructions: str = Field("", description="what the policy reads before the first observation")
    observation: Literal["text", "render"] = Field(
        "text",
        description="what the policy reads: text is the observation itself, render is the text of render(), "
        "which needs render_mode ansi in environment.options",
    )
    text_field: str | None = Field(
        None, description="the field of the observation that is its text; null if the observation is text"
    )
    actions: tuple[str, ...] = Field(
        (),
        description="names of discrete actions, in the order of their numbers; without names the policy "
        "answers with a number",
    )
    action_pattern: str | None = Field(
        None,
        description="regular expression (RE2) whose group action is the action in a completion; null is the "
        "whole completion",
    )
    max_invalid_actions: NonNegativeInt = Field(
        3,
        description="completions of an episode that are no action, each of which gets a reply with what is "
        "allowed; one more ends the episode as invalid",
    )
    pure: bool = Field(
        False,
        description="whether equal seeds and actions always give equal observations and rewards; an episode "
        "whose worker was lost, or that was cut by the end of a run, is then repeated from its actions",
    )

    @field_validator("id")
    @classmethod
    def _is_id(cls, id: str) -> str:
        if not re.fullmatch(r"([\w.]+:)?([\w-]+/)?[\w.-]+", id):
            raise ValueError(f"{id!r} is not of the form Name-v0, namespace/Name-v0 or module:Name-v0")
        return id


class TextArenaEnvironmentConfig(EpisodeSection):
    """A game of TextArena for one player."""

    kind: Literal["textarena"]
    id: str = Field(min_length=1, description="id of the game, such as GuessTheNumber-v0")
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the game, in place of those of its id"
    )


class TrlEnvironmentConfig(CallSection):
    """A class as GRPOTrainer of TRL takes it as environment_factory."""

    kind: Literal["trl"]
    factory: str = Field(
        description="module:name of the class, or of a function that makes an object of it; looked up from "
        "the folder you start in too"
    )
    reward_functions: tuple[str, ...] = Field(
        (),
        description="reward functions as GRPOTrainer takes them, each module:function, that score an episode "
        "beside the method get_reward of the class",
    )
    max_invalid_calls: InvalidCalls = 3

    @field_validator("factory", "reward_functions")
    @classmethod
    def _forms(cls, given: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in (given,) if isinstance(given, str) else given:
            if not is_function(name):
                raise ValueError(f"{name!r} is not of the form module:name")
        return given


class SkyrlGymEnvironmentConfig(EpisodeSection):
    """An environment of SkyRL-gym."""

    kind: Literal["skyrl_gym"]
    id: str = Field(
        min_length=1,
        description="id of its registry, such as gsm8k_multi_turn, or module:name of your BaseTextEnv; "
        "looked up from the folder you start in too",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="what the environment gets as env_config"
    )
    pure: bool = Field(
        False,
        description="whether equal rows and completions always give equal replies; an episode whose worker "
        "was lost, or that was cut by the end of a run, is then repeated from its completions",
    )

    @field_validator("id")
    @classmethod
    def _form(cls, id: str) -> str:
        if ":" in id and not is_function(id):
            raise ValueError(f"{id!r} is not of the form module:name")
        return id


class OpenEnvEnvironmentConfig(EpisodeSection):
    """A server of OpenEnv that runs; each episode is a session."""

    kind: Literal["openenv"]
    url: Address = Field(description="address of the server, such as http://127.0.0.1:8000")
    api_key_env: str | None = Field(
        None, description="environment variable with the bearer token for url; null sends none"
    )
    action_field: str = Field(
        min_length=1,
        description="field of the action that is the text of the completion, such as message",
    )
    action: dict[str, Any] = Field(default_factory=dict, description="the other fields of the action")
    text_field: str | None = Field(
        None, description="field of the observation that is its text; null is the whole observation as JSON"
    )
    reset_columns: tuple[str, ...] = Field(
        (), description="columns of the row that reset gets by their names, beside seed"
    )
    instructions: str = Field("", description="what the policy reads before the first observation")
    max_invalid_actions: NonNegativeInt = Field(
        3,
        description="completions of an episode that the server refuses as no action, each of which gets a "
        "reply with its reason; one more ends the episode as invalid",
    )
    pure: bool = Field(
        False,
        description="whether equal seeds, columns and actions always give equal observations and rewards; "
        "an episode whose worker was lost, or that was cut by the end of a run, is then repeated",
    )

    @property
    def visible_env_vars(self) -> tuple[str, ...]:
        """Those in `env_vars`, and the token of the server."""
        return self.env_vars if self.api_key_env is None else (*self.env_vars, self.api_key_env)


class NemoGymEnvironmentConfig(CallSection):
    """A resources server of NeMo Gym that runs; each episode is a session."""

    kind: Literal["nemo_gym"]
    url: Address = Field(description="address of the resources server, such as http://127.0.0.1:8000")
    max_invalid_calls: InvalidCalls = 3


EnvironmentConfig = Annotated[
    FunctionEnvironmentConfig
    | ToolEnvironmentConfig
    | ProgramEnvironmentConfig
    | VerifiersEnvironmentConfig
    | GymnasiumEnvironmentConfig
    | TextArenaEnvironmentConfig
    | TrlEnvironmentConfig
    | SkyrlGymEnvironmentConfig
    | OpenEnvEnvironmentConfig
    | NemoGymEnvironmentConfig
    | CalculatorEnvironmentConfig
    | GuessEnvironmentConfig,
    Field(discriminator="kind"),
]


def environment_name(environment: EnvironmentConfig) -> str:
    """Return `module:name` of a class or function of the user, else the kind."""
    return environment.function if isinstance(environment, FunctionEnvironmentConfig) else environment.kind


def idle_environment(environment: EnvironmentConfig) -> Iterator[str]:
    """One sentence for each setting that is given without an effect."""
    if not isinstance(environment, BuiltInEnvironment | FunctionEnvironmentConfig) and (
        environment.workers == 0
    ):
        yield f"environment kind {environment.kind} runs in workers; set environment.workers to 1 or more"
    elif environment.num_workers == 0:
        for name in sorted(given_in(environment) & {"begin_s", "step_s", "episode_s", "env_vars"}):
            yield (
                f"environment.{name} has no effect in the trainer's process; remove it, or set "
                "environment.workers to 1 or more"
            )
    is_rendered = isinstance(environment, GymnasiumEnvironmentConfig) and environment.observation == "render"
    if is_rendered and "text_field" in given_in(environment):
        yield "environment.text_field has no effect with environment.observation render; remove it"
    if not isinstance(environment, CallSection):
        return
    yield from _idle_tool_format(environment)
    if isinstance(environment, ToolEnvironmentConfig) and not (environment.tools or environment.mcp_servers):
        yield "environment kind tools has no tools; set environment.tools or environment.mcp_servers"
    given = given_in(environment)
    is_python = not isinstance(environment, ToolEnvironmentConfig) or "python" in environment.tools
    if "sandbox" in given and not is_python:
        yield "environment.sandbox has no effect without the tool python; remove it"
    is_open = isinstance(environment, ProgramSection) and environment.sandbox == "none"
    if is_open and "readable" in given:
        yield "environment.readable has no effect with environment.sandbox none; remove it"


def _idle_tool_format(environment: CallSection) -> Iterator[str]:
    is_pattern = environment.tool_format == "pattern"
    if is_pattern and environment.tool_pattern is None:
        yield "environment.tool_format pattern needs environment.tool_pattern, the pattern of a call"
    if not is_pattern and environment.tool_pattern is not None:
        yield "environment.tool_pattern has no effect unless environment.tool_format is pattern; set that"
    if environment.tool is not None and environment.tool_pattern is None:
        yield "environment.tool has no effect without environment.tool_pattern; remove it, or give one"
