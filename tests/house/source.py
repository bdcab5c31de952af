"""Where the house stands and how its files are read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "millrace"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(folder: Path) -> list[Path]:
    """Every Python file below a folder, in order; none where the folder does not exist."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def parse(path: Path) -> ast.Module:
    return _parse(path.read_text(encoding="utf-8"), str(path))


@cache
def _parse(text: str, filename: str) -> ast.Module:
    return ast.parse(text, filename=filename)


def functions(tree: ast.AST) -> Iterator[tuple[Function, bool]]:
    """Every function at any depth, and whether it stands in a class."""
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            if isinstance(child, Function):
                yield child, isinstance(parent, ast.ClassDef)


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
