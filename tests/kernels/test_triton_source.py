"""Python that some Triton compilers refuse: torch brings a Triton of its own; kernels compile with each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import millrace.kernels

FILES = sorted(Path(millrace.kernels.__path__[0]).glob("*_triton.py"))


def kernels(source: str) -> list[ast.FunctionDef]:
    """The functions that Triton compiles."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [one for one in functions if "triton.jit" in map(ast.unparse, one.decorator_list)]


def refused(kernel: ast.FunctionDef) -> list[str]:
    """What Triton 3.6, which comes with torch 2.11, refuses."""
    found = [f"{kernel.name}: {one.arg} is keyword-only" for one in kernel.args.kwonlyargs]
    targets = [one for node in ast.walk(kernel) if isinstance(node, ast.Assign) for one in node.targets]
    nested = [
        one
        for one in targets
        if isinstance(one, ast.Tuple)
        for part in one.elts
        if isinstance(part, ast.Tuple)
    ]
    return found + [f"{kernel.name}: {ast.unparse(one)} unpacks twice" for one in nested]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_avoid_what_older_compilers_refuse(file: Path) -> None:
    found = kernels(file.read_text(encoding="utf-8"))
    assert found
    assert [line for kernel in found for line in refused(kernel)] == []


def test_keyword_only_arguments_and_nested_unpacking_are_found() -> None:
    source = "@triton.jit\ndef walk(a, *, SIZE):\n    (b, c), d = a\n    e, f = a\n"
    assert [line for kernel in kernels(source) for line in refused(kernel)] == [
        "walk: SIZE is keyword-only",
        "walk: ((b, c), d) unpacks twice",
    ]
