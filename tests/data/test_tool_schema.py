from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.data.rows import DataError
from millrace.data.tool_schema import named_tools, read_tools, schema_error

CALC = {"name": "calc", "description": "adds", "parameters": {"type": "object", "properties": {"sum": {}}}}
WRITTEN = {"type": "function", "function": CALC}


@pytest.mark.parametrize("given", [[CALC], [WRITTEN], (WRITTEN,), json.dumps([WRITTEN])])
def test_tools_have_one_form(given: Any) -> None:
    assert read_tools(given, "x") == (WRITTEN,)


def test_a_tool_without_parameters_takes_none() -> None:
    assert read_tools(None, "x") == read_tools([], "x") == ()
    # Parquet writes null for what is missing.
    (schema,) = named_tools(
        read_tools([{"name": "now", "description": None, "parameters": None}], "x")
    ).values()
    assert schema_error(schema, {}, "arguments") == ""
    assert (
        schema_error(schema, {"zone": 1}, "arguments")
        == 'arguments has an unknown key "zone"; there are: none'
    )


def deep(depth: int) -> dict[str, Any]:
    return {"items": deep(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (3, "tools is a number, not a list of tools"),
        ("[", "tools is text that is not JSON: Expecting value: line 1 column 2 (char 1)"),
        (["calc"], "tool 1 is not an object with a name"),
        ([CALC, {"function": {}}], "tool 2 is not an object with a name"),
        ([CALC, WRITTEN], "two tools are called calc; rename one"),
        ([{"name": "a", "description": 1}], "tool 1 (a): the description is a number, not text"),
        ([{"name": "a", "parameters": 1}], "tool 1 (a): parameters is a number, not a JSON schema"),
        (
            [{"name": "a", "parameters": {"type": "array"}}],
            "tool 1 (a): parameters has the type 'array'; a tool's is object",
        ),
        (
            [{"name": "a", "parameters": {"properties": {"b": {"type": "text"}}}}],
            "tool 1 (a): parameters.b has the type 'text'; JSON schema has string, number, integer, boolean, "
            "array, object, null",
        ),
        (
            [{"name": "a", "parameters": {"properties": [1]}}],
            "tool 1 (a): parameters: properties is a list, not an object",
        ),
        (
            [{"name": "a", "parameters": {"required": "b"}}],
            "tool 1 (a): parameters: required is not a list of names",
        ),
        ([{"name": "a", "parameters": {"enum": "b"}}], "tool 1 (a): parameters: enum is text, not a list"),
        (
            [{"name": "a", "parameters": {"anyOf": {"a": 1}}}],
            "tool 1 (a): parameters: anyOf is an object, not a list",
        ),
        (
            [{"name": "a", "parameters": {"items": 1}}],
            "tool 1 (a): parameters.items is a number, not a JSON schema",
        ),
        (
            [{"name": "a", "parameters": deep(34)}],
            f"tool 1 (a): parameters{'.items' * 33} is nested more than 32 deep; make it flatter",
        ),
    ],
)
def test_malformed_tools_are_refused_with_their_place(tools: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        read_tools(tools, "data.jsonl line 3")
    assert str(caught.value) == f"data.jsonl line 3: {said}"


SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "enum": ["a", "b"]},
        "count": {"type": "integer"},
        "size": {"type": ["number", "null"]},
        "flag": {"const": True},
        "list": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
        "one": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "open": {"type": "object", "properties": {"n": {}}, "additionalProperties": True},
        "any": True,
        "none": False,
    },
    "required": ["word"],
}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"word": "a", "count": 1, "size": 1.5, "flag": True, "list": [{"n": 1}, {}], "either": False}, ""),
        (
            {
                "word": "b",
                "count": 2.0,
                "size": None,
                "one": None,
                "map": {"x": 1},
                "open": {"m": 1},
                "any": 7,
            },
            "",
        ),
        ({}, "a lacks word"),
        ([], "a is a list, not of type object"),
        ({"word": "c"}, 'a.word is none of ["a", "b"]'),
        ({"word": 1}, "a.word is a number, not of type string"),
        ({"word": "a", "count": 1.5}, "a.count is a number, not of type integer"),
        ({"word": "a", "count": True}, "a.count is true or false, not of type integer"),
        ({"word": "a", "size": "1"}, "a.size is text, not of type number or null"),
        ({"word": "a", "flag": 1}, "a.flag is not true"),
        ({"word": "a", "list": [{"n": 1}, {"n": "1"}]}, "a.list[1].n is text, not of type integer"),
        ({"word": "a", "list": [{"m": 1}]}, 'a.list[0] has an unknown key "m"; there are: n'),
        ({"word": "a", "either": 1}, "a.either fits none of its 2 schemas"),
        ({"word": "a", "one": 1}, "a.one fits none of its 2 schemas"),
        ({"word": "a", "map": {"x": "1"}}, 'a.map["x"] is text, not of type integer'),
        (
            {"word": "a", "none": 1},
            'a has an unknown key "none"; there are: ' + ", ".join(SCHEMA["properties"]),
        ),
    ],
)
def test_arguments_are_checked(arguments: Any, error: str) -> None:
    schema = named_tools(read_tools([{"name": "t", "parameters": SCHEMA}], "x"))["t"]
    assert schema_error(schema, arguments, "a") == error


def test_null_fits_a_schema_that_is_nullable() -> None:
    schema = {"type": "integer", "enum": [1], "nullable": True}
    assert schema_error(schema, None, "why") == "" != schema_error({"type": "integer"}, None, "why")
