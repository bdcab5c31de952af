"""Tools of a recipe: Python functions, whose types and docstring are the schema. No torch."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from millrace.data.functions import FunctionError, imported
from millrace.data.rows import DataError
from millrace.data.tool_schema import read_tools
from millrace.errors import SetupError

_SCALARS: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?):\s*$")
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A tool of an episode.

    Attributes:
        definition: as `data.tool_schema.read_tools` returns it.
        function: takes the arguments by name; may be `async def`.
        close: ends what the tool owns, at the end of the episode; may be `async def`, and blocks otherwise.
        is_pure: whether its result depends on the arguments alone.
    """

    definition: Mapping[str, Any]
    function: Callable[..., Any]
    close: Callable[[], Any] | None = None
    is_pure: bool = False

    @property
    def name(self) -> str:
        """The name that calls use."""
        return str(self.definition["function"]["name"])


def function_tool(function: str) -> Tool:
    """Return the tool of a function by its name `module:function`.

    It needs a docstring and types of its parameters: str, int, float, bool, list, dict, Literal, unions of
    them and None. Descriptions of parameters are those of a section `Args:`.

    Raises:
        SetupError: there is no such function, or it lacks a type or docstring.
    """
    try:
        found = imported(function)
    except FunctionError as error:
        raise SetupError(f"tool {function}: {error}") from error
    try:
        definition = {
            "name": function.partition(":")[2],
            "description": _description(found),
            "parameters": _parameters(found),
        }
        (read,) = read_tools([definition], "environment.tools")
    except (_UnsuitableError, DataError, NameError, TypeError, ValueError) as error:
        raise SetupError(f"tool {function} cannot be used: {error}") from error
    return Tool(read, found, is_pure=bool(getattr(found, "pure", False)))


class _UnsuitableError(Exception):
    """A function cannot be a tool; the message is a clause with the fix."""


def _description(function: Callable[..., Any]) -> str:
    lines = (inspect.getdoc(function) or "").splitlines()
    before = []
    for line in lines:
        if _SECTION.match(line):
            break
        before.append(line)
    text = "\n".join(before).strip()
    if not text:
        raise _UnsuitableError("it has no docstring; write what it does, since the model reads it")
    return text


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    hints, described = get_type_hints(function), _described(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _UnsuitableError(f"its parameter {name} cannot be given by name; make it an ordinary one")
        if name not in hints:
            raise _UnsuitableError(f"its parameter {name} has no type; annotate it, as in `{name}: str`")
        schema = _schema(hints[name], name)
        properties[name] = schema | ({"description": described[name]} if name in described else {})
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


def _schema(hint: Any, name: str) -> dict[str, Any]:
    origin, given = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _schema(given[0], name)} if given else {})
    if hint is dict or origin is dict:
        return {"type": "object"} | ({"additionalProperties": _schema(given[1], name)} if given else {})
    if origin is Literal and all(type(value) in _SCALARS for value in given):
        kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in given))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(given)}
    if origin in (Union, types.UnionType):
        options = [_schema(one, name) for one in given]
        if all(option.keys() == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    shown = getattr(hint, "__name__", str(hint))
    raise _UnsuitableError(
        f"its parameter {name} has the type {shown}; take str, int, float, bool, list, dict, Literal, unions "
        "of them or None"
    )


def _described(docstring: str) -> dict[str, str]:
    """The descriptions of parameters in a section `Args:` of Google's style."""
    found: dict[str, str] = {}
    inside, depth, name = False, 0, ""
    for line in docstring.splitlines():
        if _SECTION.match(line):
            inside, depth, name = line.startswith("Arg"), 0, ""
            continue
        if not inside or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        depth = depth or indent
        argument = _ARGUMENT.match(line.strip()) if indent == depth else None
        if argument:
            name, found[argument[1]] = argument[1], argument[2]
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
