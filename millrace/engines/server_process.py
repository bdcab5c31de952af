"""An inference server as a child of the worker that uses it, with its last lines of output.

The worker runs under a keeper (`processes.child`), which kills the server with it, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from millrace.engines.http_client import HttpClient, ServerError
from millrace.observability.plain import plain_text

_TAIL_BYTES = 1 << 16
_SHOWN_CHARACTERS = 400
_LOOK_S = 0.1
# As Python prints an exception, after the prefix that vLLM gives the lines of its processes. The first one is
# the cause, which may be far above the last lines.
_ERROR = re.compile(r"^(?:\([^)\n]*\) ERROR [^]\n]*\] )?\w+Error: .*", re.MULTILINE)
_PING_S = 5.0
_END_S = 1.0


class ServerProcess:
    """A server that was started with a command; ServerError if there is no such program.

    Its end is looked for, and not that of its output, which processes that it has left may hold open.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._program, self._tail = command[0], b""
        self._output, theirs = os.pipe()
        os.set_blocking(self._output, False)
        try:
            self._popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._output)
            raise ServerError(
                f"{command[0]} cannot be started ({error.strerror}); correct engine.python"
            ) from None
        finally:
            os.close(theirs)
        asyncio.get_running_loop().add_reader(self._output, self._read)

    async def wait_until_up(self, client: HttpClient) -> None:
        """Wait until the server replies to `/health`; ServerError if it ends first. It has no deadline."""
        while not (reason := await self.end_reason()):
            try:
                await client.get_text("/health", timeout_s=_PING_S)
                return
            except ServerError:
                await asyncio.sleep(_LOOK_S)
        raise ServerError(reason)

    async def ended(self) -> None:
        """Wait for the end of the server, which is a ServerError."""
        while self._popen.poll() is None:
            await asyncio.sleep(_LOOK_S)
        raise ServerError(await self.end_reason())

    async def end_reason(self, *, wait: bool = False) -> str:
        """Return why the server has ended, with its last lines; empty if it runs, with `wait` still."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S if wait else 0):
                while self._popen.poll() is None:
                    await asyncio.sleep(_LOOK_S)
        code = self._popen.poll()
        if code is None:
            return ""
        self._read()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the server that {self._program} ran {how}{self.log_tail()}"

    def kill(self) -> None:
        """Kill the server and its session; the keeper kills what has left that."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        asyncio.get_running_loop().remove_reader(self._output)
        os.close(self._output)

    def log_tail(self) -> str:
        """Return its first error and its last lines as a clause for a message."""
        text = self._tail.decode("utf-8", "replace").strip()
        shown = plain_text(text[-_SHOWN_CHARACTERS:], _SHOWN_CHARACTERS)
        return f"{self.first_error()}; the last it printed: {shown}" if text else ""

    def first_error(self) -> str:
        """Return the first error that it printed as a clause for a message; empty if there is none."""
        found = _ERROR.search(self._tail.decode("utf-8", "replace"))
        return f"; its first error: {plain_text(found[0], _SHOWN_CHARACTERS)}" if found else ""

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._output, _TAIL_BYTES):
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
            asyncio.get_running_loop().remove_reader(self._output)  # nothing holds it open any more
