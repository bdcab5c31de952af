"""Functions of a user's own, named `module:function` or `path/to/file.py:function` in recipes. No torch."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class FunctionError(ValueError):
    """There is no such function; the message continues a sentence that names it, and contains the fix."""


def imported(function: str) -> Callable[..., Any]:
    """A function by its name `module:function`, whose module may lie in the current folder, or by its file.

    FunctionError if there is none, or its import fails.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, _, name = function.rpartition(":")
    try:
        module = (
            _of_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        )
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise FunctionError(f"importing {module_name} raised {explain(error)}") from error
        raise FunctionError(
            f"there is no module {error.name} in {os.getcwd()} or among the installed packages; correct its "
            "name or start from the folder it lies in"
        ) from error
    except FunctionError:
        raise
    except BaseException as error:  # SystemExit too: a script without a main guard
        raise FunctionError(f"importing {module_name} raised {explain(error)}") from error
    found: object = getattr(module, name, None)
    if not callable(found):
        what = "does not have" if found is None else "cannot call"
        raise FunctionError(f"module {module_name} {what} a function {name}; correct it")
    return found


def _of_file(path: str) -> ModuleType:
    """The module of a file, executed once for all references to it; its folder is searched for imports."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise FunctionError(f"there is no file {path} in {os.getcwd()}; correct its path")
    # Two files may have the same name.
    name = f"{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def explain(error: BaseException) -> str:
    """Type, message and the line it was raised in."""
    message = "".join(traceback.TracebackException.from_exception(error).format_exception_only()).strip()
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{message} ({os.path.basename(last.filename)} line {last.lineno})"
