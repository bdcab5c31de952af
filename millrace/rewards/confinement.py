"""Audit hooks that block side effects of a reward worker process while it scores a completion.

An audit hook runs before the audited operation and cannot be removed. For built-in rewards the hooks are the
second defence; the first is that these rewards never evaluate text (`scorers`). For a user's function they
give a readable error for operations that bubblewrap would block with an OS error, and they enforce the same
limits on Python code where bubblewrap is not installed.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
# Events of functions that open no file. Socket events are matched by prefix.
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
# Modules that compile code which they generate from numbers and names, never from a completion.
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


# File operations allowed to a user's function below its writable folders: number of leading path arguments.
_CHANGES = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.link": 2,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.truncate": 1,
}
_LOOK_UPS = frozenset({"socket.getaddrinfo", "socket.gethostbyname"})
_CONNECTIONS = frozenset({"socket.bind", "socket.connect", "socket.sendmsg", "socket.sendto"})


def refuse_effects() -> None:
    """Make this process raise PermissionError when it evaluates text, starts a program or writes a file."""
    sys.addaudithook(_refuse)


def refuse_beyond(writable: Sequence[str], *, network: bool) -> None:
    """Make Python code raise PermissionError beyond `writable`, TMPDIR, /dev and, if allowed, the network."""
    allowed = [os.path.realpath(folder) for folder in (*writable, tempfile.gettempdir(), "/dev")]

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING and not isinstance(path, int):
                _check_path(path, allowed)
        elif event in _CHANGES:
            folder = arguments[-1] if event != "os.truncate" else -1
            # os.symlink(target, link) creates only the second path.
            for path in arguments[event == "os.symlink" : _CHANGES[event]]:
                _check_path(path, allowed, folder)
        elif not network and (event in _LOOK_UPS or _connects(event, arguments)):
            raise PermissionError(
                "a reward function may not use the network; set network: true for it in the recipe"
            )

    sys.addaudithook(refuse)


def _connects(event: str, arguments: tuple[Any, ...]) -> bool:
    return event in _CONNECTIONS and arguments[0].family != socket.AF_UNIX


def _check_path(path: Any, allowed: Sequence[str], folder: int = -1) -> None:
    """Refuse a path outside the allowed folders; it may be a descriptor, or relative to an open folder."""
    where = os.fsdecode(path) if not isinstance(path, int) else f"/proc/self/fd/{path}"
    if folder >= 0 and not os.path.isabs(where):
        where = f"/proc/self/fd/{folder}/{where}"
    itself = os.path.join(os.path.realpath(os.path.dirname(where)), os.path.basename(where))
    for real in (itself,) if itself.startswith("/dev/") else (itself, os.path.realpath(where)):
        if not any(real == one or real.startswith(one + os.sep) for one in allowed):
            raise PermissionError(
                f"a reward function may not write {real}; name its folder under writable in the recipe"
            )


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "compile":
        _, name = arguments
        # Imported modules have a file path as their name; `ast.parse` uses "<unknown>" and runs nothing.
        if os.fsdecode(name).startswith("<") and name != "<unknown>" and _caller() not in GENERATORS:
            raise PermissionError("a built-in reward may not evaluate text")
    elif event == "open":
        _, _, flags = arguments
        if isinstance(flags, int) and flags & WRITING:
            raise PermissionError("a built-in reward may not write files")
    elif event in REFUSED or event.startswith("socket."):
        raise PermissionError(f"a built-in reward may not use {event}")
