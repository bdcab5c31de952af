"""Starts an agent program under limits; in a sandbox without a network it also carries connections.

In bubblewrap the program has a loopback of its own. This process listens there and passes each connection
on to the proxy's Unix socket, which is mounted inside, so that a program reaches the proxy by an address, and
nothing else. It imports only the standard library and what is mounted beside it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from millrace.environments.sandbox.seccomp import refuse_system_calls
from millrace.processes.worker import limit_resources

# Where the program finds the proxy inside a sandbox.
PORT = 8700
# Of each process, and of each file.
MEMORY_BYTES, FILE_BYTES = 4 << 30, 1 << 30
_START = "import sys; sys.path.insert(0, {0!r}); from {1} import main; main()"
_MAX_CONNECTIONS = 64
_BACKLOG = 64
_CHUNK = 1 << 16


def launch_command(python: str, root: str, socket_path: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` by `main`.

    Args:
        python: the interpreter.
        root: the folder that holds the package `millrace`, or of it what this file needs.
        socket_path: of the proxy, to make a way to it from a loopback of its own; empty outside a sandbox.
        command: the program's.
    """
    return [python, "-I", "-S", "-c", _START.format(root, __name__), socket_path, *command]


def main() -> None:
    """Run a program; the arguments are the socket, then the command."""
    socket_path, *command = sys.argv[1:]
    if not socket_path:
        limit_resources(MEMORY_BYTES, FILE_BYTES)
        _become(command)
    refuse_system_calls()
    _forward(socket_path)
    # A child, which the limits are for.
    again = launch_command(sys.executable, sys.path[0], "", command)
    sys.exit(_shell_code(subprocess.call(again)))


def _become(command: Sequence[str]) -> NoReturn:
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _forward(path: str) -> None:
    """Accept connections on loopback in a thread, and pass each on to the Unix socket."""
    listener = socket.create_server(("127.0.0.1", PORT), backlog=_BACKLOG)
    room = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def accept() -> None:
        while True:
            room.acquire()
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def serve(connection: socket.socket) -> None:
        try:
            with connection, socket.socket(socket.AF_UNIX) as proxy, suppress(OSError):
                proxy.connect(path)
                back = threading.Thread(target=_pass_on, args=(proxy, connection), daemon=True)
                back.start()
                _pass_on(connection, proxy)
                back.join()
        finally:
            room.release()

    threading.Thread(target=accept, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    # The other direction may go on; a reset of either end ends both.
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
