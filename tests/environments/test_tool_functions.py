"""Functions as tools: the schema that transformers makes, and one sentence for what cannot be a tool."""

from __future__ import annotations

import pytest
from transformers.utils import get_json_schema

from millrace.environments import python_tool
from millrace.environments.kinds import tools_factory
from millrace.environments.sandbox.execution import SandboxError
from millrace.environments.tool_functions import function_tool
from millrace.errors import SetupError
from tests.environments import tool_samples

NAMES = "tests.environments.tool_samples"
RULES = {"sandbox": "none", "parallel_calls": 2, "max_characters": 100, "max_invalid_calls": 1}


def test_the_schema_is_that_of_transformers():
    for name in ("multiply", "count"):
        theirs = get_json_schema(getattr(tool_samples, name))["function"]
        # `return` is no key of a tool's definition, and `nullable` is not JSON schema.
        theirs.pop("return")
        if name == "count":
            scale = theirs["parameters"]["properties"]["scale"]
            assert scale.pop("nullable")
            scale["type"] = ["integer", "null"]
        assert function_tool(f"{NAMES}:{name}").definition["function"] == theirs


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("undocumented", "it has no docstring; write what it does, since the model reads it"),
        ("untyped", "its parameter a has no type; annotate it, as in `a: str`"),
        ("strange", "its parameter a has the type Event; take str, int"),
        ("nowhere", "name 'Nowhere' is not defined"),
        ("starred", "its parameter a cannot be given by name; make it an ordinary one"),
        ("missing", f"module {NAMES} does not have a function missing; correct it"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_its_name(name, reason):
    with pytest.raises(SetupError) as error:
        function_tool(f"{NAMES}:{name}")
    assert f"tool {NAMES}:{name}" in str(error.value) and reason in str(error.value)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(SetupError, match="two tools called fail; rename the function, or"):
        tools_factory([f"{NAMES}:fail", f"{NAMES}:fail"], **RULES)


def test_the_tool_python_without_its_sandbox_is_refused(monkeypatch):
    def missing(kind):
        raise SandboxError("install bubblewrap: apt install bubblewrap")

    monkeypatch.setattr(python_tool, "open_sandbox", missing)
    with pytest.raises(SetupError, match="sandbox bubblewrap: install bubblewrap: apt install bubblewrap"):
        tools_factory(["python"], **RULES | {"sandbox": "bubblewrap"})
