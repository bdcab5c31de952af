"""What a built-in judge may not do while it judges, whatever a completion makes its libraries do.

An audit hook sees each of these before it happens and cannot be removed again. It is the second line: the
first is that the judges evaluate nothing (`scorers`). A user's own function is not held to it.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

# What a judge with SymPy, NumPy and a task's data takes is a tenth.
MEMORY_BYTES = 2 << 30
FILE_BYTES = 0
WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
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
        "os.rename",
        "os.rmdir",
        "os.spawn",
        "os.startfile",
        "os.symlink",
        "os.system",
        "os.truncate",
        "os.unsetenv",
        "os.utime",
        "pty.spawn",
        "signal.pthread_kill",
        "subprocess.Popen",
        "webbrowser.open",
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
FAMILIES = ("socket.", "shutil.", "ftplib.", "http.", "smtplib.", "urllib.", "tempfile.")


def limit_resources() -> None:
    """At most 2 GiB of memory, no file written, no core dump: more is an error in this process alone."""
    for kind, most in (
        (resource.RLIMIT_DATA, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
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
            raise PermissionError("a judge may not evaluate text")
    elif event == "open":
        _, _, flags = arguments
        if isinstance(flags, int) and flags & WRITING:
            raise PermissionError("a judge may not write files")
    elif event in REFUSED or event.startswith(FAMILIES):
        raise PermissionError(f"a judge may not use {event}")
