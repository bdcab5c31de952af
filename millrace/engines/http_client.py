"""HTTP/1.1 client of one server: JSON requests over connections that are kept open. Asyncio, no torch.

Thousands of requests are in flight at once, each for milliseconds, so that a general client would take longer
than a small engine.
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

from millrace.observability.plain import plain_text

MAX_BODY_BYTES = 1 << 28
MAX_HEADER_BYTES = 1 << 16
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

    async def exchange(self, request: bytes) -> tuple[int, bytes, bool]:
        """Send a request; return the status, the body, and whether the connection can be used again.

        Raises:
            OSError, EOFError, ValueError: the connection broke, or the reply is no HTTP.
        """
        self.writer.write(request)
        await self.writer.drain()
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        status = int(first.split(" ", 2)[1])
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = await self._chunks()
        elif "content-length" in headers:
            body = await self._exactly(int(headers["content-length"]))
        else:
            body = await self.reader.read(MAX_BODY_BYTES)
            return status, body, False
        return status, body, headers.get("connection", "").lower() != "close"

    async def _chunks(self) -> bytes:
        parts, size = [], 0
        while length := int((await self.reader.readline()).split(b";")[0], 16):
            size += length
            parts.append((await self._exactly(length + 2, size))[:-2])
        while (await self.reader.readline()).strip():  # trailers
            pass
        return b"".join(parts)

    async def _exactly(self, length: int, total: int = 0) -> bytes:
        if max(length, total) > MAX_BODY_BYTES:
            raise ValueError(f"a body of more than {MAX_BODY_BYTES} bytes")
        return await self.reader.readexactly(length)


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
        lines = [f"Host: {parts.netloc}", "Accept: application/json", "Content-Type: application/json"]
        self._headers = "\r\n".join([*lines, *([f"Authorization: Bearer {token}"] if token else [])])
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
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}\r\nContent-Length: {len(body)}"
        request = f"{head}\r\n\r\n".encode("latin-1") + body
        try:
            async with asyncio.timeout(timeout_s):
                status, reply = await self._send(request)
        except TimeoutError:
            raise ServerError(f"{place} got no whole reply within {timeout_s:g} s") from None
        except (OSError, EOFError) as error:
            reason = str(error) or "the server closed the connection"
            raise ServerError(f"{place} got no reply: {reason}") from None
        except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise ServerError(f"the reply to {place} is no HTTP: {error}") from None
        if status >= 300:
            raise RequestRefused(place, status, *_reason(reply))
        return reply

    async def _send(self, request: bytes) -> tuple[int, bytes]:
        while True:
            connection = await self._connection()
            kept = False
            try:
                status, reply, kept = await connection.exchange(request)
                return status, reply
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                # The server may have closed a kept connection before this request reached it.
                partial = isinstance(error, asyncio.IncompleteReadError) and error.partial
                if partial or not connection.used:
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
            return _Connection(*await asyncio.open_unix_connection(path, limit=MAX_HEADER_BYTES))
        context = ssl.create_default_context() if self._secure else None
        opened = asyncio.open_connection(self._host, self._port, ssl=context, limit=MAX_HEADER_BYTES)
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
