"""A small process between this one and a child, which ends the child and everything that the child started.

A child can hang, be stopped, or leave processes behind in sessions of their own, and the process that
started it can be killed at any moment. The keeper adopts what the child leaves behind
(`PR_SET_CHILD_SUBREAPER` on Linux), and kills all of it when the child ends or when the lifeline closes,
which the kernel does for a process that is killed. It then removes a folder and ends as the child did.

Run as a file, so that it imports the standard library alone.
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
# What a shell, and bubblewrap, make of a death by signal n is the exit code 128 + n.
SIGNALLED = 128
# How often processes are counted where their number is limited.
LOOK_MS = 1000


def keeper_command(
    lifeline: int, command: Sequence[str], *, remove: str = "", codes: str = "own", most: int = 0
) -> list[str]:
    """The command line that runs `command` under a keeper. Start it in a session of its own.

    Args:
        lifeline: read end of a pipe that carries nothing, to be inherited; the caller keeps the other end,
            and closing it ends everything.
        command: of the child, which inherits every other descriptor.
        remove: a folder that is removed at the end; none by default.
        codes: `own`, or `shell` where the command reports the death of what it runs as 128 + signal.
        most: processes that the child and what it started may be together; more, and all end. 0 is no limit.
    """
    # Isolated and without site packages, it starts in a tenth of the time.
    return [sys.executable, "-I", "-S", __file__, str(lifeline), remove, codes, str(most), *command]


def main(arguments: Sequence[str]) -> None:
    """Keep a child until it ends or the lifeline closes, and end as it did."""
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
    poll.register(int(lifeline), 0)  # a closed end is always reported
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
    left = _end_all(child)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    _end_as(left if status is None else status, codes)


def _control(option: int, value: int) -> None:
    """prctl(2), where there is one."""
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
        if os.getppid() == keeper:  # else it was gone before the signal was asked for
            os.execvp(command[0], list(command))
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    os._exit(127)


def _leave_pipes() -> None:
    """The child's pipes must close with the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def _reap(child: int) -> int | None:
    """Collect everything that has ended; how the child did, if it has."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _end_all(child: int) -> int | None:
    """Kill and collect until nothing is left; how the child ended, if it had not before."""
    found = None
    while True:
        # Without /proc it is the child's group, which a process leaves that wants to.
        for process in _descendants() if sys.platform == "linux" else [-child]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            # Those behind a killed process become children of this one, so that none is missed.
            ended, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return found
        if ended == child:
            found = status


def _descendants() -> list[int]:
    """Every process below this one."""
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
    """How many processes there are below one."""
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
    os._exit(SIGNALLED - code)  # one that ends nobody


if __name__ == "__main__":
    main(sys.argv[1:])
