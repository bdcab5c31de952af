"""What the worker of a built-in reward may not do while it scores a completion.

An audit hook sees each of these before it happens and cannot be removed again. It is the second defence; the
first is that built-in rewards evaluate nothing (`scorers`). The worker of a user's function is not confined.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

# A worker with SymPy, NumPy and a task's data takes a tenth.
MEMORY_BYTES = 2 << 30
WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
# Of functions that open no file; sockets have a family of events.
REFUSED = frozenset(
    {
        "ctypes.dlopen",
        "ctypes.dlsym",
        "os.chmod",
        "os.chown",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.kill",
        "os.killpg",
        "os.link",
        "os.mkdir",
        "os.posix_spawn",
        "os.putenv",
        "os.remove",
        "os.removexattr",
        "os.rename",
        "os.rmdir",
        "os.setxattr",
        "os.symlink",
        "os.system",
        "os.truncate",
        "os.unsetenv",
        "os.utime",
        "signal.pthread_kill",
        "subprocess.Popen",
    }
)
# They compile functions that they write themselves, from numbers and names and never from a completion.
GENERATORS = frozenset(
    {
        "collections",
        "dataclasses",
        "enum",
        "sympy.polys.monomials",
        "sympy.polys.ring_series",
        "sympy.utilities.lambdify",
    }
)


def limit_resources() -> None:
    """At most 2 GiB of memory, no file written, no core dump: more is an error in this process alone."""
    for kind, most in (
        (resource.RLIMIT_DATA, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def refuse_effects() -> None:
    """From now on, raise PermissionError where this process evaluates text, starts a program or writes."""
    sys.addaudithook(_refuse)


def _caller() -> str:
    """The module whose code brought about the event, beyond this one's."""
    frame = sys._getframe(1)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "compile":
        _, name = arguments
        # A module that is imported has a path; a syntax tree that is only read has the name that `ast` gives.
        if os.fsdecode(name).startswith("<") and name != "<unknown>" and _caller() not in GENERATORS:
            raise PermissionError("a built-in reward may not evaluate text")
    elif event == "open":
        _, _, flags = arguments
        if isinstance(flags, int) and flags & WRITING:
            raise PermissionError("a built-in reward may not write files")
    elif event in REFUSED or event.startswith("socket."):
        raise PermissionError(f"a built-in reward may not use {event}")
