"""An HTTP/1.1 server for programs that are not trusted: bounded in sizes, time and connections. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus

import h11

from millrace.environments.agent_protocol import AgentError
from millrace.environments.agent_session import HttpRequest, HttpResponse

MAX_HEADER_BYTES = 64 << 10
MAX_BODY_BYTES = 4 << 20
# A body above the limit is read up to so many times the limit, so that the client receives the error.
_PATIENCE = 8
MAX_CONNECTIONS = 1024
# For the headers, from their first byte; for the body; between requests; for a response that is not read.
HEADER_S, BODY_S, IDLE_S, WRITE_S = 10.0, 30.0, 120.0, 30.0
_READ_BYTES = 1 << 16
Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class AgentServer:
    """Serves a handler, which may take as long as it needs, on loopback or on a Unix socket."""

    def __init__(self, handler: Handler, *, max_connections: int = MAX_CONNECTIONS) -> None:
        self._handler, self._max_connections = handler, max_connections
        self._servers: list[asyncio.Server] = []
        # Whether a request is in progress, by connection, the longest open first.
        self._connections: dict[asyncio.StreamWriter, bool] = {}

    async def listen(self) -> int:
        """Listen on a free port of loopback, and return it."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_READ_BYTES)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def listen_at(self, path: str) -> None:
        """Listen on a Unix socket."""
        self._servers.append(await asyncio.start_unix_server(self._connected, path, limit=_READ_BYTES))

    async def close(self) -> None:
        """Close the sockets and all connections."""
        for server in self._servers:
            server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = False
        if len(self._connections) > self._max_connections:
            # The longest open one without a request makes room; the new one is the last of these.
            idle = next(one for one, is_busy in self._connections.items() if not is_busy)
            self._forget(idle)
        try:
            with suppress(OSError, TimeoutError, h11.ProtocolError):
                await _Connection(reader, writer, self._responded).run()
        finally:
            self._forget(writer)

    def _forget(self, writer: asyncio.StreamWriter) -> None:
        if self._connections.pop(writer, None) is not None:
            writer.close()

    async def _responded(self, request: HttpRequest, writer: asyncio.StreamWriter) -> HttpResponse:
        if writer in self._connections:
            self._connections[writer] = True
        try:
            return await self._handler(request)
        finally:
            if writer in self._connections:
                self._connections[writer] = False


class _Connection:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handler: Callable[[HttpRequest, asyncio.StreamWriter], Awaitable[HttpResponse]],
    ) -> None:
        self._reader, self._writer, self._handler = reader, writer, handler
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def run(self) -> None:
        """Respond to one request after another, until either side closes."""
        while True:
            try:
                request = await self._request()
                if request is None:
                    return
                found = await self._handler(request, self._writer)
            except AgentError as error:
                found = HttpResponse(error.status, error.body())
            except h11.RemoteProtocolError:
                sentence = "the request is not HTTP/1.1: its first line, a header or a chunk is malformed"
                found = HttpResponse(400, AgentError(400, sentence).body())
            await self._send(found)
            if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                return
            self._http.start_next_cycle()

    async def _request(self) -> HttpRequest | None:
        """Read a request; None if the client closes instead."""
        if self._http.trailing_data[0] == b"":
            data = await asyncio.wait_for(self._reader.read(_READ_BYTES), IDLE_S)
            self._http.receive_data(data)
        try:
            async with asyncio.timeout(HEADER_S):
                head = await self._event()
        except TimeoutError:
            raise AgentError(408, f"the headers did not arrive within {HEADER_S:g} s") from None
        if not isinstance(head, h11.Request):
            return None
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                while isinstance(event := await self._event(), h11.Data):
                    size += len(event.data)
                    if size <= MAX_BODY_BYTES:
                        parts.append(bytes(event.data))
                    elif size > _PATIENCE * MAX_BODY_BYTES:
                        break
        except TimeoutError:
            raise AgentError(408, f"the body did not arrive within {BODY_S:g} s") from None
        if size > MAX_BODY_BYTES:
            raise AgentError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        if not isinstance(event, h11.EndOfMessage):
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        target = head.target.decode("latin-1").partition("?")[0]
        return HttpRequest(head.method.decode("latin-1"), target, headers, b"".join(parts))

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                waiting = h11.InformationalResponse(status_code=100, headers=[])
                self._writer.write(self._http.send(waiting) or b"")
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event

    async def _send(self, found: HttpResponse) -> None:
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = [
            ("Content-Type", found.content_type),
            ("Content-Length", str(len(found.body))),
            ("Cache-Control", "no-store"),
        ]
        if self._http.their_state is not h11.DONE:
            headers.append(("Connection", "close"))  # the unread rest would be taken for the next request
        reason = HTTPStatus(found.status).phrase.encode()
        head = h11.Response(status_code=found.status, headers=headers, reason=reason)
        for event in (head, h11.Data(data=found.body), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        await asyncio.wait_for(self._writer.drain(), WRITE_S)
