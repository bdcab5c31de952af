"""The server for programs: whole requests in, whole responses out, and no client holds it up."""

from __future__ import annotations

import asyncio
import json

import pytest

from millrace.environments import agent_http
from millrace.environments.agent_http import AgentServer
from millrace.environments.agent_protocol import AgentError
from millrace.environments.agent_session import HttpRequest, HttpResponse

pytestmark = pytest.mark.world

GET = b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n"


async def echo(request: HttpRequest) -> HttpResponse:
    if request.path == "/refused":
        raise AgentError(404, "there is nothing")
    found = [request.method, request.path, request.headers.get("x-one", ""), len(request.body)]
    return HttpResponse(200, json.dumps(found).encode())


def exchanged(*parts: bytes, **options) -> bytes:
    """What the server sends for these bytes until it closes."""

    async def exchange() -> bytes:
        server = AgentServer(echo, **options)
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.listen())
        try:
            async with asyncio.timeout(30):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if writer.can_write_eof():
                    writer.write_eof()
                return await reader.read()
        finally:
            writer.close()
            await server.close()

    return asyncio.run(exchange())


def post(body: bytes, path: bytes = b"/a", more: bytes = b"") -> bytes:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nX-One: 1\r\n" + more
    return head + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body


def test_requests_on_one_connection_get_their_responses_in_order():
    found = exchanged(GET, post(b"12345")[:40], post(b"12345")[40:], post(b"1", b"/refused"))
    first, second, third = found.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 OK") and first.endswith(b'["GET", "/a", "", 0]')
    assert second.endswith(b'["POST", "/a", "1", 5]')
    assert third.startswith(b"404 ") and b"there is nothing" in third


def test_a_client_that_asks_whether_to_go_on_is_told_so():
    head, body = post(b"12345", more=b"Expect: 100-continue\r\n").split(b"\r\n\r\n")
    found = exchanged(head + b"\r\n\r\n", body)
    assert found.startswith(b"HTTP/1.1 100 ") and found.endswith(b'["POST", "/a", "1", 5]')


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000, b"400"),
        (post(b"x" * 100, more=b"Content-Length: 7\r\n"), b"400"),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_closed(sent, status):
    found = exchanged(sent)
    assert found.startswith(b"HTTP/1.1 " + status)
    assert b"Connection: close" in found


def test_a_body_that_is_too_large_is_refused():
    found = exchanged(post(b"x" * 5_000_000))
    assert found.startswith(b"HTTP/1.1 413 ")
    assert b"the body has more than 4194304 bytes" in found


def test_headers_and_bodies_that_do_not_arrive_are_given_up(monkeypatch):
    monkeypatch.setattr(agent_http, "HEADER_S", 0.05)
    monkeypatch.setattr(agent_http, "BODY_S", 0.05)

    async def slow(part: bytes) -> bytes:
        server = AgentServer(echo)
        reader, writer = await asyncio.open_connection("127.0.0.1", await server.listen())
        try:
            writer.write(part)
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()
            await server.close()

    assert asyncio.run(slow(GET[:10])).startswith(b"HTTP/1.1 408")
    assert asyncio.run(slow(post(b"12345")[:-2])).startswith(b"HTTP/1.1 408")


def test_idle_connections_make_room_for_new_ones():
    async def crowd() -> tuple[bytes, bytes]:
        server = AgentServer(echo, max_connections=2)
        port = await server.listen()
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        try:
            async with asyncio.timeout(30):
                first = await streams[0][0].read()
                streams[2][1].write(GET)
                return first, await streams[2][0].readuntil(b"]")
        finally:
            for _, writer in streams:
                writer.close()
            await server.close()

    first, last = asyncio.run(crowd())
    assert first == b""
    assert last.startswith(b"HTTP/1.1 200")
