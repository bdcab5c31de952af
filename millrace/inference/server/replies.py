"""Long-running responses, whole or streamed; a client disconnect aborts their samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millrace.inference.server.http_errors import ApiError, encode
from millrace.inference.server.service import ResponseStream
from millrace.types import Completion

CLIENT_GONE = 499
T = TypeVar("T")


async def completed(samples: ResponseStream, request: Request) -> list[Completion]:
    """Return all completions; on an ApiError (a sample failed, the client left) abort the other samples."""
    try:
        return await _while_there(samples.completions(), request.receive)
    finally:
        await samples.close()


class Streamed(Response):
    """A response streamed line by line; its samples are closed when it ends, fails, or the client leaves."""

    def __init__(self, samples: ResponseStream, lines: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._samples = samples
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the response."""
        try:
            with suppress(_Gone):
                await _while_there(self._send(send), receive)
        finally:
            await self._samples.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._lines) as lines:
            async for line in lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def server_sent_events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Encode chunks as server-sent events; a failure becomes an event too."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield b"data: " + encode(chunk) + b"\n\n"
        except ApiError as error:
            yield b"data: " + encode(error.body()) + b"\n\n"
    yield b"data: [DONE]\n\n"


class _Gone(ApiError):
    """The client disconnected before the response; it is never sent."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client has left")


async def _while_there(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    doing, leaving = asyncio.create_task(work), asyncio.create_task(_leave(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise _Gone
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
