"""The parent's side of one reward worker process; all communication is non-blocking."""

from __future__ import annotations

import codecs
import math
import os
import secrets
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from millrace.keeper import keeper_command
from millrace.observability.plain import plain_text
from millrace.rewards.sandbox import Permissions, find_bubblewrap, sandboxed, visible_environment
from millrace.rewards.worker_wire import encode_line, unseal

_WORKER = Path(__file__).with_name("reward_worker.py")
_KILL_TIMEOUT_S = 10.0
# Maximum number of processes of one worker, including those it starts.
_PROCESSES = 256
_TAIL_CHARACTERS = 2000
_ECHO_CHARACTERS = 1 << 20
# Maximum line length of the protocol; the reason in a result has at most a few hundred characters.
_LINE_BYTES = 1 << 16


class RewardWorker:
    """A worker process that scores completions in order, with its in-flight batch.

    Output that the worker prints is kept out of the protocol. Output of a user's function is copied to this
    process's standard error, without control characters and up to 2^20 characters. The selector registers the
    worker's pipes, with this object as data.

    Attributes:
        ended: the worker has closed its pipe, or never started.
        broken: description of a malformed line of the protocol; empty if there was none.
        batch: indices of the in-flight completions, in order.
        deadline: time of the reward's clock by which the next message is due; infinite while idle.
    """

    def __init__(
        self, spec: Mapping[str, Any], permissions: Permissions, selector: selectors.BaseSelector
    ) -> None:
        self.ready = False
        self.ended = False
        self.broken = ""
        self.batch: deque[int] = deque()
        self.deadline = math.inf
        self._selector = selector
        own_function = spec["kind"] == "function"
        self._echo = _ECHO_CHARACTERS if own_function else 0
        self._outgoing = bytearray()
        self._incoming = b""
        self._key, self._num_read = secrets.token_bytes(32), 0
        self._tail = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ending = threading.Lock()
        self._popen, self._lifeline = _start(permissions)
        for pipe in (self._pipe(0), self._pipe(1), self._pipe(2)):
            os.set_blocking(pipe.fileno(), False)
        selector.register(self._pipe(1), selectors.EVENT_READ, self)
        selector.register(self._pipe(2), selectors.EVENT_READ, self)
        # A user's module is looked up from the current folder first; built-in rewards must not import a
        # json.py from there.
        path = [os.getcwd(), *sys.path] if own_function else sys.path
        given = {"spec": dict(spec), "permissions": asdict(permissions)}
        self._send({**given, "path": path, "key": self._key.hex()})

    def ask(self, numbers: Sequence[int], message: Mapping[str, Any]) -> None:
        """Send a batch of completions to score, with their indices in the order of the message."""
        self.batch.extend(numbers)
        self._send(message)

    def exchange(self) -> list[Any]:
        """Write and read without blocking; return the messages that arrived."""
        self._write()
        self._listen()
        data = _read(self._pipe(1)) if not self.ended else None
        if data == b"":
            self.ended = True
            self._forget(self._pipe(1))
        *lines, self._incoming = (self._incoming + (data or b"")).split(b"\n")
        messages = []
        for line in lines if not self.broken else ():
            try:
                messages.append(unseal(self._key, self._num_read, line))
            except ValueError:
                self.broken = f"wrote into the pipe of its verdicts: {plain_text(repr(line), 100)}"
                break
            self._num_read += 1
        if len(self._incoming) > _LINE_BYTES:
            self.broken, self._incoming = self.broken or "wrote a line without end into its pipe", b""
        return messages

    def is_gone(self) -> bool:
        """Return whether the process has exited, even if a process it started keeps its pipes open."""
        if self.ended or self._popen.poll() is not None:
            return True
        # The keeper process may not have noticed the exit yet.
        closed = select.poll()
        closed.register(self._pipe(1), 0)
        return bool(closed.poll(0))

    def exit_reason(self) -> str:
        """Return the exit reason and the end of the output; call it only after the worker closed its pipe."""
        try:
            code: int | None = self._popen.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        self._listen()
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"ended with exit code {code}"
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
        """Kill the process, wait for it and close its pipes."""
        for pipe in (self._pipe(0), self._pipe(1), self._pipe(2)):
            self._forget(pipe)
        self.end()
        try:
            self._popen.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # something stopped or ended the keeper
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(_KILL_TIMEOUT_S)
        self._listen()
        for pipe in (self._pipe(0), self._pipe(1), self._pipe(2)):
            pipe.close()

    def _pipe(self, number: int) -> IO[bytes]:
        pipe = (self._popen.stdin, self._popen.stdout, self._popen.stderr)[number]
        assert pipe is not None
        return pipe

    def _send(self, message: Mapping[str, Any]) -> None:
        self._outgoing += encode_line(message)
        self._write()

    def _write(self) -> None:
        if not self._outgoing:
            return
        pipe = self._pipe(0)
        try:
            del self._outgoing[: os.write(pipe.fileno(), self._outgoing)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the worker has exited; the next read detects it
            self._outgoing.clear()
        if not self._outgoing:
            self._forget(pipe)
        elif pipe not in self._selector.get_map():
            self._selector.register(pipe, selectors.EVENT_WRITE, self)

    def _listen(self) -> None:
        while data := _read(self._pipe(2)):
            text = self._decoder.decode(data)
            self._tail = (self._tail + text)[-_TAIL_CHARACTERS:]
            self._show(text)
        if data == b"":
            self._forget(self._pipe(2))

    def _show(self, text: str) -> None:
        if not self._echo:
            return
        shown, self._echo = text[: self._echo], self._echo - len(text[: self._echo])
        sys.stderr.write("\n".join(plain_text(line, len(line)) for line in shown.split("\n")))
        if not self._echo:
            sys.stderr.write(f"\n(a reward function printed more than {_ECHO_CHARACTERS:,} characters)\n")

    def _forget(self, pipe: IO[bytes]) -> None:
        if pipe in self._selector.get_map():
            self._selector.unregister(pipe)


def _start(permissions: Permissions) -> tuple[subprocess.Popen[bytes], int | None]:
    """Start the worker under its keeper process, which ends it when the returned lifeline pipe is closed.

    Temporary files go to a folder of the worker's own, which the keeper removes.
    """
    temporary = tempfile.mkdtemp(prefix="millrace-reward-")
    permissions = replace(permissions, writable=(*permissions.writable, temporary))
    environment = visible_environment(os.environ, permissions.env_vars) | {"TMPDIR": temporary}
    command = [sys.executable, "-P", "-u", str(_WORKER)]
    bubblewrap = find_bubblewrap()
    if bubblewrap is not None:
        command = sandboxed(bubblewrap, command, permissions)
    read_end, lifeline = os.pipe()
    codes = "own" if bubblewrap is None else "shell"
    try:
        popen = subprocess.Popen(
            keeper_command(read_end, command, remove=temporary, codes=codes, most=_PROCESSES),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(read_end,),
            env=environment,
            start_new_session=True,
        )
    except OSError:
        os.close(lifeline)
        os.rmdir(temporary)
        raise
    finally:
        os.close(read_end)
    return popen, lifeline


def _read(pipe: IO[bytes]) -> bytes | None:
    """Read at most 64 KiB without blocking; empty bytes at the end of file, None if no data is available."""
    try:
        return os.read(pipe.fileno(), 1 << 16)
    except BlockingIOError:
        return None
