"""The process inside a sandbox: runs one program after another, each in a forked child under limits.

A fork of this process costs a hundredth of a start of Python. In bubblewrap it is process 1, so no program
can signal it, and all that a program has started ends with one signal. It imports only the standard library
and what is mounted beside it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from millrace.environments.sandbox.seccomp import refuse_system_calls
from millrace.keeper import PR_SET_CHILD_SUBREAPER, descendants, end_descendants
from millrace.processes.worker import PR_SET_DUMPABLE, hide_memory

if TYPE_CHECKING:
    from millrace.processes.worker import WorkerChannel

# What is in the folder of a sandbox: the work folder, and the code of the current run.
WORK, PROGRAM = "work", "main.py"
# Modules that programs often import; a forked child has them already.
_PRELOADED = ("collections", "dataclasses", "datetime", "fractions", "heapq", "random", "re", "typing")
_LOOK_S = 0.02
# Empty files take kernel memory that no limit counts.
MAX_FILES = 20_000
_MAX_DESCRIPTORS = 256
_READ_BYTES = 1 << 16
# Since this version the kernel counts processes for each user namespace, not for all of a user.
_COUNTS_IN_NAMESPACE = (5, 14)
_NOT_STARTED = 127
_prctl = ctypes.CDLL(None).prctl
# Its typed interface does not have what the interpreter itself calls at its end.
_threading: Any = threading


def pack(head: Mapping[str, Any], *parts: bytes) -> bytes:
    """Encode values that JSON can hold, and bytes."""
    encoded = json.dumps({**head, "sizes": [len(part) for part in parts]}).encode()
    return b"".join((struct.pack("<I", len(encoded)), encoded, *parts))


def unpack(body: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Decode what `pack` encoded."""
    end = 4 + struct.unpack_from("<I", body)[0]
    head: dict[str, Any] = json.loads(body[4:end])
    parts = []
    for size in head.pop("sizes"):
        parts.append(body[end : end + size])
        end += size
    return head, parts


def serve(channel: WorkerChannel, settings: dict[str, Any]) -> None:
    """Run programs until the parent closes the channel."""
    hide_memory()
    confined = settings["confined"]
    if confined:
        if os.getpid() != 1:
            channel.refuse("the sandbox has no process namespace of its own")
            return
        try:
            refuse_system_calls()
        except OSError as error:
            channel.refuse(str(error.strerror))
            return
    else:
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ.pop("PWD", None)
    os.mkdir(os.path.join(settings["folder"], WORK))
    for name in _PRELOADED:
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    _preload_loader(os.path.join(settings["folder"], PROGRAM))
    gc.freeze()
    channel.started()
    for id, body in channel:
        request, (stdin,) = unpack(body)
        if request["kind"] == "is_empty":
            channel.reply(id, pack({"empty": _is_empty(settings["folder"], settings["others"])}))
            continue
        run = ForkedRun(settings["folder"], request["limits"], stdin, confined=confined)
        if run.start():
            _become(settings["folder"], request)
        run.watch()
        channel.reply(id, run.finish())


def _is_empty(folder: str, others: Sequence[str]) -> bool:
    """Return whether no run has left a file in the folder of the sandbox or in other writable ones."""
    work = os.path.join(folder, WORK)
    try:
        left = [*os.listdir(work), *(name for other in others for name in os.listdir(other))]
        return os.listdir(folder) == [WORK] and not os.path.islink(work) and not left
    except OSError:  # a program removed or closed one
        return False


class ForkedRun:
    """One program, from its fork until all its processes are gone."""

    def __init__(self, folder: str, limits: Mapping[str, Any], stdin: bytes, *, confined: bool) -> None:
        self._folder, self._limits, self._confined = folder, limits, confined
        self._stdin = memoryview(stdin)
        self._output = {1: bytearray(), 2: bytearray()}
        self._ended, self._status = "exit", 0

    def start(self) -> bool:
        """Fork; return whether this is the child, which then has its limits and its streams."""
        (in_read, self._in), (self._out, out_write), (self._err, err_write) = (os.pipe() for _ in range(3))
        for ours in (self._in, self._out, self._err):
            os.set_blocking(ours, False)
        self._used_s = _used_s()
        self._begun_s = time.monotonic()
        self._child = os.fork()
        if self._child:
            for descriptor in (in_read, out_write, err_write):
                os.close(descriptor)
            return False
        for descriptor, stream in enumerate((in_read, out_write, err_write)):
            os.dup2(stream, descriptor)
        os.closerange(3, 1 << 20)
        self._confine()
        return True

    def _confine(self) -> None:
        os.setsid()
        # Else it could not open /dev/stdin. The server itself stays closed to what it runs.
        _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        for kind, limit in self.resource_limits().items():
            soft, most = limit if isinstance(limit, tuple) else (limit, limit)
            _, hard = resource.getrlimit(kind)
            if hard != resource.RLIM_INFINITY:
                soft, most = min(soft, hard), min(most, hard)
            resource.setrlimit(kind, (soft, most))

    def resource_limits(self) -> dict[int, int | tuple[int, int]]:
        """Return the limits of the child's process: soft and hard, or one number for both."""
        cpu_s = math.ceil(self._limits["cpu_s"])
        limits: dict[int, int | tuple[int, int]] = {
            resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
            resource.RLIMIT_AS: self._limits["memory_bytes"],
            resource.RLIMIT_FSIZE: self._limits["file_bytes"],
            resource.RLIMIT_NOFILE: _MAX_DESCRIPTORS,
            resource.RLIMIT_CORE: 0,
        }
        release = os.uname().release.split(".")
        if self._confined and (int(release[0]), int(release[1].split("-")[0])) >= _COUNTS_IN_NAMESPACE:
            limits[resource.RLIMIT_NPROC] = self._limits["num_processes"] + 1  # this server counts, too
        return limits

    def watch(self) -> None:
        """Pass the streams on until the program has ended, is late, or is beyond a limit."""
        deadline_s = self._begun_s + self._limits["wall_s"]
        look_s = self._begun_s + _LOOK_S
        exited = os.pidfd_open(self._child)
        poll = select.poll()
        for descriptor in (exited, self._out, self._err):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._in, select.POLLOUT)
        while self._ended == "exit":
            now_s = time.monotonic()
            if now_s >= deadline_s:
                self._ended = "timeout"
                break
            if now_s >= look_s:
                self._ended = self.beyond()
                look_s = time.monotonic() + _LOOK_S
                continue
            ready = {one for one, _ in poll.poll(max(1.0, 1000 * (min(deadline_s, look_s) - now_s)))}
            if self._in in ready and not self._feed():
                poll.unregister(self._in)
                os.close(self._in)
                self._in = -1
            for descriptor in ready & {self._out, self._err}:
                if self._take(descriptor) == b"":
                    poll.unregister(descriptor)
            if exited in ready:
                break
        os.close(exited)

    def _feed(self) -> bool:
        """Write to standard input as much as it accepts now; return whether there is more."""
        try:
            while self._stdin:
                self._stdin = self._stdin[os.write(self._in, self._stdin[:_READ_BYTES]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            pass
        return False

    def _take(self, descriptor: int) -> bytes | None:
        """Read output once; return None if there is none now, b"" if there is none any more."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return None
        room = self._limits["output_bytes"] - sum(map(len, self._output.values()))
        if len(data) > room:
            self._ended = "output"
        self._output[1 if descriptor == self._out else 2] += data[:room]
        return data

    def beyond(self) -> str:
        """Return the limit that all processes of the program together are beyond, or `exit`."""
        num_tasks, memory_bytes = used_by_descendants()
        if num_tasks > self._limits["num_processes"]:
            return "processes"
        if memory_bytes > self._limits["memory_bytes"]:
            return "memory"
        files = os.statvfs(self._folder)
        if self._confined and files.f_files - files.f_ffree > MAX_FILES:
            return "files"
        return "exit"

    def finish(self) -> bytes:
        """Kill and reap all processes, and return the reply."""
        status = _end_namespace(self._child) if self._confined else end_descendants(self._child)
        assert status is not None
        seconds = time.monotonic() - self._begun_s
        for descriptor in (self._out, self._err):
            while self._ended in ("exit", "timeout") and self._take(descriptor):
                pass
            os.close(descriptor)
        if self._in >= 0:
            os.close(self._in)
        exit_code = os.waitstatus_to_exitcode(status)
        if self._ended == "exit":
            self._ended = self._own_end(exit_code)
        with suppress(OSError):
            os.unlink(os.path.join(self._folder, PROGRAM))
        head = {"exit_code": exit_code, "ended": self._ended, "seconds": seconds}
        return pack(head, *map(bytes, self._output.values()))

    def _own_end(self, exit_code: int) -> str:
        """Return whether a program that has ended did so at a limit of its process."""
        killed = exit_code == -signal.SIGKILL and _used_s() - self._used_s >= self._limits["cpu_s"]
        if exit_code == -signal.SIGXCPU or killed:
            return "cpu"
        last = self._output[2].rstrip().rpartition(b"\n")[2]
        return "memory" if exit_code == 1 and last.startswith(b"MemoryError") else "exit"


def used_by_descendants() -> tuple[int, int]:
    """Return the number of processes and threads below this process, and the bytes of memory they take."""
    num_tasks = memory_bytes = 0
    for process in descendants():
        with suppress(OSError, ValueError), open(f"/proc/{process}/status", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().splitlines())
            num_tasks += int(fields["Threads"])
            kib = (fields.get(name, "0 kB").split()[0] for name in ("RssAnon", "RssShmem"))
            memory_bytes += 1024 * sum(map(int, kib))
    return num_tasks, memory_bytes


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end_namespace(child: int) -> int | None:
    """Kill and reap every other process of this namespace; return the child's status."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # at once, so that none can start another
    found = None
    with suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == child:
                found = status
    return found


def _preload_loader(path: str) -> None:
    """Let the loader of source files prepare what it needs once, not in each child."""
    with open(path, "x", encoding="utf-8"):
        pass
    SourceFileLoader("program", path).get_code("program")
    os.unlink(path)


def _become(folder: str, request: Mapping[str, Any]) -> NoReturn:
    """Be the program: run its code, or replace this process."""
    work = os.path.join(folder, WORK)
    os.makedirs(work, exist_ok=True)
    os.chdir(work)
    if request["kind"] == "command":
        _start_command(request["program"])
    path = os.path.join(folder, PROGRAM)
    sys.excepthook = _without_our_frames(path)
    with open(path, "x", encoding="utf-8", errors="surrogatepass") as file:
        file.write(request["program"])
    sys.argv = [path]
    sys.path.insert(0, work)
    os._exit(_run_code(path))


def _run_code(path: str) -> int:
    """Run a file as Python does, to the end of its threads and exit handlers; return the exit code.

    The interpreter is not taken apart, which takes longer than most programs.
    """
    code, streams = 0, (sys.stdout, sys.stderr)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = path
    try:
        SourceFileLoader("__main__", path).exec_module(main)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _threading._shutdown()
    atexit._run_exitfuncs()
    vars(main).clear()
    gc.collect()  # files that the program left open are written
    for stream in streams:
        with suppress(ValueError):  # the program closed it
            stream.flush()
    return code & 0xFF


def _start_command(command: Sequence[str]) -> NoReturn:
    # Python ignores it, and programs inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except (OSError, ValueError) as error:  # there is none, or a word holds a null character
        reason = getattr(error, "strerror", None) or error
        os.write(2, f"{command[0]}: {reason}\n".encode("utf-8", "backslashreplace"))
    os._exit(_NOT_STARTED)


def _without_our_frames(path: str) -> Any:
    """An exception hook that shows a traceback from the program's own code on."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)

    return show
