"""Tries to escape from a sandbox in the ways known to us, and reports what became of each attempt."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from millrace.environments.sandbox.execution import MIB, Execution, RunLimits, Sandbox, SandboxError
from millrace.environments.sandbox.open_sandbox import SandboxKind

# Attempts that need no change of the host where they succeed: what they open they neither read nor write.
_PRELUDE = """
import os, socket, sys

class Lacking:
    def __getattr__(self, name):
        raise OSError("there is no C library")

try:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
except ImportError:
    libc = Lacking()

def attempt(what, action):
    try:
        action()
    except Exception as error:
        print("refused:", what, "-", getattr(error, "strerror", None) or error)
    else:
        print("ESCAPED:", what)

def call(function, *arguments):
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""
_OPEN = """
# WebAssembly has its library in its own memory, where a path can be that of a file of the host.
own = os.path.dirname(os.__file__) if sys.platform == "wasi" else None
for path in {paths!r}:
    if os.path.dirname(path) == own:
        continue
    attempt(path, lambda: os.close(os.open(path, {flags})))
"""
_FOLLOW = """
def follow(path):
    os.symlink(path, "link")
    try:
        os.close(os.open("link", os.O_RDONLY))
    finally:
        os.unlink("link")

above = "../" * 40
attempt("a link", lambda: follow({path!r}))
attempt("a link upwards", lambda: follow(above + {path!r}))
attempt("a path upwards", lambda: os.close(os.open(above + {path!r}, os.O_RDONLY)))
"""
_CONNECT = """
def connect(family, address):
    with socket.socket(family) as client:
        client.settimeout(5)
        client.connect(address)

attempt("a port of the host", lambda: connect(socket.AF_INET, ("127.0.0.1", {port})))
attempt("a Unix socket of the host", lambda: connect(socket.AF_UNIX, {name!r}))
attempt("another machine", lambda: connect(socket.AF_INET, ("192.0.2.1", 80)))
"""
_PROCESSES = """
def see():
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
    if not others:
        raise OSError("only its own are there")

attempt("processes of the host", see)
attempt("a signal to the host", lambda: os.kill({pid}, 0))
"""
_SIGNAL = """
import signal, time
if hasattr(os, "kill"):
    for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
        os.kill(os.getppid(), number)
time.sleep(0.2)
print("refused: the parent goes on")
"""
_PARENT = """
parent = f"/proc/{os.getppid() if hasattr(os, 'getppid') else 1}"
for path in (f"{parent}/environ", f"{parent}/mem"):
    attempt(path, lambda: os.close(os.open(path, os.O_RDONLY)))
for path in (f"{parent}/fd/0", f"{parent}/root", f"{parent}/cwd"):
    attempt(path, lambda: os.readlink(path))
attempt("ptrace", lambda: call(libc.ptrace, 16, os.getppid(), 0, 0))
"""
_NAMESPACES = """
def new_root():
    call(libc.unshare, 0x10000000)

attempt("a user namespace", new_root)
for kind in (0x20000, 0x40000000, 0x20000000):
    attempt(f"namespace {kind:#x}", lambda: call(libc.unshare, kind))
"""
_MOUNT = """
os.makedirs("mounted", exist_ok=True)

def mount():
    # The kernel checks the right to mount before the type.
    libc.mount(b"none", b"mounted", b"no-such-type", 0, None)
    if ctypes.get_errno() in (1, 13):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

attempt("a mount", mount)
attempt("another root", lambda: call(libc.chroot, b"mounted"))
attempt("a device", lambda: os.mknod("disk", 0o60600, os.makedev(254, 0)))
"""
_PRIVILEGES = """
try:
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    rights = {name: status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")}
except FileNotFoundError:
    rights = None
if rights is None:
    print("refused: there is no process that could have rights")
elif [*rights.values()] == ["0" * 16, "0" * 16, "0" * 16, "1", "2"]:
    print("refused: no capability, no new privileges")
else:
    print("ESCAPED:", rights)
attempt("a set-uid file", lambda: os.setuid(12345))
"""
_UNCOUNTED = """
def share():
    id = libc.shmget(0, 1 << 20, 0o1600)
    call(lambda: id)
    libc.shmctl(id, 0, None)

attempt("System V shared memory", share)
attempt("an anonymous file", lambda: os.memfd_create("x"))
"""
_MEMORY = "blocks = [bytearray(64 << 20) for _ in range(33)]"
_NO_PROCESSES = "a program has no processes"
_SHARED_MEMORY = f"""
import os, sys, time
if not hasattr(os, "fork"):
    sys.exit("{_NO_PROCESSES}")
import mmap
for number in range(8):
    if os.fork() == 0:
        block = mmap.mmap(-1, 256 << 20)
        for _ in range(256):
            block.write(bytes(1 << 20))
        time.sleep(60)
time.sleep(60)
"""
_FORKS = "import os\nwhile True:\n    os.fork()"
_LOOP = "while True:\n    pass"
_OUTPUT = "for _ in range(1024):\n    print('x' * (1 << 20))"
_FILE = """
def large():
    with open("large", "wb") as file:
        for _ in range(1024):
            file.write(bytes(1 << 20))

def many():
    for number in range(1024):
        with open(f"part{number}", "wb") as file:
            file.write(bytes(1 << 20))

attempt("a file of 1 GiB", large)
attempt("1,024 files of 1 MiB", many)
attempt("/dev/full of files", lambda: os.close(os.open("/dev/large", os.O_CREAT | os.O_WRONLY)))
"""
_DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", {seconds!r}])
    os._exit(0)
"""


# Kinds that the attempts are written for.
PROBED: tuple[SandboxKind, ...] = ("bubblewrap", "wasm")


@dataclass(frozen=True, slots=True)
class EscapeAttempt:
    """What became of an attempt; `detail` is what was refused first, or what succeeded."""

    name: str
    refused: bool
    detail: str


def try_escapes(open_one: Callable[[RunLimits], Sandbox]) -> Iterator[EscapeAttempt]:
    """Make all attempts in one sandbox and report each; where one ends the sandbox, go on in another.

    Nothing outside is changed where an attempt succeeds, apart from files in a temporary folder.
    """
    limits = RunLimits(wall_s=30.0, cpu_s=20.0, memory_bytes=512 * MIB)
    sandbox = open_one(limits)
    try:
        with tempfile.TemporaryDirectory(prefix="millrace-escape-") as folder, _listeners() as (port, name):
            for title, code in _attempts(Path(folder), port, name):
                try:
                    done = sandbox.run(_PRELUDE + code)
                except SandboxError as error:
                    yield EscapeAttempt(title, False, str(error))
                    sandbox.close()
                    sandbox = open_one(limits)
                    continue
                yield _by_report(title, done)
                sandbox.clear()
            if os.listdir(folder) != [_SECRET]:
                yield EscapeAttempt("write a file of the host", False, f"wrote {os.listdir(folder)}")
        yield from _beyond_limits(sandbox, limits)
        yield from _survivals(sandbox)
    finally:
        sandbox.close()


_SECRET = "secret"


def _attempts(folder: Path, port: int, name: str) -> Iterator[tuple[str, str]]:
    secret = folder / _SECRET
    secret.write_text("secret", encoding="utf-8")
    read = [
        "/etc/shadow",
        "/etc/passwd",
        str(secret),
        str(Path(__file__).resolve()),
        str(Path.home() / ".ssh"),
    ]
    yield "read a file of the host", _OPEN.format(paths=read, flags="os.O_RDONLY")
    # Files that are made are in the temporary folder; of others a new one would be a change.
    yield (
        "write a file of the host",
        _OPEN.format(paths=[str(folder / "new")], flags="os.O_CREAT | os.O_RDWR"),
    )
    yield "follow a link to a file of the host", _FOLLOW.format(path=str(secret))
    shown = [sys.executable, os.__file__, "/usr/bin/env", "/run/millrace/millrace/processes/worker.py"]
    yield "change a file that is shown", _OPEN.format(paths=shown, flags="os.O_RDWR")
    devices = ["/dev/mem", "/dev/kmsg", "/proc/kcore", "/proc/kmsg", "/sys/kernel/uevent_helper"]
    yield "open memory or devices", _OPEN.format(paths=devices, flags="os.O_RDONLY")
    kernel = ["core_pattern", "modprobe", "hostname"]
    paths = [*(f"/proc/sys/kernel/{one}" for one in kernel), "/proc/sysrq-trigger"]
    yield "change a setting of the kernel", _OPEN.format(paths=paths, flags="os.O_WRONLY")
    yield "connect to the host or a network", _CONNECT.format(port=port, name=name)
    yield "see or signal processes of the host", _PROCESSES.format(pid=os.getpid())
    yield "signal the parent", _SIGNAL
    yield "read the parent's environment or memory", _PARENT
    yield "make a namespace", _NAMESPACES
    yield "mount, or make a device", _MOUNT
    yield "gain rights", _PRIVILEGES
    yield "take memory that is not counted", _UNCOUNTED
    yield "write 1 GiB of files", _FILE


def _by_report(title: str, done: Execution) -> EscapeAttempt:
    lines = done.stdout.splitlines()
    escaped = [line for line in lines if not line.startswith("refused:")]
    if not escaped and done.ended == "files":
        return EscapeAttempt(title, True, done.note)
    if escaped or not lines or done.exit_code:
        return EscapeAttempt(title, False, (escaped or [done.note or done.stderr.strip()[-200:]])[0])
    more = f", and {len(lines) - 1} more" if lines[1:] else ""
    return EscapeAttempt(title, True, lines[0].removeprefix("refused: ") + more)


def _beyond_limits(sandbox: Sandbox, limits: RunLimits) -> Iterator[EscapeAttempt]:
    short = replace(limits, wall_s=2.0)
    for title, code, given, ends in (
        ("take 2 GiB of memory in one process", _MEMORY, limits, {"memory"}),
        ("take 2 GiB of memory in eight processes", _SHARED_MEMORY, limits, {"memory"}),
        ("start processes without end", _FORKS, limits, {"processes", "exit"}),
        ("compute without end", _LOOP, short, {"timeout"}),
        ("print 1 GiB", _OUTPUT, limits, {"output"}),
    ):
        done = sandbox.run(code, limits=given)
        # Where the kernel counts processes, a fork fails, and then the program.
        refused = done.ended in ends and done.exit_code != 0
        refused &= len(done.stdout) + len(done.stderr) <= limits.output_bytes
        last = done.stderr.strip().rpartition("\n")[2]
        refused |= last == _NO_PROCESSES
        yield EscapeAttempt(title, refused, done.note or last or f"exit code {done.exit_code}")
        sandbox.clear()


def _survivals(sandbox: Sandbox) -> Iterator[EscapeAttempt]:
    """Leave a process behind at the end of a run, and at the end of the sandbox, which this closes."""
    seconds = f"86399.{os.getpid()}"
    sandbox.run(_DAEMON.format(seconds=seconds))
    left = _processes_named(seconds)
    yield EscapeAttempt("outlive the run as a daemon", not left, f"{len(left)} processes left")

    def run() -> None:
        with suppress(SandboxError):
            sandbox.run(f"import time\n{_DAEMON.format(seconds=seconds)}\ntime.sleep(86399)")

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not _processes_named(seconds):
        time.sleep(0.01)
    sandbox.close()
    thread.join()
    left = _processes_named(seconds)
    yield EscapeAttempt("outlive the sandbox as a daemon", not left, f"{len(left)} processes left")


class _listeners:
    """A port and an abstract Unix socket of the host, which accept connections."""

    def __enter__(self) -> tuple[int, str]:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._unix = socket.socket(socket.AF_UNIX)
        name = f"\0millrace-escape-{os.getpid()}"
        self._unix.bind(name)
        self._unix.listen()
        return self._server.getsockname()[1], name

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._unix.close()


def _processes_named(word: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.append(int(name))
    return found
