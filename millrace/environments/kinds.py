"""The environments that a recipe may name: built-in ones, and a class or function of a user. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from millrace.config.environment_section import McpServerSection
from millrace.data.functions import FunctionError, explain, imported
from millrace.environments.calculator import Calculator
from millrace.environments.guess import Guess
from millrace.environments.gymnasium_environment import gymnasium_factory
from millrace.environments.mcp_tools import list_tools, mcp_tools
from millrace.environments.nemo_gym_environment import nemo_gym_factory
from millrace.environments.openenv_environment import openenv_factory
from millrace.environments.program import ProgramEnvironment, Programs
from millrace.environments.python_tool import PYTHON_TOOL, check_sandbox, python_tool
from millrace.environments.sandbox.execution import SandboxError
from millrace.environments.sandbox.open_sandbox import SandboxKind
from millrace.environments.skyrl_environment import skyrl_factory
from millrace.environments.textarena_environment import textarena_factory
from millrace.environments.tool_environment import CallThreads, ToolEnvironment, ToolRules
from millrace.environments.tool_functions import function_tool
from millrace.environments.trl_environment import trl_factory
from millrace.environments.verifiers_environment import verifiers_factory, verifiers_rows
from millrace.errors import SetupError
from millrace.protocols import Environment
from millrace.types import Action, Task

BUILT_IN: Mapping[str, type[Environment]] = {"guess": Guess, "calculator": Calculator}
# Environments of other packages; each makes what makes one for each episode.
ADAPTED: Mapping[str, Callable[..., Callable[[], Environment]]] = {
    "gymnasium": gymnasium_factory,
    "textarena": textarena_factory,
    "trl": trl_factory,
    "skyrl_gym": skyrl_factory,
    "openenv": openenv_factory,
    "nemo_gym": nemo_gym_factory,
    "verifiers": verifiers_factory,
}


class FunctionEnvironment:
    """An environment that is a function of the task and of all actions so far: `f(task, actions) -> Reply`.

    It may be `async def`. It is repeated from its actions like a pure one.
    """

    pure = True

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, options
        self._actions: list[Action] = []

    def begin(self, task: Task) -> Any:
        """Call the function without an action."""
        self._task = task
        return self._function(task, (), **self._options)

    def step(self, action: Action) -> Any:
        """Call the function with one action more."""
        self._actions.append(action)
        return self._function(self._task, tuple(self._actions), **self._options)


def environment_factory(kind: str, function: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return what makes one environment for each episode, after a first one was made as a test.

    Args:
        kind: one of `BUILT_IN` or `ADAPTED`, `function`, `tools` or `program`.
        function: `module:name` of a class or function, for the kind `function`.
        options: keyword arguments of the class or function, of `tools_factory`, of `Programs` or of what
            `ADAPTED` names.

    Raises:
        SetupError: there is no such class, function or tool, or it does not take the options.
    """
    if kind == "tools":
        return tools_factory(**options)
    if kind in ADAPTED:
        return ADAPTED[kind](**options)
    found: Any
    if kind == "program":
        try:
            programs = Programs(**options)
        except (SandboxError, ValueError) as error:
            raise SetupError(f"environment program: {error}") from error
        return lambda: ProgramEnvironment(programs)
    if kind == "function":
        try:
            found = imported(function)
        except FunctionError as error:
            raise SetupError(f"environment function {function}: {error}") from error
        name = f"environment {function}"
    else:
        found, name = BUILT_IN[kind], f"environment {kind}"
    make: Callable[..., Any] = found
    if not inspect.isclass(found):
        _check_options(name, found, options, given=2)
        return lambda: FunctionEnvironment(found, options)
    missing = [method for method in ("begin", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise SetupError(f"{name} is a class without a method {missing[0]}; it needs begin and step")
    if hasattr(found, "save") != hasattr(found, "load"):
        has, lacks = ("save", "load") if hasattr(found, "save") else ("load", "save")
        raise SetupError(f"{name} is a class with a method {has} and without {lacks}; it needs both or none")
    _check_options(name, found, options, given=0)
    try:
        make(**options)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, ValueError) else explain(error)
        raise SetupError(f"{name} cannot be made with its options: {reason}") from error
    return lambda: make(**options)


def seeded_rows(count: int, seed: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield problems of an environment that plays by the seed of its task alone."""
    for index in range(count):
        yield {"prompt": options.get("id") or options["url"], "answer": "", "problem": index}


# What generates problems, beside the method `rows` of a class.
ROWS: Mapping[str, Callable[..., Iterator[dict[str, Any]]]] = {
    **dict.fromkeys(("gymnasium", "textarena", "openenv"), seeded_rows),
    "verifiers": verifiers_rows,
}


def tools_factory(
    functions: Sequence[str],
    *,
    servers: Sequence[Mapping[str, Any]] = (),
    sandbox: SandboxKind,
    parallel_calls: int,
    max_characters: int,
    max_invalid_calls: int,
) -> Callable[[], Environment]:
    """Return what makes an environment of these tools for each episode.

    `functions` are `module:function` each, or `python`, whose programs run in a `sandbox` of their episode.
    `servers` are MCP servers, each the fields of an `McpServerSection`.

    Raises:
        SetupError: a function cannot be a tool, two tools have the same name, there is no such sandbox, or a
            server does not list its tools.
    """
    fixed = [function_tool(function) for function in functions if function != PYTHON_TOOL]
    with_python = PYTHON_TOOL in functions
    sections = [McpServerSection(**server) for server in servers]
    listed = list_tools(sections) if sections else []
    names = [tool.name for tool in fixed] + [PYTHON_TOOL] * with_python
    names += [str(tool["function"]["name"]) for tools in listed for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise SetupError(
                f"there are two tools called {name}; rename the function, or choose tools of a server with "
                "environment.mcp_servers.tools"
            )
    rules, threads = ToolRules(parallel_calls, max_characters, max_invalid_calls), CallThreads()
    if with_python:
        check_sandbox(sandbox)
    of_servers = [mcp_tools(server, tools) for server, tools in zip(sections, listed, strict=True)]

    def make() -> Environment:
        own = [tool for tools in of_servers for tool in tools()]
        return ToolEnvironment([*fixed, *[python_tool(sandbox)] * with_python, *own], rules, threads)

    return make


def _check_options(name: str, found: Callable[..., Any], options: Mapping[str, Any], *, given: int) -> None:
    try:
        inspect.signature(found).bind(*[None] * given, **options)
    except TypeError as error:
        raise SetupError(
            f"{name} does not take environment.options {dict(options)}: {error}; correct them"
        ) from error
