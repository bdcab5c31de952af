"""Tests that can fail: each one asserts something, and tolerances have one door."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.source import ROOT, Function, Source, dotted, python_files, scan, walk, write

TESTS = ROOT / "tests"
ASSERTING = ("close_", "check", "assert")
LOOSE = {"allclose", "isclose", "assert_close", "assert_allclose", "assert_almost_equal", "approx"}


def idle_tests(folder: Path) -> list[str]:
    """Test files without a test, and tests that assert nothing, not even through a helper beside them."""
    found = []
    for path in python_files(folder):
        if not path.name.startswith("test_"):
            continue
        name = path.relative_to(folder).as_posix()
        found += [f"{name}{fault}" for fault in _idle(path)]
    return found


@scan
def _idle(source: Source) -> Iterator[str]:
    every = [node for node, _ in source.functions()]
    tests = [node for node in every if node.name.startswith("test_")]
    if not tests and not _has_machine(source.tree):
        yield " holds no test"
    asserting = _asserting(every) if tests else set()
    for node in tests:
        if node.name not in asserting:
            yield f":{node.lineno} {node.name} asserts nothing"


def _asserting(every: list[Function]) -> set[str]:
    """Names of the functions that assert, directly or by calling one that does."""
    known: set[str] = set()
    calls: dict[str, set[str]] = {}
    for function in every:
        for node in walk(function):
            if isinstance(node, ast.Assert):
                known.add(function.name)
            elif isinstance(node, ast.Call):
                name, last = dotted(node.func), _last_name(node)
                calls.setdefault(function.name, set()).add(last)
                if name in ("pytest.raises", "pytest.warns") or last.startswith(ASSERTING):
                    known.add(function.name)
    while more := {name for name, called in calls.items() if name not in known and called & known}:
        known |= more
    return known


def _last_name(node: ast.Call) -> str:
    """`check` for check(), judge.check() and make().check()."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)


def _has_machine(tree: ast.Module) -> bool:
    """A hypothesis state machine: TestBuffer = BufferMachine.TestCase."""
    return any(
        isinstance(node, ast.Assign) and dotted(node.value).endswith(".TestCase") for node in tree.body
    )


def loose_comparisons(folder: Path) -> list[str]:
    """Comparisons with a tolerance that did not come through tests/close.py."""
    found = []
    for path in python_files(folder):
        name = path.relative_to(folder).as_posix()
        if name != "close.py":
            found += [f"{name}:{fault}" for fault in _loose(path)]
    return found


@scan
def _loose(source: Source) -> Iterator[str]:
    for node in source.nodes(ast.Call):
        if (last := _last_name(node)) in LOOSE:
            yield f"{node.lineno} {last} sets its own tolerance; use tests/close.py"


def test_every_test_asserts_something():
    assert idle_tests(TESTS) == []


def test_every_tolerance_has_the_ceiling():
    assert loose_comparisons(TESTS) == []


def test_an_idle_test_is_found(tmp_path):
    files = {
        "test_a.py": "def helper(): ...\ndef test_idle():\n    helper()\n"
        "class TestA:\n    def test_method(self): ...",
        "training/test_empty.py": "def helper():\n    assert False",
        "helpers.py": "x = 1",
    }
    assert idle_tests(write(tmp_path, files)) == [
        "test_a.py:2 test_idle asserts nothing",
        "test_a.py:5 test_method asserts nothing",
        "training/test_empty.py holds no test",
    ]


def test_assertions_of_every_kind_pass(tmp_path):
    bodies = [
        "assert x",
        "with pytest.raises(ValueError): f()",
        "close_fp32(a, b)",
        "check_it(x)",
        "make().check()",
        "outer()",
    ]
    text = "def inner():\n    assert x\ndef outer():\n    inner()\n"
    text += "".join(f"def test_{number}():\n    {body}\n" for number, body in enumerate(bodies))
    assert idle_tests(write(tmp_path, {"test_a.py": text, "test_b.py": "TestB = Machine.TestCase"})) == []


def test_a_loose_comparison_is_found(tmp_path):
    text = "import torch\ndef test_a():\n    assert torch.allclose(a, b)\n    assert x == pytest.approx(1)\n"
    assert loose_comparisons(
        write(tmp_path, {"test_a.py": text, "close.py": "torch.testing.assert_close(a, b)"})
    ) == [
        "test_a.py:3 allclose sets its own tolerance; use tests/close.py",
        "test_a.py:4 approx sets its own tolerance; use tests/close.py",
    ]
