"""One judge process as its parent holds it: no method here waits for the judge."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from millrace.rewards.wire import encode_line

_WORKER = Path(__file__).with_name("worker.py")
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY")
_KILL_TIMEOUT_S = 10.0
_TAIL_CHARACTERS = 2000


class JudgeProcess:
    """A child that judges the answers it is asked about, in order, and what it has not answered yet.

    What a judge prints never reaches the protocol; what a user's own function prints appears on this
    process's standard error.

    Args:
        spec: kind and options of the judge.
        selector: told which pipes to watch, with this object as data.

    Attributes:
        ready: it has started and can judge.
        ended: it has closed its end, or was never able to start.
        batch: numbers of the answers it was asked about and has not judged yet, in order.
        deadline: time of the reward's clock by which it must report again; infinite while nothing is asked.
    """

    def __init__(self, spec: Mapping[str, Any], selector: selectors.BaseSelector) -> None:
        """Start the child; it says `ready` later."""
        self.ready = False
        self.ended = False
        self.batch: deque[int] = deque()
        self.deadline = math.inf
        self._selector = selector
        own_function = spec["kind"] == "function"
        self._echo = own_function
        self._outgoing = bytearray()
        self._incoming = b""
        self._tail = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._popen, self._lifeline = _start(
            dict(os.environ) if own_function else _without_secrets(os.environ)
        )
        for pipe in (self._pipe(0), self._pipe(1), self._pipe(2)):
            os.set_blocking(pipe.fileno(), False)
        selector.register(self._pipe(1), selectors.EVENT_READ, self)
        selector.register(self._pipe(2), selectors.EVENT_READ, self)
        # A user's module is looked up from the current folder first; no other judge may find a json.py there.
        path = [os.getcwd(), *sys.path] if own_function else sys.path
        self._send({"spec": dict(spec), "path": path})

    def ask(self, numbers: Sequence[int], message: Mapping[str, Any]) -> None:
        """Send a batch of answers; `numbers` are theirs, in the same order."""
        self.batch.extend(numbers)
        self._send(message)

    def exchange(self) -> list[Any]:
        """Write and read what the pipes take and hold at this moment; the messages that arrived."""
        self._write()
        self._listen()
        data = _read(self._pipe(1)) if not self.ended else None
        if data == b"":
            self.ended = True
            self._forget(self._pipe(1))
        *lines, self._incoming = (self._incoming + (data or b"")).split(b"\n")
        return [json.loads(line) for line in lines]

    def is_gone(self) -> bool:
        """Whether the process has exited, also where something it left behind keeps its pipes open."""
        return self.ended or self._popen.poll() is not None

    def obituary(self) -> str:
        """How it ended and the last it printed; only after it has closed its end."""
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
        return f"its process {how}" + (f" after printing: {last}" if last else " without a word")

    def end(self) -> None:
        """End the process and every one it started in its group; any thread may."""
        with contextlib.suppress(ProcessLookupError):  # nothing may be left of the group
            os.killpg(self._popen.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End it, and give back what was held."""
        for pipe in (self._pipe(0), self._pipe(1), self._pipe(2)):
            self._forget(pipe)
        self.end()
        self._popen.wait(_KILL_TIMEOUT_S)
        self._listen()
        for pipe in (self._pipe(0), self._pipe(1), self._pipe(2)):
            pipe.close()
        os.close(self._lifeline)

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
        except BrokenPipeError:  # it has ended, which reading from it will say
            self._outgoing.clear()
        if not self._outgoing:
            self._forget(pipe)
        elif pipe not in self._selector.get_map():
            self._selector.register(pipe, selectors.EVENT_WRITE, self)

    def _listen(self) -> None:
        """Take what the judge printed, keep the end of it, and show what a user's function says."""
        while data := _read(self._pipe(2)):
            text = self._decoder.decode(data)
            self._tail = (self._tail + text)[-_TAIL_CHARACTERS:]
            if self._echo:
                sys.stderr.write(text)
        if data == b"":
            self._forget(self._pipe(2))

    def _forget(self, pipe: IO[bytes]) -> None:
        if pipe in self._selector.get_map():
            self._selector.unregister(pipe)


def _start(environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """The child, in a session of its own, and the end of its lifeline that this process keeps."""
    read_end, lifeline = os.pipe()
    try:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-u", str(_WORKER), str(read_end)],
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
        raise
    finally:
        os.close(read_end)
    return popen, lifeline


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if not any(word in name.upper() for word in _SECRETS)
    }


def _read(pipe: IO[bytes]) -> bytes | None:
    """What the pipe holds, at most 64 KiB; nothing at its end, None while it is empty."""
    try:
        return os.read(pipe.fileno(), 1 << 16)
    except BlockingIOError:
        return None
