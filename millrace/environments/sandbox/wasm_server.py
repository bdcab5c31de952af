"""The process that runs programs in CPython for WebAssembly, each as an instance in a forked child.

The fork makes a limit of time certain: an instance that waits in a call of the host, such as a sleep, is in
none of wasmtime's own limits, but a process can be killed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.environments.sandbox.fork_server import (
    MAX_FILES,
    PROGRAM,
    WORK,
    ForkedRun,
    pack,
    unpack,
    used_by_descendants,
)
from millrace.environments.sandbox.private_folder import FolderNotPrivateError, PrivateFolder
from millrace.environments.sandbox.seccomp import refuse_system_calls
from millrace.environments.sandbox.wasm_interpreter import InterpreterError, WasmInterpreter
from millrace.keeper import PR_SET_CHILD_SUBREAPER
from millrace.processes.worker import hide_memory

if TYPE_CHECKING:
    from millrace.processes.worker import WorkerChannel

_CODE = "code"
# Deeper folders take long to remove.
_MAX_DEPTH = 64
# The process of a run has the server's memory, and what wasmtime takes for calls of the program.
_HOST_BYTES = 256 << 20
_prctl = ctypes.CDLL(None).prctl


def serve(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Run programs until the parent closes the channel."""
    try:
        interpreter = WasmInterpreter(PrivateFolder(Path(settings["cache"])))
        refuse_system_calls()
    except (InterpreterError, FolderNotPrivateError) as error:
        channel.refuse(str(error))
        return
    except OSError as error:
        channel.refuse(f"{error.strerror}: {error.filename or ''}".rstrip(": "))
        return
    hide_memory()  # not before: it also closes /proc/self to this process
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = settings["folder"]
    work, code = os.path.join(folder, WORK), os.path.join(folder, _CODE)
    for made in (work, code):
        os.mkdir(made)
    gc.freeze()
    channel.started()
    for id, body in channel:
        request, (stdin,) = unpack(body)
        if request["kind"] == "clear":
            _empty(work)
        if request["kind"] in ("clear", "is_empty"):
            channel.reply(id, pack({"empty": not os.listdir(work)}))
            continue
        with open(os.path.join(code, PROGRAM), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(request["program"])
        run = _WasmRun(folder, request["limits"], stdin, confined=False)
        if run.start():
            interpreter.run(code, work, request["limits"])
        run.watch()
        reply = run.finish()
        if run.is_too_much:
            _empty(work)
        channel.reply(id, reply)


class _WasmRun(ForkedRun):
    """One run of the interpreter, which starts no process and no thread of the program's."""

    is_too_much = False

    def resource_limits(self) -> dict[int, int | tuple[int, int]]:
        """As those of a program, but without one of addresses: an instance reserves 4 GiB of them."""
        limits = super().resource_limits()
        del limits[resource.RLIMIT_AS]
        return limits

    def watch(self) -> None:
        """Pass the streams on until the program has ended, then look at its files once more."""
        super().watch()
        self.is_too_much = self._ended == "files" or self._is_folder_too_large()
        if self._ended == "exit" and self.is_too_much:
            self._ended = "files"

    def beyond(self) -> str:
        """Return the limit that files are beyond, or the memory beside the instance's own; or `exit`."""
        _, memory_bytes = used_by_descendants()
        if memory_bytes > self._limits["memory_bytes"] + _HOST_BYTES:
            return "memory"
        return "files" if self._is_folder_too_large() else "exit"

    def _is_folder_too_large(self) -> bool:
        num_bytes = 0
        for num_files, (depth, size) in enumerate(_entries(os.path.join(self._folder, WORK)), 1):
            num_bytes += size
            if num_files > MAX_FILES or num_bytes > self._limits["folder_bytes"] or depth > _MAX_DEPTH:
                return True
        return False


def _entries(folder: str) -> Iterator[tuple[int, int]]:
    """Yield depth and bytes of all that is in a folder, while a program may change it."""
    left = [(folder, 1)]
    while left:
        path, depth = left.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    yield depth, 512 * found.st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        left.append((entry.path, depth + 1))
        except FileNotFoundError:  # it was removed meanwhile
            continue
        except OSError:  # a path longer than the system allows
            yield _MAX_DEPTH + 1, 0


def _empty(work: str) -> None:
    """Make the folder anew; no program runs."""
    aside = f"{work}-{time.monotonic_ns()}"
    os.rename(work, aside)
    os.mkdir(work)
    shutil.rmtree(aside)
