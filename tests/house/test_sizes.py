"""How long functions may be, how many parameters they take, and how much one package may hold.

Where a limit makes the code worse, change it here and say why.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, ROOT, Source, python_files, scan, write

MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 6
# Of the lines of all packages. One that holds more has several subjects.
MAX_PACKAGE_FRACTION = 0.125
FIRST = (["self"], ["cls"], ["ctx"])  # given by Python, or by torch to an autograd function


@scan
def _long(source: Source) -> Iterator[str]:
    for node, _ in source.functions():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{node.lineno} {node.name} has {lines} lines; the limit is {MAX_FUNCTION_LINES}"


@scan
def _crowded(source: Source) -> Iterator[str]:
    for node, in_class in source.functions():
        names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
        names = names[1:] if in_class and names[:1] in FIRST else names
        # Triton's older compilers take no keyword-only arguments.
        is_kernel = any(ast.unparse(one) == "triton.jit" for one in node.decorator_list)
        if len(names) > MAX_POSITIONAL and not is_kernel:
            yield (
                f"{node.lineno} {node.name} takes {len(names)} positional parameters; "
                f"the limit is {MAX_POSITIONAL}, and more can follow a *"
            )


def _faults(folder: Path, found: Callable[[Path], list[str]]) -> list[str]:
    return [
        f"{path.relative_to(folder).as_posix()}:{fault}"
        for path in python_files(folder)
        for fault in found(path)
    ]


def long_functions(folder: Path) -> list[str]:
    return _faults(folder, _long)


def crowded_functions(folder: Path) -> list[str]:
    return _faults(folder, _crowded)


def large_packages(folder: Path) -> list[str]:
    lines: Counter[str] = Counter()
    for path in python_files(folder):
        lines[path.relative_to(folder).parts[0]] += len(path.read_text(encoding="utf-8").splitlines())
    total = sum(lines.values())
    return [
        f"{name} has {count} of {total} lines; divide it by subject"
        for name, count in lines.items()
        if count > MAX_PACKAGE_FRACTION * total
    ]


def test_no_package_holds_an_eighth_of_the_lines():
    assert large_packages(PACKAGE) == []


def test_a_package_with_too_many_lines_is_found(tmp_path):
    files = {f"{name}/one.py": "x = 1\n" * 10 for name in "abcdefgh"} | {"i/one.py": "x = 1\n" * 20}
    assert large_packages(write(tmp_path, files)) == ["i has 20 of 100 lines; divide it by subject"]


@pytest.mark.parametrize("check", [long_functions, crowded_functions])
@pytest.mark.parametrize(
    "folder", [PACKAGE, *(ROOT / name for name in ("tests", "scripts", "benchmarks", "examples"))]
)
def test_functions_stay_small(check, folder):
    assert check(folder) == []


def test_a_function_over_the_limit_is_found(tmp_path):
    text = (
        "class A:\n    async def long(self):\n"
        + "        x = 1\n" * 60
        + "def short():\n"
        + "    x = 1\n" * 59
    )
    assert long_functions(write(tmp_path, {"a.py": text})) == ["a.py:2 long has 61 lines; the limit is 60"]


def test_a_function_with_seven_positional_parameters_is_found(tmp_path):
    text = "def f(a, b, c, d, e, f, g): ...\ndef g(a, b, c, d, e, f, *, h, i): ...\n"
    text += "class A:\n    def f(self, a, b, c, d, e, f): ...\n    def g(self, a, /, b, c, d, e, f, g): ...\n"
    text += "    def h(ctx, a, b, c, d, e, f): ...\n"
    (first, second) = crowded_functions(write(tmp_path, {"a.py": text}))
    assert first.startswith("a.py:1 f takes 7 positional parameters; the limit is 6")
    assert second.startswith("a.py:5 g takes 7 ")
