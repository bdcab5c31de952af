"""Sandboxes around a fork server: in bubblewrap, or, where a recipe asks for it, in none."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import millrace.keeper
from millrace.environments.sandbox import fork_server, seccomp
from millrace.environments.sandbox.execution import Execution, RunLimits, SandboxError, limit_note
from millrace.environments.sandbox.fork_server import PROGRAM, WORK, pack, unpack
from millrace.processes import worker
from millrace.processes.bubblewrap import ISOLATION, PROC, find_bubblewrap, without_user_namespaces
from millrace.processes.child import WorkerProgram
from millrace.processes.supervisor import ChildFailed, ChildReply, Supervisor

_ENTRY = "millrace.environments.sandbox.fork_server:serve"
_WORKER = "millrace/processes/worker.py"
_START_S = 60.0
# The server ends a run itself; one that does not reply this much later is killed.
GRACE_S = 30.0
MAX_REPLY_BYTES = 1 << 30
_CLOSED = "the sandbox was closed; open another"
# Inside bubblewrap: the folder that programs may write, and where the server's modules are.
FOLDER, _SHARED_MEMORY, MODULES = "/tmp", "/dev/shm", "/run/millrace"
_SERVER = (millrace.keeper, worker, fork_server, seccomp)
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
# What the dynamic linker needs, and Debian's links to the commands of /usr/bin.
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
_WRITE = """
import os, sys
os.makedirs(os.path.dirname({0!r}) or ".", exist_ok=True)
with open({0!r}, "wb") as file:
    file.write(sys.stdin.buffer.read())
"""
_READ = """
import shutil, sys
with open({0!r}, "rb") as file:
    shutil.copyfileobj(file, sys.stdout.buffer)
"""
_CLEAR = """
import os, shutil
for folder in {0!r}:
    for entry in os.scandir(folder):
        if entry.path not in {0!r} and entry.path != {1!r}:
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
"""


class ServerSandbox:
    """A sandbox whose programs are forked from a server, which is started at once.

    After an error the sandbox has ended; `clear` starts it anew.
    """

    def __init__(
        self,
        program: Callable[[RunLimits], WorkerProgram],
        limits: RunLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._supervisor = Supervisor(lambda: program(limits), clock=clock)
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def run(
        self, program: str | Sequence[str], stdin: str = "", limits: RunLimits | None = None
    ) -> Execution:
        """Run Python code (a text) or a command line (a list) in the work folder, which later runs see."""
        limits = limits or self._limits
        if limits.folder_bytes != self._limits.folder_bytes:
            raise SandboxError("folder_bytes of an open sandbox cannot change; give it to open_sandbox")
        head, stdout, stderr = self._execute(program, stdin.encode("utf-8", "surrogatepass"), limits)
        return Execution(
            stdout.decode("utf-8", "replace"),
            stderr.decode("utf-8", "replace"),
            head["exit_code"],
            head["ended"],
            head["seconds"],
            limit_note(head["ended"], limits),
        )

    def write(self, path: str, data: bytes) -> None:
        """Write a file, relative to the work folder; its folders are made."""
        self._file(_WRITE.format(path), f"{path} cannot be written", data)

    def read(self, path: str) -> bytes:
        """Read a file of at most `RunLimits.file_bytes`, relative to the work folder."""
        return self._file(_READ.format(path), f"{path} cannot be read", b"")

    def clear(self) -> None:
        """Empty the work folder, or start the server anew; what runs later finds nothing of earlier runs."""
        with suppress(SandboxError):  # it has ended, or a program made what cannot be removed
            if self._is_empty():
                return
            self._empty()
            if self._is_empty():
                return
        self._start()

    def close(self) -> None:
        """End everything that runs in it, and remove its files; thread-safe: a concurrent run raises."""
        self._closed = True
        self._supervisor.end()
        with self._lock:
            self._supervisor.close()

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise SandboxError(_CLOSED)
            self._supervisor.close()
            try:
                child = self._supervisor.start()
                while not child.started:
                    self._supervisor.wait()
            except ChildFailed as error:
                raise SandboxError(str(error)) from None

    def _empty(self) -> None:
        """Remove the files of earlier runs as far as that is possible."""
        settings = self._supervisor.children[0].program.settings
        folders = (settings["folder"], f"{settings['folder']}/{WORK}", *settings["others"])
        self._execute(_CLEAR.format(folders, f"{settings['folder']}/{PROGRAM}"), b"", self._limits)

    def _is_empty(self) -> bool:
        return bool(self.request(pack({"kind": "is_empty"}, b""), GRACE_S)[0]["empty"])

    def _file(self, code: str, problem: str, data: bytes) -> bytes:
        limits = replace(self._limits, output_bytes=self._limits.file_bytes)
        head, stdout, stderr = self._execute(code, data, limits)
        if head["ended"] == "exit" and head["exit_code"] == 0:
            return stdout
        last = stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise SandboxError(f"{problem}: {limit_note(head['ended'], limits) or last}")

    def _execute(
        self, program: str | Sequence[str], stdin: bytes, limits: RunLimits
    ) -> tuple[dict[str, Any], bytes, bytes]:
        code = isinstance(program, str)
        if not program:
            raise ValueError("there is no program to run")
        request = {
            "kind": "code" if code else "command",
            "program": program if code else list(program),
            "limits": asdict(limits),
        }
        head, (stdout, stderr) = self.request(pack(request, stdin), limits.wall_s + GRACE_S)
        return head, stdout, stderr

    def request(self, body: bytes, timeout_s: float) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request to the server and wait for its reply; SandboxError if the sandbox ends instead."""
        with self._lock:
            if self._closed:
                raise SandboxError(_CLOSED)
            if not self._supervisor.children:
                raise SandboxError("the sandbox has ended, with its files; clear starts it anew")
            self._supervisor.children[0].request(body, timeout_s)
            try:
                while not (events := self._supervisor.wait()):
                    pass
            except BaseException:  # also Ctrl-C: a reply must not be taken for the next one
                self._supervisor.close()
                raise
            (event,) = events
            if isinstance(event, ChildReply):
                return unpack(event.body)
            raise SandboxError(f"the sandbox has ended, with its files: {event.reason}")


def required_bubblewrap() -> str:
    """Return the path of bubblewrap; SandboxError if programs cannot be isolated here."""
    bubblewrap = find_bubblewrap()
    if bubblewrap is None:
        raise SandboxError(
            "programs cannot be isolated here: install bubblewrap (apt install bubblewrap) and allow user "
            "namespaces, so that `bwrap --unshare-all --ro-bind / / true` succeeds"
        )
    if not seccomp.supported():
        raise SandboxError("programs can be isolated on x86_64 and aarch64 only; run on one of them")
    return bubblewrap


def bubblewrap_program(limits: RunLimits) -> WorkerProgram:
    """Return the server's program in bubblewrap.

    Raises:
        SandboxError: bubblewrap is not installed, or does not work on this system.
    """
    bubblewrap = required_bubblewrap()
    python = os.path.realpath(sys.executable)
    arguments = [bubblewrap, *ISOLATION, *without_user_namespaces(bubblewrap), "--as-pid-1"]
    arguments += [
        "--hostname",
        "sandbox",
        *system_mounts(python, limits.folder_bytes, _SERVER),
        "--chdir",
        FOLDER,
    ]
    return WorkerProgram(
        name="the sandbox",
        entry=_ENTRY,
        settings={"folder": FOLDER, "others": [_SHARED_MEMORY], "confined": True},
        path=[MODULES, *_standard_library()],
        environment=server_environment(FOLDER, f"{os.path.dirname(python)}:/usr/bin:/bin"),
        start_s=_START_S,
        max_reply_bytes=MAX_REPLY_BYTES,
        # The same file, where it is inside.
        confine=lambda command: [*arguments, "--", python, "-I", "-S", f"{MODULES}/{_WORKER}"],
    )


def plain_program(limits: RunLimits) -> WorkerProgram:
    """Return the server's program without any isolation: limits only, in a temporary folder."""
    folder = tempfile.mkdtemp(prefix="millrace-sandbox-")
    return WorkerProgram(
        name="the sandbox",
        entry=_ENTRY,
        settings={"folder": folder, "others": [], "confined": False},
        path=sys.path,
        environment=server_environment(folder, os.environ.get("PATH", os.defpath)),
        start_s=_START_S,
        max_reply_bytes=MAX_REPLY_BYTES,
        remove=folder,
    )


def server_environment(folder: str, path: str) -> dict[str, str]:
    """Return the environment variables of a server, which its programs see where nothing replaces them."""
    return {"PATH": path, "HOME": f"{folder}/{WORK}", "TMPDIR": folder, "LANG": "C.UTF-8"}


def _standard_library() -> list[str]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    return list(dict.fromkeys([*folders, *(f"{folder}/lib-dynload" for folder in folders)]))


def system_mounts(
    python: str, folder_bytes: int, modules: Sequence[ModuleType], more: Sequence[str] = ()
) -> list[str]:
    """Return bubblewrap's arguments for what a sandbox sees; nothing but `FOLDER` can be written.

    Args:
        python: the interpreter, whose installation is shown.
        folder_bytes: size of the writable folder, and again of `/dev/shm`.
        modules: of millrace, shown below `MODULES`.
        more: further mounts of the caller.
    """
    # The order matters, since later mounts cover earlier ones.
    mounts = ["--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            mounts += ["--symlink", os.readlink(folder), folder]
        else:
            mounts += ["--ro-bind-try", folder, folder]
    for path in _SYSTEM_FILES:
        mounts += ["--ro-bind-try", path, path]
    size = ["--size", str(folder_bytes)]
    mounts += [*PROC, "--dev", "/dev", *size, "--tmpfs", _SHARED_MEMORY, "--remount-ro", "/dev"]
    mounts += [*size, "--tmpfs", FOLDER]
    if not Path(python).is_relative_to("/usr"):
        mounts += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    package = Path(millrace.keeper.__file__).parent
    for module in modules:
        assert module.__file__ is not None
        inside = f"{MODULES}/millrace/{Path(module.__file__).relative_to(package)}"
        mounts += ["--ro-bind", module.__file__, inside]
    return [*mounts, *more, "--remount-ro", "/"]
