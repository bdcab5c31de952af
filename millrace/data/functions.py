"""Functions of a user's own, which recipes name as `module:function`. No torch."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class FunctionError(ValueError):
    """There is no such function; the message continues a sentence that names it, and contains the fix."""


def imported(function: str) -> Callable[..., Any]:
    """A function by its name `module:function`, whose module may lie in the current folder.

    FunctionError if there is none, or its import fails.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, _, name = function.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise FunctionError(f"importing {module_name} raised {explain(error)}") from error
        raise FunctionError(
            f"there is no module {error.name} in {os.getcwd()} or among the installed packages; correct its "
            "name or start from the folder it lies in"
        ) from error
    except BaseException as error:  # SystemExit too: a script without a main guard
        raise FunctionError(f"importing {module_name} raised {explain(error)}") from error
    found: object = getattr(module, name, None)
    if not callable(found):
        what = "does not have" if found is None else "cannot call"
        raise FunctionError(f"module {module_name} {what} a function {name}; correct it")
    return found


def explain(error: BaseException) -> str:
    """Type, message and the line it was raised in."""
    message = "".join(traceback.TracebackException.from_exception(error).format_exception_only()).strip()
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{message} ({os.path.basename(last.filename)} line {last.lineno})"
