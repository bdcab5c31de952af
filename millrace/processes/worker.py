"""The child's side: frames over a socket, and the program that every worker process starts with.

A frame is a header (length of the body, request id, length of the data, digest), the body, then the data. The
digest is BLAKE2b over the other fields and the body, keyed with a secret of the parent and the child: code
that a worker runs, or a program that it starts, could write into the socket. The data (arrays) is left out,
since its digest would take longer than all the rest; it is accepted only from workers that run no such code.

The first frame (id `START`) names the worker's function; its reply (`started` or `refuse`) has facts of
the worker, or the reason why it cannot start. A frame without body cancels the request of its id.

`child` starts this file as a script, so that it imports only the standard library before the parent has sent
the module search path.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from hmac import compare_digest
from types import ModuleType
from typing import Any

HEADER = struct.Struct("<IQQ16s")
KEY_BYTES = 32
START = 0
PR_SET_DUMPABLE = 4


def to_header(key: bytes, id: int, body: bytes, num_data_bytes: int = 0) -> bytes:
    """Encode the header of a frame."""
    fields = len(body), id, num_data_bytes
    digest = blake2b(HEADER.pack(*fields, b""), key=key, digest_size=16)
    digest.update(body)
    return HEADER.pack(*fields, digest.digest())


class WorkerChannel:
    """A worker's end of the socket, which blocks. It reads no further than the current frame.

    A worker that must not block makes a `frames.FrameSocket` of `connection` and `key`.
    """

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection, self.key = connection, key

    def receive(self, begun: Callable[[int], object] = lambda id: None) -> tuple[int, bytes] | None:
        """Return the next request's id and body, None if the parent has closed; `begun` gets the id first.

        Raises:
            ValueError: the frame is not the parent's, for example its rest only.
        """
        header = self._exactly(HEADER.size)
        if len(header) < HEADER.size:
            return None
        length, id, _, _ = HEADER.unpack(header)
        begun(id)
        body = self._exactly(length)
        if len(body) < length:
            return None
        if not compare_digest(header, to_header(self.key, id, body)):
            raise ValueError(f"the frame of request {id} was not written by the parent process")
        return id, body

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Receive requests until the parent closes."""
        while (request := self.receive()) is not None:
            yield request

    def reply(self, id: int, body: bytes) -> None:
        """Send the reply to a request."""
        self.connection.sendall(to_header(self.key, id, body) + body)

    def started(self, **facts: Any) -> None:
        """Report that the worker has started; the parent reads the facts, JSON, in `ChildProcess.facts`."""
        self.reply(START, json.dumps({"facts": facts}).encode())

    def refuse(self, reason: str) -> None:
        """Report that the worker cannot start."""
        self.reply(START, json.dumps({"refusal": reason}).encode())

    def _exactly(self, size: int) -> bytes:
        """Receive `size` bytes, or fewer if the parent has closed."""
        parts = []
        while size and (part := self.connection.recv(min(size, 1 << 20))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def limit_resources(memory_bytes: int, file_bytes: int) -> None:
    """Set resource limits of this process and, separately, of each process it starts; disable core dumps.

    A process that exceeds a limit gets an error; the others are not affected. A worker with SymPy, NumPy and
    a task's data takes 0.2 GiB. `file_bytes` limits the size of each written file. It also hides the memory.
    """
    for kind, most in (
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))
    hide_memory()


def hide_memory() -> None:
    """Keep programs that this process starts from its memory and descriptors in /proc, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def collect_rarely() -> None:
    """Collect garbage less often in a process that is about to import torch and transformers.

    They are 400,000 objects that stay. To look through them again and again is an eighth of a start.
    """
    gc.set_threshold(50_000)


def _imported(name: str) -> ModuleType:
    """Import a module without garbage collection, and leave what stays out of every later one."""
    collect_rarely()
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()
    # Libraries report at the end what was not collected.
    atexit.register(gc.unfreeze)
    gc.enable()
    return module


def main() -> None:
    """Call the function that the parent names with the channel and its settings.

    The channel leaves descriptor 0, so that `input` does not read it. Programs that a worker starts do not
    inherit it; see also `hide_memory`.
    """
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    channel = WorkerChannel(connection, connection.recv(KEY_BYTES, socket.MSG_WAITALL))
    if (first := channel.receive()) is not None:
        start = json.loads(first[1])
        sys.path[:] = start["path"]
        module, _, function = start["entry"].partition(":")
        serve = getattr(_imported(module), function)
        serve(channel, start["settings"])


if __name__ == "__main__":
    main()
