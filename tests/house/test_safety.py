"""What the package never does: run text as code, unpickle, open a shell, serve the world, hide an error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, Source, dotted, python_files, scan, write

FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "os.system": "opens a shell",
    "os.popen": "opens a shell",
    "subprocess.getoutput": "opens a shell",
    "subprocess.getstatusoutput": "opens a shell",
    "yaml.load": "can make any object; use yaml.safe_load",
    "yaml.unsafe_load": "can make any object; use yaml.safe_load",
}
FORBIDDEN_KEYWORDS = {
    "shell": "opens a shell",
    "trust_remote_code": "runs code from a model folder",
    "allow_pickle": "unpickles",
}
BROAD = {"Exception", "BaseException"}


def dangers(folder: Path) -> list[str]:
    found = []
    for path in python_files(folder):
        for line, what in sorted(set(_dangers(path))):
            found.append(f"{path.relative_to(folder).as_posix()}:{line} {what}")
    return found


KINDS = (ast.Import, ast.ImportFrom, ast.Call, ast.Dict, ast.Constant, ast.ExceptHandler)


@scan
def _dangers(source: Source) -> Iterator[tuple[int, str]]:
    for node in source.nodes(*KINDS):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            for name in FORBIDDEN_MODULES & {name.split(".")[0] for name in names}:
                yield node.lineno, f"imports {name}, which unpickles"
        elif isinstance(node, ast.Call):
            yield from _call(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in FORBIDDEN_KEYWORDS and not _is_false(value):
                    yield node.lineno, f"{key.value} {FORBIDDEN_KEYWORDS[key.value]}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "0.0.0.0" in node.value:
            yield node.lineno, "names 0.0.0.0, which listens to the world; use 127.0.0.1"
        elif isinstance(node, ast.ExceptHandler):
            yield from _handler(node)


def _call(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = dotted(node.func)
    if name in FORBIDDEN_CALLS:
        yield node.lineno, f"{name} {FORBIDDEN_CALLS[name]}"
    for keyword in node.keywords:
        if keyword.arg in FORBIDDEN_KEYWORDS and not _is_false(keyword.value):
            yield node.lineno, f"{keyword.arg} {FORBIDDEN_KEYWORDS[keyword.arg]}"
    if name == "torch.load" and not any(k.arg == "weights_only" and _is_true(k.value) for k in node.keywords):
        yield node.lineno, "torch.load without weights_only=True unpickles"
    if name.endswith("suppress") and BROAD & {dotted(argument) for argument in node.args}:
        yield node.lineno, "suppresses every error"


def _handler(node: ast.ExceptHandler) -> Iterator[tuple[int, str]]:
    if node.type is None:
        yield node.lineno, "bare except"
        return
    types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    idle = all(isinstance(line, ast.Pass | ast.Continue) or _is_literal(line) for line in node.body)
    if BROAD & {dotted(kind) for kind in types} and idle:
        yield node.lineno, "swallows every error"


def _is_literal(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_the_package_does_nothing_dangerous():
    assert dangers(PACKAGE) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import pickle", "imports pickle"),
        ("def f():\n    from pickle import loads", "imports pickle"),
        ("eval('1')", "eval runs text as code"),
        ("exec('1')", "exec runs text as code"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell opens a shell"),
        ("subprocess.run('ls', shell=flag)", "shell opens a shell"),
        ("import os\nos.system('ls')", "os.system opens a shell"),
        ("serve(host='0.0.0.0')", "names 0.0.0.0"),
        ("url = f'http://0.0.0.0:{port}'", "names 0.0.0.0"),
        ("load('x', trust_remote_code=True)", "trust_remote_code runs code"),
        ("load('x', **{'trust_remote_code': True})", "trust_remote_code runs code"),
        ("torch.load('x')", "torch.load without weights_only=True"),
        ("torch.load('x', weights_only=False)", "torch.load without weights_only=True"),
        ("np.load('x', allow_pickle=True)", "allow_pickle unpickles"),
        ("yaml.load(text)", "use yaml.safe_load"),
        ("try:\n    f()\nexcept:\n    raise", "bare except"),
        ("try:\n    f()\nexcept Exception:\n    pass", "swallows every error"),
        ("try:\n    f()\nexcept (OSError, BaseException):\n    ...", "swallows every error"),
        ("with contextlib.suppress(Exception):\n    f()", "suppresses every error"),
    ],
)
def test_each_danger_is_found(tmp_path, text, message):
    (found,) = dangers(write(tmp_path, {"a.py": text}))
    assert message in found


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "torch.load('x', weights_only=True)",
        "load('x', trust_remote_code=False)",
        "try:\n    f()\nexcept OSError:\n    pass",
        "try:\n    f()\nexcept Exception as error:\n    raise Failed from error",
        "with contextlib.suppress(FileNotFoundError):\n    f()",
        "import re\nre.compile('x')",
    ],
)
def test_what_is_safe_passes(tmp_path, text):
    assert dangers(write(tmp_path, {"a.py": text})) == []
