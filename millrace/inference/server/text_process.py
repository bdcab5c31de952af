"""Client of the child process that renders chat templates and tokenizes (`text_worker`)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from millrace.inference.server.http_errors import ApiError
from millrace.inference.server.text_worker import DIED, DONE, FIELDS, MEMORY_BYTES, allowed_s
from millrace.processes.child import WorkerProgram
from millrace.processes.supervisor import ChildFailed, ChildLost, Supervisor

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

_LOG = logging.getLogger(__name__)
# CPU time of a short request; see `text_worker.allowed_s`.
CPU_S = 2.0
# Timeout for loading the tokenizer.
START_S = 120.0
# Timeout of a reply: a worker that has neither replied nor died by then is stuck.
ANSWER_S = 60.0
# Timeout of a request in the queue.
TURN_S = 30.0
# Token ids of a text of 4 MiB take a tenth.
MAX_REPLY_BYTES = 1 << 28
_NAME = "the process that tokenizes"
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
        # Held while a thread waits for the child.
        self._turn = asyncio.Lock()
        self._children = Supervisor(self._program)
        self._starting: asyncio.Future[bytes] | None = None

    async def start(self) -> None:
        """Start loading the tokenizer in the child; the first request waits for it."""
        await self._turn.acquire()
        self._starting = self._in_thread(b"")

    async def close(self) -> None:
        """Kill the child; a request in progress fails."""
        self._children.end()
        async with self._turn:
            self._children.close()

    async def ask(self, do: str, value: Any) -> bytes:
        """See `TextService`."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            raise ApiError(
                503, f"the tokenizer is loading or has been busy for {TURN_S:g} s; ask again"
            ) from None
        request = json.dumps({"do": do, "value": value}, separators=(",", ":")).encode("ascii")
        exchange = self._in_thread(request)
        try:
            reply = await asyncio.shield(exchange)
        except asyncio.CancelledError:
            self._children.end()  # the request may take long, and the next one would wait for it
            raise
        kind, answer = reply[:1], reply[1:]
        if kind == DONE:
            return answer
        if kind == DIED:
            raise _died(json.loads(answer), FIELDS[do], allowed_s(self._options["cpu_s"], len(request)))
        refusal = json.loads(answer)
        raise ApiError(400, refusal["message"], param=refusal["param"])

    def _in_thread(self, request: bytes) -> asyncio.Future[bytes]:
        """Exchange a request for its reply in a thread, and release the lock once the thread has ended."""
        exchange = asyncio.ensure_future(asyncio.to_thread(self._exchange, request))
        exchange.add_done_callback(self._release)
        return exchange

    def _release(self, exchange: asyncio.Future[bytes]) -> None:
        self._turn.release()
        if not exchange.cancelled():
            exchange.exception()  # retrieved, also if the request was cancelled

    def _exchange(self, request: bytes) -> bytes:
        """Return the reply to a request; without one, wait until the child has started."""
        if self._children.ending:
            self._children.close()
        try:
            child = self._children.children[0] if self._children.children else self._children.start()
            child.restart_timeouts()
            id = child.request(request, ANSWER_S) if request else None
            while id in child.pending or not child.started:
                for event in self._children.wait():
                    if isinstance(event, ChildLost):
                        raise _lost(event)
                    return event.body
        except (ChildFailed, OSError) as error:
            # The reason has paths of the server, so that it goes to the log only; `close` is none.
            if not self._children.ending:
                _LOG.warning("%s", error)
            raise ApiError(503, "the tokenizer process did not start; see the server's log") from None
        return b""

    def _program(self) -> WorkerProgram:
        saved = ""
        if self._folder is None:
            saved = tempfile.mkdtemp(prefix="millrace-tokenizer-")
            self._tokenizer.save_pretrained(saved)
        folder = saved if self._folder is None else str(self._folder.absolute())
        return WorkerProgram(
            name=_NAME,
            entry="millrace.inference.server.text_worker:serve",
            settings={"folder": folder, **self._options},
            path=sys.path,
            environment={name: os.environ[name] for name in KEPT if name in os.environ} | OFFLINE,
            start_s=START_S,
            max_reply_bytes=MAX_REPLY_BYTES,
            remove=saved,
        )


def _lost(event: ChildLost) -> ApiError:
    _LOG.warning("%s is started again: %s", _NAME, event.reason)
    how = f"has not answered for {ANSWER_S:g} s" if event.late else "has ended"
    return ApiError(503, f"{_NAME} {how}; ask again")


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
