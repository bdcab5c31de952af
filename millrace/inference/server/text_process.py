"""Client of the child process that renders chat templates and tokenizes (`text_worker`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from millrace.inference.server.http_errors import ApiError
from millrace.inference.server.text_worker import (
    DIED,
    DONE,
    FIELDS,
    MEMORY_BYTES,
    READY,
    REPLY,
    REQUEST,
    allowed_s,
)
from millrace.keeper import keeper_command

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("text_worker.py")
# CPU time of a short request; see `text_worker.allowed_s`.
CPU_S = 2.0
# Timeout for loading the tokenizer.
START_S = 120.0
# Timeout of a reply: a worker that has neither replied nor died by then is stuck.
ANSWER_S = 60.0
# Timeout of a request in the queue.
TURN_S = 30.0
KILL_S = 10.0
MAX_TAIL_BYTES = 1000
# Errors of an exchange with a child that has exited, closed its socket or is stuck.
_LOST = (OSError, EOFError, TimeoutError)
# Of the server's environment the child gets these alone: no tokens and keys of other services.
KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


class TextService(Protocol):
    """Interface for rendering, tokenizing and detokenizing: `TextProcess`, or a fake in tests."""

    async def start(self) -> None:
        """Start loading, without waiting."""

    async def ask(self, do: str, value: Any) -> bytes:
        """Return the JSON of `text_worker.Texts.answer`.

        Raises:
            ApiError: 400 if the text is rejected or takes too long; 503 if the process is busy or cannot
                start.
        """

    async def close(self) -> None:
        """Stop the process."""


class TextProcess:
    """A child process that renders, tokenizes and detokenizes, one request after another.

    Without a `folder`, the tokenizer is saved for the child to load. `cpu_s` is the CPU limit of a short
    request, in seconds.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path | None,
        *,
        template: str,
        max_length: int,
        cpu_s: float = CPU_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._options: dict[str, Any] = {"template": template, "max_length": max_length, "cpu_s": cpu_s}
        self._turn = asyncio.Lock()
        self._child: _Child | None = None
        self._starting: asyncio.Task[None] | None = None
        self._number = 0

    async def start(self) -> None:
        """Start loading the tokenizer in the child; the first request waits for it."""
        self._starting = asyncio.create_task(self._start_early())

    async def close(self) -> None:
        """Kill the child."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        self._discard()

    async def ask(self, do: str, value: Any) -> bytes:
        """See `TextService`."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            raise ApiError(
                503, f"the tokenizer is loading or has been busy for {TURN_S:g} s; ask again"
            ) from None
        try:
            return await self._exchange(do, value)
        except BaseException:
            # On cancellation too: an unread reply would be taken for the reply to the next request.
            if self._child is not None and self._child.is_waiting:
                self._discard()
            raise
        finally:
            self._turn.release()

    async def _exchange(self, do: str, value: Any) -> bytes:
        child = await self._ready()
        self._number = self._number % 0xFFFFFFFF + 1
        request = _encode({"do": do, "value": value})
        try:
            async with asyncio.timeout(ANSWER_S):
                kind, reply = await child.exchange(self._number, request)
        except _LOST as error:
            self._child = None
            how = f"has not answered for {ANSWER_S:g} s" if isinstance(error, TimeoutError) else "has ended"
            _LOG.warning("the process that tokenizes %s and is started again%s", how, child.kill())
            raise ApiError(503, f"the process that tokenizes {how}; ask again") from None
        if kind == DONE:
            return reply
        if kind == DIED:
            raise _died(json.loads(reply), FIELDS[do], allowed_s(self._options["cpu_s"], len(request)))
        refusal = json.loads(reply)
        raise ApiError(400, refusal["message"], param=refusal["param"])

    async def _start_early(self) -> None:
        async with self._turn:
            # The first request tries again and reports the failure.
            with contextlib.suppress(ApiError):
                await self._ready()

    async def _ready(self) -> _Child:
        if self._child is not None:
            return self._child
        child = _Child()
        try:
            with self._files() as folder:
                hello = {"path": sys.path, "folder": str(folder.absolute()), **self._options}
                async with asyncio.timeout(START_S):
                    kind, reply = await child.exchange(0, _encode(hello))
        except _LOST as error:
            how = (
                f"was not ready after {START_S:g} s"
                if isinstance(error, TimeoutError)
                else f"failed: {error}"
            )
            raise _not_started(f"{how}{child.kill()}") from None
        except BaseException:
            child.kill()
            raise
        if kind != READY:
            child.kill()
            raise _not_started(json.loads(reply))
        self._child = child
        return child

    @contextlib.contextmanager
    def _files(self) -> Iterator[Path]:
        if self._folder is not None:
            yield self._folder
            return
        with tempfile.TemporaryDirectory(prefix="millrace-tokenizer-") as folder:
            self._tokenizer.save_pretrained(folder)
            yield Path(folder)

    def _discard(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _not_started(why: str) -> ApiError:
    """The error for the client. The reason, which has paths of the server, goes to the log only."""
    _LOG.warning("the process that tokenizes did not start: %s", why)
    return ApiError(503, "the tokenizer process did not start; see the server's log")


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _died(code: int, field: str | None, limit_s: float) -> ApiError:
    if code == -signal.SIGPROF:
        return ApiError(
            400,
            f"the text took more than {limit_s:.3g} s to render and tokenize and was given up; send less, or "
            "mend the model's chat template",
            param=field,
        )
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return ApiError(
        400,
        f"the process that tokenizes ended with {how} at this text; send less (it has "
        f"{MEMORY_BYTES >> 30} GiB of memory)",
        param=field,
    )


class _Child:
    """The child process and its socket; its keeper process kills it and its workers if the server exits."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        self.is_waiting = False
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        read_end, self._lifeline = os.pipe()
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    keeper_command(read_end, [sys.executable, "-P", "-u", str(_WORKER)]),
                    stdin=theirs.fileno(),
                    stdout=self._output.fileno(),
                    stderr=self._output.fileno(),
                    pass_fds=(read_end,),
                    env=environment | OFFLINE,
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._lifeline)
            self._ours.close()
            self._output.close()
            raise
        finally:
            os.close(read_end)

    async def exchange(self, number: int, request: bytes) -> tuple[int, bytes]:
        """Send a request and read its reply; EOFError or OSError if the process has ended."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._ours)
        reader, writer = self._streams
        self.is_waiting = True
        writer.write(REQUEST.pack(len(request), number))
        writer.write(request)
        await writer.drain()
        length, replied, kind = REPLY.unpack(await reader.readexactly(REPLY.size))
        if replied != number:
            raise EOFError(f"reply {replied} instead of {number}")
        reply = await reader.readexactly(length)
        self.is_waiting = False
        return kind, reply

    def kill(self) -> str:
        """Kill the child and its workers; return the tail of its output, in brackets, at the first call."""
        if self._output.closed:
            return ""
        os.close(self._lifeline)
        self._popen.wait(KILL_S)
        if self._streams is None:
            self._ours.close()
        else:
            self._streams[1].transport.abort()
        with self._output as output:
            size = os.fstat(output.fileno()).st_size
            data = os.pread(output.fileno(), MAX_TAIL_BYTES, max(0, size - MAX_TAIL_BYTES))
        tail = " ".join(data.decode("utf-8", "replace").split())
        return f" ({tail})" if tail else ""
