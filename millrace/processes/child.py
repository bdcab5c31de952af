"""One child process: its start under a keeper, requests by id, output, exit reason and end."""

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
from hmac import compare_digest
from itertools import islice
from pathlib import Path
from typing import IO, Any

from millrace.keeper import keeper_command
from millrace.observability.plain import plain_text
from millrace.processes.worker import HEADER, KEY_BYTES, START, to_frame

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
    removed at the end; `max_echo` characters of output are copied to standard error.
    """

    name: str
    entry: str
    settings: Mapping[str, Any]
    path: Sequence[str]
    environment: Mapping[str, str]
    start_s: float
    max_reply_bytes: int
    overlapping: bool = False
    confine: Callable[[Sequence[str]], list[str]] | None = None
    max_processes: int = 0
    remove: str = ""
    max_echo: int = 0


class FrameSocket:
    """The parent's end of a socket, which never blocks: what the socket does not accept is kept.

    Attributes:
        ended: whether the child has closed; all its frames have been taken.
        fault: description of bytes that are no frame of the child; empty if there were none.
    """

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        connection.setblocking(False)
        self.ended, self.fault = False, ""
        self._socket, self._max_bytes = connection, max_bytes
        self._key = secrets.token_bytes(KEY_BYTES)
        self._incoming, self._outgoing = bytearray(), bytearray(self._key)

    @property
    def unsent(self) -> bool:
        """Whether `flush` is to be called when the socket is writable."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def queue(self, id: int, body: bytes) -> None:
        """Queue a frame for `flush`."""
        self._outgoing += to_frame(self._key, id, body)

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        while self._outgoing:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):  # `take` detects it
                self._outgoing.clear()

    def take(self) -> list[tuple[int, bytes]]:
        """Read once and return the id and body of each frame that is complete."""
        if self.ended or self.fault:
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:  # it had not read everything
            data = b""
        self.ended = not data
        self._incoming += data
        frames = []
        while len(self._incoming) >= HEADER.size:
            length, id, _ = HEADER.unpack_from(self._incoming)
            if HEADER.size + length > len(self._incoming) and length <= self._max_bytes:
                break
            frame = bytes(self._incoming[: HEADER.size + length])
            body = frame[HEADER.size :]
            if length > self._max_bytes or not compare_digest(frame, to_frame(self._key, id, body)):
                self.fault = f"wrote into the socket of its replies: {plain_text(repr(frame[:100]), 100)}"
                break
            frames.append((id, body))
            del self._incoming[: len(frame)]
        return frames

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


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
    """

    def __init__(self, program: WorkerProgram, clock: Callable[[], float]) -> None:
        self.program = program
        self.pending: dict[int, PendingRequest] = {}
        self._clock = clock
        self._cancelled: set[int] = set()
        self._num_frames = 0
        self._echo, self._tail = program.max_echo, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ending = threading.Lock()
        self._lifeline: int | None
        command = [sys.executable, "-P", "-u", str(_WORKER)]
        ours, theirs = socket.socketpair()
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
                pass_fds=(read_end,),
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
        self._channel = FrameSocket(ours, program.max_reply_bytes)
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

    def notify(self, body: bytes) -> int:
        """Queue a message without reply, and return its id."""
        self._channel.queue(self._num_frames, body)
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
        self._channel.flush()
        wanted = [(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._channel.unsent else 0))]
        return wanted if self._output_ended else [*wanted, (self._output.fileno(), select.POLLIN)]

    def exchange(self) -> list[tuple[int, bytes]]:
        """Read output and replies; return the id and body of each reply."""
        self._read_output()
        replies = []
        for id, body in self._channel.take():
            if id in self._cancelled:
                self._cancelled.discard(id)
            elif self.pending.pop(id, None) is None:
                self._channel.fault = f"replied to request {id}, which is not pending"
            else:
                replies.append((id, body))
        if replies and not self.program.overlapping:
            self.restart_timeouts()
        return replies

    def failure(self, now_s: float) -> str:
        """Return why it cannot go on, empty if it can: a fault, its end, or an overdue reply."""
        if self._channel.fault:
            return self._channel.fault
        if self._channel.ended:
            return self._exit_reason()
        late = [one.timeout_s for one in self._begun() if one.deadline_s <= now_s]
        return f"took longer than {late[0]:g} s" if late else ""

    def _exit_reason(self) -> str:
        """Return the exit reason and the end of the output of a child that has closed its socket."""
        try:
            code = self._popen.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            how = "closed its socket"
        else:
            while self._read_output():
                pass
            how = f"ended with exit code {code}"
            if code < 0:
                how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        last = self._tail.strip()
        return f"its process {how}" + (
            f" after printing: {plain_text(last, _TAIL_CHARACTERS)}" if last else " without a word"
        )

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
