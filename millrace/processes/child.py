"""One child process: its start under a keeper, requests by id, reports, output, exit reason and end."""

from __future__ import annotations

import codecs
import json
import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from millrace.keeper import keeper_command
from millrace.observability.plain import plain_text
from millrace.processes.frames import FrameSocket
from millrace.processes.worker import KEY_BYTES, START

_WORKER = Path(__file__).with_name("worker.py")
_KILL_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgram:
    """What a child process runs, and its restrictions.

    `entry` is `module:function`, called with the `WorkerChannel` and the settings, which JSON can hold. Where
    requests do not overlap, the timeout of one starts when the previous one is answered. `confine` converts
    the command line to one inside a sandbox, which reports signals as a shell does. The folder `remove` is
    removed at the end; `max_echo` characters of output are copied to standard error. The worker inherits the
    descriptors `pass_fds`. If it `reports`, it also sends messages that reply to no request, with the id
    `START`; the first one says that it has started.
    """

    name: str
    entry: str
    settings: Mapping[str, Any]
    path: Sequence[str]
    environment: Mapping[str, str]
    start_s: float
    max_reply_bytes: int
    max_data_bytes: int = 0
    reports: bool = False
    pass_fds: Sequence[int] = ()
    overlapping: bool = False
    confine: Callable[[Sequence[str]], list[str]] | None = None
    max_processes: int = 0
    remove: str = ""
    max_echo: int = 0


@dataclass(slots=True)
class PendingRequest:
    """A request without reply, and the time of the clock by which it is due once it is the worker's turn."""

    timeout_s: float
    deadline_s: float


class ChildProcess:
    """A worker process with requests in flight. Only `kill`, and `failure` of an ended one, block.

    Attributes:
        program: what it runs.
        pending: requests without reply by id, in order; the start itself is `START`.
        facts: what the worker reported when it started; empty before.
    """

    def __init__(self, program: WorkerProgram, clock: Callable[[], float]) -> None:
        self.program = program
        self.pending: dict[int, PendingRequest] = {}
        self.facts: Mapping[str, Any] = {}
        self._clock = clock
        self._cancelled: set[int] = set()
        self._num_frames = 0
        self._echo, self._tail = program.max_echo, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ending = threading.Lock()
        self._lifeline: int | None
        command = [sys.executable, "-P", "-u", str(_WORKER)]
        key = secrets.token_bytes(KEY_BYTES)
        ours, theirs = socket.socketpair()
        ours.sendall(key)
        read_end, self._lifeline = os.pipe()
        try:
            self._popen = subprocess.Popen(
                keeper_command(
                    read_end,
                    command if program.confine is None else program.confine(command),
                    remove=program.remove,
                    codes="own" if program.confine is None else "shell",
                    most=program.max_processes,
                ),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=(read_end, *program.pass_fds),
                env=program.environment,
                start_new_session=True,
            )
        except OSError:
            self.end()
            ours.close()
            shutil.rmtree(program.remove, ignore_errors=True)
            raise
        finally:
            theirs.close()
            os.close(read_end)
        self._channel = FrameSocket(ours, key, program.max_reply_bytes, program.max_data_bytes)
        assert self._popen.stdout is not None
        self._output: IO[bytes] = self._popen.stdout
        self._output_ended = False
        os.set_blocking(self._output.fileno(), False)
        start = {"path": list(program.path), "entry": program.entry, "settings": program.settings}
        self.request(json.dumps(start).encode(), program.start_s)

    @property
    def started(self) -> bool:
        """Whether it has replied to its start."""
        return START not in self.pending

    @property
    def deadline_s(self) -> float:
        """Time of the clock by which a reply is due; infinite without a request."""
        return min((one.deadline_s for one in self._begun()), default=math.inf)

    def request(self, body: bytes, timeout_s: float) -> int:
        """Queue a request with a body that is not empty, and return its id."""
        self.pending[self._num_frames] = PendingRequest(timeout_s, self._clock() + timeout_s)
        return self.notify(body)

    def notify(self, body: bytes, data: Sequence[memoryview] = ()) -> int:
        """Queue a message without reply, and return its id; `data` must stay unchanged until it is sent."""
        self._channel.queue(self._num_frames, body, data)
        self._num_frames += 1
        return self._num_frames - 1

    def cancel(self, id: int) -> None:
        """Drop a request's reply, and tell the worker."""
        begun = not self.program.overlapping and id == next(iter(self.pending), None)
        if self.pending.pop(id, None) is not None:
            self._cancelled.add(id)
            self._channel.queue(id, b"")
        if begun:
            self.restart_timeouts()

    def restart_timeouts(self) -> None:
        """Start the timeouts again, for example because nothing was read from this child meanwhile."""
        for one in self._begun():
            one.deadline_s = self._clock() + one.timeout_s

    def watch(self) -> list[tuple[int, int]]:
        """Send what the socket accepts; return the descriptors and events of `select.poll` to wait for."""
        output = [] if self._output_ended else [(self._output.fileno(), select.POLLIN)]
        return [*self._channel.watch(), *output]

    def exchange(self) -> list[tuple[int, bytes, bytearray]]:
        """Read output and replies; return the id, body and data of each reply and report."""
        self._read_output()
        replies = []
        for frame in self._channel.take():
            id = frame[0]
            is_report = id == START and self.program.reports
            if id in self._cancelled:
                self._cancelled.discard(id)
            elif self.pending.pop(id, None) is None and not is_report:
                self._channel.fault = f"replied to request {id}, which is not pending"
            else:
                replies.append(frame)
        if replies and not self.program.overlapping:
            self.restart_timeouts()
        return replies

    def failure(self, now_s: float) -> str:
        """Return why it cannot go on, empty if it can: a fault, its end, or an overdue reply."""
        if reason := self.exit_reason():
            reason += self.log_tail()
            return plain_text(reason, len(reason))
        late = [one.timeout_s for one in self._begun() if one.deadline_s <= now_s]
        return f"took longer than {late[0]:g} s" if late else ""

    def exit_reason(self) -> str:
        """Return why it has ended or broke the protocol; empty while it runs."""
        if self._channel.fault or not self._channel.ended:
            return self._channel.fault
        try:
            code = self._popen.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        while self._read_output():
            pass
        if code < 0:
            return f"its process was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"its process ended with exit code {code}"

    def log_tail(self) -> str:
        """Return the tail of its output as a clause for an error message; empty if it printed nothing."""
        tail = self._tail.strip()
        return f"; the last it printed: {tail}" if tail else ""

    def end(self) -> None:
        """Make the keeper kill the process and all processes it started; thread-safe."""
        with self._ending:
            if self._lifeline is not None:
                os.close(self._lifeline)
                self._lifeline = None

    def kill(self) -> None:
        """Kill the process, wait for it and close its socket and output."""
        self.end()
        try:
            self._popen.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # something stopped or ended the keeper
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(_KILL_TIMEOUT_S)
        while self._read_output():
            pass
        self._channel.close()
        self._output.close()
        shutil.rmtree(self.program.remove, ignore_errors=True)  # the keeper may have been killed

    def _begun(self) -> Iterator[PendingRequest]:
        """Requests whose timeout runs: all, or the first if the worker handles one after another."""
        return islice(self.pending.values(), None if self.program.overlapping else 1)

    def _read_output(self) -> bool:
        """Read once, since a child can print faster than this reads; return whether there was any."""
        try:
            data = os.read(self._output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        self._output_ended = not data
        text = self._decoder.decode(data)
        self._tail = (self._tail + text)[-_TAIL_CHARACTERS:]
        self._show(text)
        return bool(data)

    def _show(self, text: str) -> None:
        if not self._echo:
            return
        shown, self._echo = text[: self._echo], self._echo - len(text[: self._echo])
        sys.stderr.write("\n".join(plain_text(line, len(line)) for line in shown.split("\n")))
        if not self._echo:
            most = f"{self.program.max_echo:,}"
            sys.stderr.write(f"\n({self.program.name} printed more than {most} characters)\n")
