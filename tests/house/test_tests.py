"""Tests that can fail: each one asserts something, and tolerances have one door."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house.source import ROOT, Function, dotted, functions, parse, python_files, write

TESTS = ROOT / "tests"
ASSERTING = ("close_", "check", "assert")
LOOSE = {"allclose", "isclose", "assert_close", "assert_allclose", "assert_almost_equal", "approx"}


def idle_tests(folder: Path) -> list[str]:
    """Test files without a test, and tests that assert nothing, not even through a helper beside them."""
    found = []
    for path in python_files(folder):
        if not path.name.startswith("test_"):
            continue
        name, tree = path.relative_to(folder).as_posix(), parse(path)
        every = [node for node, _ in functions(tree)]
        tests = [node for node in every if node.name.startswith("test_")]
        if not tests and not _has_machine(tree):
            found.append(f"{name} holds no test")
        asserting = _asserting(every)
        found += [
            f"{name}:{node.lineno} {node.name} asserts nothing"
            for node in tests
            if node.name not in asserting
        ]
    return found


def _asserting(every: list[Function]) -> set[str]:
    """Names of the functions that assert, directly or by calling one that does."""
    known: set[str] = set()
    while True:
        more = {node.name for node in every if any(_is_assertion(part, known) for part in ast.walk(node))}
        if more <= known:
            return known
        known |= more


def _is_assertion(node: ast.AST, known: set[str]) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name, last = dotted(node.func), _last_name(node)
    return name in ("pytest.raises", "pytest.warns") or last.startswith(ASSERTING) or last in known


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
        for node in ast.walk(parse(path)) if name != "close.py" else ():
            last = _last_name(node) if isinstance(node, ast.Call) else ""
            if last in LOOSE:
                found.append(f"{name}:{node.lineno} {last} sets its own tolerance; use tests/close.py")
    return found


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
