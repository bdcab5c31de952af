"""A supervisor process between this process and a child, which kills the child and all its descendants.

A child can hang, be stopped, or leave processes behind in sessions of their own, and its parent can be
killed at any moment. The keeper adopts orphaned descendants (`PR_SET_CHILD_SUBREAPER` on Linux). It kills all
of them when the child ends or when the lifeline closes, which the kernel does for a killed parent. It then
removes a folder and exits with the child's status.

It runs as a file, so that it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# A shell, and bubblewrap, report death by signal n as exit code 128 + n.
SIGNALLED = 128
# Polling interval for the process count, if it is limited.
LOOK_MS = 1000


def keeper_command(
    lifeline: int, command: Sequence[str], *, remove: str = "", codes: str = "own", most: int = 0
) -> list[str]:
    """Build the command line that runs `command` under a keeper; start it in a session of its own.

    `lifeline` is the inherited read end of an unused pipe. The caller keeps the write end; closing it kills
    all. The command inherits every other descriptor. `remove` is a folder to remove at the end. `codes` is
    `shell` if the command reports a death by signal as exit code 128 + signal. Beyond `most` processes, child
    and descendants, all are killed; 0 is no limit.
    """
    # Isolated mode without site packages cuts the startup time to a tenth.
    return [sys.executable, "-I", "-S", __file__, str(lifeline), remove, codes, str(most), *command]


def main(arguments: Sequence[str]) -> None:
    """Supervise a child until it ends or the lifeline closes, then exit with its status.

    The arguments are those that `keeper_command` appends: lifeline, folder, codes, limit, command.
    """
    lifeline, folder, codes, most, *command = arguments
    os.set_inheritable(int(lifeline), False)
    wakened, wake = os.pipe()
    for end in (wakened, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    ended: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    _control(PR_SET_CHILD_SUBREAPER, 1)
    child = _start(command)
    _leave_pipes()
    status: int | None = None
    poll = select.poll()
    poll.register(int(lifeline), 0)  # a hang-up is always reported
    poll.register(wakened, select.POLLIN)
    while status is None and not ended:
        if any(descriptor == int(lifeline) for descriptor, _ in poll.poll(LOOK_MS if int(most) else None)):
            break
        if int(most) and _num_below(os.getpid()) > int(most):
            sys.stderr.write(f"more than {most} processes\n")
            break
        with suppress(BlockingIOError):
            os.read(wakened, 4096)
        status = _reap(child)
    left = end_descendants(child)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    _end_as(left if status is None else status, codes)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM once the one that started it has ended; Linux only."""
    _control(PR_SET_PDEATHSIG, signal.SIGTERM)


def _control(option: int, value: int) -> None:
    """Call prctl(2) on Linux; do nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _start(command: Sequence[str]) -> int:
    keeper = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _control(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:  # else the keeper died before the prctl call
            os.execvp(command[0], list(command))
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    os._exit(127)


def _leave_pipes() -> None:
    """Detach from stdin and stdout, so that the child's pipes close with the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def _reap(child: int) -> int | None:
    """Reap all ended processes; return the child's status if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def end_descendants(child: int) -> int | None:
    """Kill and reap until no descendant is left; return the status of `child` if it is reaped here."""
    found = None
    while True:
        # Without /proc only the child's process group can be killed, and a process can leave that.
        for process in descendants() if sys.platform == "linux" else [-child]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            # Orphans of a killed process become children of this one, so that none is missed.
            ended, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return found
        if ended == child:
            found = status


def descendants() -> list[int]:
    """Return the process ids below this process; Linux only."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            _, parent, *_ = file.read().rpartition(b")")[2].split()
            children.setdefault(int(parent), []).append(int(name))
    found, looked_at = [], [os.getpid()]
    while looked_at:
        below = children.get(looked_at.pop(), [])
        found += below
        looked_at += below
    return found


def _num_below(process: int) -> int:
    found = 0
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", encoding="ascii") as file:
                children = file.read().split()
            found += sum(1 + _num_below(int(child)) for child in children)
    return found


def _end_as(status: int | None, codes: str) -> None:
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if codes == "shell" and SIGNALLED < code < SIGNALLED + signal.NSIG:
        code = SIGNALLED - code
    if code >= 0:
        os._exit(code)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(SIGNALLED - code)  # the default action of this signal does not end a process


if __name__ == "__main__":
    main(sys.argv[1:])
