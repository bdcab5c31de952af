"""HTTP/1.1 client of one server: JSON requests over connections that are kept open. Asyncio, no torch.

With 64 requests in flight, httpx takes 4 to 5.6 ms of a processor for each, this takes 0.5 ms.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import h11

from millrace.observability.plain import plain_text

MAX_BODY_BYTES = 1 << 28
MAX_HEADER_BYTES, READ_BYTES = 1 << 16, 1 << 16
# Servers close a connection that was idle for longer (uvicorn: 5 s).
MAX_IDLE_S = 2.0
# Characters of a server's reply in a message.
MAX_SHOWN = 300
UNIX = "unix:"


class ServerError(RuntimeError):
    """A server cannot be used as an engine; the message has its address and the reason."""


class RequestRefused(ServerError):
    """A reply with an error status.

    Attributes:
        status: HTTP status.
        reason: the server's own message.
        code: machine-readable, empty if there is none.
    """

    def __init__(self, place: str, status: int, reason: str, code: str = "") -> None:
        super().__init__(f"{place} replied with status {status}: {reason}")
        self.status, self.reason, self.code = status, reason, code


class _Connection:
    """One connection; `used` says that it has carried a request before."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.used, self.idle_since_s = False, 0.0
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def exchange(self, request: h11.Request, body: bytes) -> tuple[int, bytes, bool]:
        """Send a request; return the status, the body, and whether the connection can be used again.

        Raises:
            OSError, ProtocolError: the connection broke, or the reply is no HTTP.
        """
        events = (request, h11.Data(data=body), h11.EndOfMessage())
        self.writer.write(b"".join(self._http.send(event) or b"" for event in events))
        await self.writer.drain()
        status, parts, size, is_first = 0, list[bytes](), 0, True
        while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                data = await self.reader.read(READ_BYTES)
                if is_first and not data:
                    raise ConnectionResetError("the server closed the connection")
                is_first = False
                self._http.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(event.data)
                if size > MAX_BODY_BYTES:
                    raise h11.RemoteProtocolError(f"a body of more than {MAX_BODY_BYTES} bytes")
        kept = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if kept:
            self._http.start_next_cycle()
        return status, b"".join(parts), kept


class HttpClient:
    """Sends requests to one server. It opens as many connections as requests are in flight.

    `url` is `http://host:port`, `https://...`, or `unix:` and the path of a socket; `token` goes into the
    header `Authorization: Bearer`.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url.rstrip("/")
        parts = urlsplit("http://localhost" if url.startswith(UNIX) else self.url)
        self._secure, self._host, self._path = parts.scheme == "https", parts.hostname or "", parts.path
        self._port = parts.port or (443 if self._secure else 80)
        kind = "application/json"
        self._headers = [("Host", parts.netloc), ("Accept", kind), ("Content-Type", kind)]
        self._headers += [("Authorization", f"Bearer {token}")] if token else []
        self._idle: list[_Connection] = []

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """Return the JSON at a path; errors as in `post`."""
        return _parsed(await self._request("GET", path, b"", timeout_s), f"GET {self.url}{path}")

    async def get_text(self, path: str, *, timeout_s: float) -> str:
        """Return the text at a path; errors as in `post`."""
        return (await self._request("GET", path, b"", timeout_s)).decode("utf-8", "replace")

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Any:
        """Post a JSON object, and return the JSON of the reply; None for an empty one.

        Raises:
            RequestRefused: the status of the reply is an error.
            ServerError: no server answers, the time is over, or the reply is no JSON.
        """
        sent = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        reply = await self._request("POST", path, sent, timeout_s)
        return _parsed(reply, f"POST {self.url}{path}") if reply else None

    async def close(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            self._idle.pop().writer.close()
        await asyncio.sleep(0)  # in which asyncio closes what was closed before, too

    async def _request(self, method: str, path: str, body: bytes, timeout_s: float | None) -> bytes:
        place = f"{method} {self.url}{path}"
        headers = [*self._headers, ("Content-Length", str(len(body)))]
        request = h11.Request(method=method, target=f"{self._path}{path}", headers=headers)
        try:
            async with asyncio.timeout(timeout_s):
                status, reply = await self._send(request, body)
        except TimeoutError:
            raise ServerError(f"{place} got no whole reply within {timeout_s:g} s") from None
        except OSError as error:
            raise ServerError(f"{place} got no reply: {error}") from None
        except h11.ProtocolError as error:
            raise ServerError(f"the reply to {place} is no HTTP: {error}") from None
        if status >= 300:
            raise RequestRefused(place, status, *_reason(reply))
        return reply

    async def _send(self, request: h11.Request, body: bytes) -> tuple[int, bytes]:
        while True:
            connection = await self._connection()
            kept = False
            try:
                status, reply, kept = await connection.exchange(request, body)
                return status, reply
            except ConnectionError:
                # The server may have closed a kept connection before this request reached it.
                if not connection.used:
                    raise
            finally:
                if kept:
                    connection.used, connection.idle_since_s = True, time.monotonic()
                    self._idle.append(connection)
                else:
                    connection.writer.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() < connection.idle_since_s + MAX_IDLE_S and not connection.reader.at_eof():
                return connection
            connection.writer.close()
        if self.url.startswith(UNIX):
            path = self.url.removeprefix(UNIX)
            return _Connection(*await asyncio.open_unix_connection(path, limit=READ_BYTES))
        context = ssl.create_default_context() if self._secure else None
        opened = asyncio.open_connection(self._host, self._port, ssl=context, limit=READ_BYTES)
        return _Connection(*await opened)


def _parsed(reply: bytes, place: str) -> Any:
    try:
        return json.loads(reply)
    except ValueError:
        shown = plain_text(reply.decode("utf-8", "replace"), MAX_SHOWN)
        raise ServerError(f"the reply to {place} is no JSON: {shown!r}") from None


def _reason(reply: bytes) -> tuple[str, str]:
    """Return the message and the code of an error in OpenAI's form, or the reply itself."""
    text = reply.decode("utf-8", "replace")
    message, code = text, ""
    with suppress(ValueError, TypeError, AttributeError):
        found = json.loads(text)
        error = found.get("error", found.get("detail", found))
        message = error if isinstance(error, str) else str(error.get("message", error))
        code = "" if isinstance(error, str) else str(error.get("code", ""))
    return plain_text(message, MAX_SHOWN), code
