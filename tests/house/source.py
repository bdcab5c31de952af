"""Where the house stands, and what its files hold; each file is parsed once for all checks of a process."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "millrace"
Function = ast.FunctionDef | ast.AsyncFunctionDef
T = TypeVar("T")
# Nodes that say how a name is used, or which operator it is; no check asks for one.
SMALL = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
# Strings are matched too, so that a # inside of one begins no comment.
COMMENT = re.compile(
    r"(#[^\n]*)|"
    r'"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"|'
    r"'''(?:[^\\]|\\.)*?'''|'(?:[^'\\\n]|\\.)*'",
    re.S,
)


class Source:
    """A file and the nodes of its tree."""

    def __init__(self, text: str, filename: str) -> None:
        self.text = text
        self.tree = ast.parse(text, filename=filename)
        self._nodes: dict[type[ast.AST], list[tuple[int, Any]]] = {}
        for place, node in enumerate(walk(self.tree)):
            self._nodes.setdefault(type(node), []).append((place, node))

    def nodes(self, *kinds: type[ast.AST]) -> list[Any]:
        """All nodes of these kinds, in the order of `ast.walk`."""
        if len(kinds) == 1:
            return [node for _, node in self._nodes.get(kinds[0], ())]
        found = [one for kind in kinds for one in self._nodes.get(kind, ())]
        return [node for _, node in sorted(found, key=lambda one: one[0])]

    def functions(self) -> list[tuple[Function, bool]]:
        """Every function at any depth, and whether it stands in a class."""
        methods = {id(node) for owner in self.nodes(ast.ClassDef) for node in owner.body}
        return [(node, id(node) in methods) for node in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef)]

    def comments(self) -> list[str]:
        return [comment for comment in COMMENT.findall(self.text) if comment]


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without contexts and operators, which are half of all nodes."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        for value in node.__dict__.values():
            if isinstance(value, list):
                waiting.extend(
                    [one for one in value if isinstance(one, ast.AST) and not isinstance(one, SMALL)]
                )
            elif isinstance(value, ast.AST) and not isinstance(value, SMALL):
                waiting.append(value)


_SCANS: list[Callable[[Source], Iterable[Any]]] = []


def scan(function: Callable[[Source], Iterable[T]]) -> Callable[[Path], list[T]]:
    """Make a function of a file's content one of its path, which reads each file once.

    When a file is asked for, every such function sees it, and its tree is not kept: all trees are two million
    objects, which each garbage collection would visit. What a function finds must hold no node.
    """
    _SCANS.append(function)

    def of_file(path: Path) -> list[T]:
        return _found(path.read_text(encoding="utf-8"), str(path), len(_SCANS))[function]

    return of_file


@cache
def _found(text: str, filename: str, num_scans: int) -> dict[Any, list[Any]]:
    source = Source(text, filename)
    return {function: list(function(source)) for function in _SCANS[:num_scans]}


def python_files(folder: Path) -> list[Path]:
    """Every Python file below a folder, in order; none where the folder does not exist."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def dotted(node: ast.AST) -> str:
    """`torch.load` for the expression torch.load; empty for anything that is not a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        above = dotted(node.value)
        return f"{above}.{node.attr}" if above else ""
    return ""


def write(folder: Path, files: dict[str, str]) -> Path:
    """Small files for a check to look at; gives back the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
