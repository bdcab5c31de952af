"""Tools as chat templates take them, and the check of a call's arguments against a tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.data.rows import DataError, json_kind

MAX_SCHEMA_DEPTH = 32
# The names of JSON schema's types, with the Python types that `json` reads them as.
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def read_tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """The tools of a row: each `{"type": "function", "function": {name, description, parameters}}`.

    A tool may be given as its inner object; the list may be given as JSON text, and null is no tools.
    `parameters` is a JSON schema. `where` is the place, for messages. Raises DataError for anything else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: tools is text that is not JSON: {error}") from None
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise DataError(f"{where}: tools is {json_kind(value)}, not a list of tools")
    tools = tuple(_read_tool(tool, f"{where}: tool {number}") for number, tool in enumerate(value, start=1))
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{where}: two tools are called {name}; rename one")
    return tools


def tool_of_function(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool of a function as transformers and TRL describe it: of its types and its docstring.

    DataError if it has none, or a parameter without a type or description.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(function, "__name__", "the function")
    try:
        return dict(get_json_schema(function))
    except Exception as error:  # its exceptions have no base of their own
        reason = str(error).splitlines()[0]
        raise DataError(f"{name} cannot be a tool: {reason}") from error


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{where} is not an object with a name")
    known = {key: entry for key, entry in function.items() if entry is not None}
    where = f"{where} ({known['name']})"
    if not isinstance(known.setdefault("description", ""), str):
        raise DataError(f"{where}: the description is {json_kind(known['description'])}, not text")
    schema = known.setdefault("parameters", {"type": "object", "properties": {}})
    _check_schema(schema, f"{where}: parameters", 0)
    if schema.get("type", "object") != "object":
        raise DataError(f"{where}: parameters has the type {schema['type']!r}; a tool's is object")
    return {"type": "function", "function": known}


def _check_schema(schema: Any, where: str, depth: int) -> None:
    if depth > MAX_SCHEMA_DEPTH:
        raise DataError(f"{where} is nested more than {MAX_SCHEMA_DEPTH} deep; make it flatter")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise DataError(f"{where} is {json_kind(schema)}, not a JSON schema")
    for name in types_of(schema):
        if not isinstance(name, str) or name not in TYPES:
            raise DataError(f"{where} has the type {name!r}; JSON schema has {', '.join(TYPES)}")
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise DataError(f"{where}: properties is {json_kind(properties)}, not an object")
    required = schema.get("required") or []
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise DataError(f"{where}: required is not a list of names")
    if not isinstance(schema.get("enum") or [], list):
        raise DataError(f"{where}: enum is {json_kind(schema['enum'])}, not a list")
    below = [(f"{where}.{name}", inner) for name, inner in properties.items()]
    below += [(f"{where}.{key}", schema[key]) for key in ("items", "additionalProperties") if schema.get(key)]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key) or []
        if not isinstance(options, list):
            raise DataError(f"{where}: {key} is {json_kind(options)}, not a list")
        below += [(f"{where}.{key}", inner) for inner in options]
    for place, inner in below:
        _check_schema(inner, place, depth + 1)


def types_of(schema: Any) -> tuple[Any, ...]:
    """The types that a schema allows; none where it does not name any."""
    named = schema.get("type") if isinstance(schema, Mapping) else None
    return tuple(named) if isinstance(named, list) else () if named is None else (named,)


def schema_error(schema: Any, value: Any, name: str) -> str:
    """Why a value read by `json` does not fit a schema of `read_tools`, in one clause; empty if it fits.

    Of JSON schema it checks `type`, `nullable`, `enum`, `const`, `properties`, `required`,
    `additionalProperties`, `items`, `anyOf` and `oneOf` (one must fit). An object with `properties` takes no
    other key unless `additionalProperties` allows it. `name` is what the value is called.
    """
    if isinstance(schema, bool):
        return "" if schema else f"{name} is not allowed"
    types = types_of(schema)
    if value is None and schema.get("nullable") is True:
        return ""
    if types and not any(_is_of_type(value, kind) for kind in types):
        return f"{name} is {json_kind(value)}, not of type {' or '.join(types)}"
    if schema.get("enum") and not any(_is_equal(value, option) for option in schema["enum"]):
        return f"{name} is none of {_shown(schema['enum'])}"
    if "const" in schema and not _is_equal(value, schema["const"]):
        return f"{name} is not {_shown(schema['const'])}"
    for key in ("anyOf", "oneOf"):
        options = schema.get(key) or []
        if options and all(schema_error(option, value, name) for option in options):
            return f"{name} fits none of its {len(options)} schemas"
    if isinstance(value, dict):
        return _object_error(schema, value, name)
    if isinstance(value, list) and schema.get("items"):
        errors = (
            schema_error(schema["items"], entry, f"{name}[{index}]") for index, entry in enumerate(value)
        )
        return next(filter(None, errors), "")
    return ""


def _object_error(schema: Mapping[str, Any], value: Mapping[str, Any], name: str) -> str:
    properties = schema.get("properties") or {}
    for key in schema.get("required") or []:
        if key not in value:
            return f"{name} lacks {key}"
    others = schema.get("additionalProperties")
    if others is None:
        others = "properties" not in schema
    for key, entry in value.items():
        inner = properties.get(key, others)
        if inner is False:
            return f"{name} has an unknown key {_shown(key)}; there are: {', '.join(properties) or 'none'}"
        error = schema_error(inner, entry, f"{name}.{key}" if key in properties else f"{name}[{_shown(key)}]")
        if error:
            return error
    return ""


def _is_of_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind]) and not (
        kind == "integer" and isinstance(value, float) and not value.is_integer()
    )


def _is_equal(value: Any, option: Any) -> bool:
    return isinstance(value, bool) == isinstance(option, bool) and bool(value == option)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}..."


def named_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of each tool's arguments by its name, for tools of `read_tools`."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
