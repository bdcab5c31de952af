"""Deadlines of a connection, and its place among a bounded number, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import logging

import pytest
import uvicorn
from uvicorn.server import ServerState

from millrace.inference.server.connections import MAX_CONNECTIONS, Connection, connection_bounds
from millrace.inference.server.limits import Limits

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed: str | None = None

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed is not None

    def close(self) -> None:
        self.closed = self.closed or "closed"

    def abort(self) -> None:
        self.closed = "aborted"

    def get_extra_info(self, name: str) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class House:
    """Connections of one server whose application answers when it is told to."""

    def __init__(self, max_connections: int = 2) -> None:
        self.now_s = 100.0
        self.loop = asyncio.new_event_loop()
        self.answer = asyncio.Event()
        self._config = uvicorn.Config(
            self._app, log_config=None, lifespan="off", ws="none", interface="asgi3"
        )
        self._config.load()
        self._state = ServerState()
        self._max_connections = max_connections
        self._made: list[Connection] = []

    async def _app(self, scope, receive, send) -> None:
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self) -> tuple[Connection, Wire]:
        made = Connection(
            limits=Limits(),
            max_connections=self._max_connections,
            clock=lambda: self.now_s,
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=self.loop,
        )
        wire = Wire()
        made.connection_made(wire)
        self._made.append(made)
        return made, wire

    def close(self) -> None:
        for made in self._made:
            made.connection_lost(None)
        self.answer.set()
        self.step()
        self.loop.close()

    def step(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(asyncio.sleep(0))

    def answered(self, connection: Connection) -> None:
        connection.data_received(HEAD)
        self.answer.set()
        self.step()
        assert connection.is_waiting


@pytest.fixture
def house():
    made = House()
    yield made
    made.close()


@pytest.fixture
def heard():
    """What uvicorn logs, also where another test had it configured."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("uvicorn.error").addHandler(handler)
    yield messages
    logging.getLogger("uvicorn.error").removeHandler(handler)


def after(house: House, connection: Connection, seconds: float) -> None:
    house.now_s = 100.0 + seconds
    connection.check()


def test_a_client_that_sends_nothing_is_cut_off(house):
    connection, wire = house.connect()
    after(house, connection, 9.9)
    assert wire.closed is None
    after(house, connection, 10.0)
    assert (wire.closed, wire.sent) == ("closed", b"")


def test_a_client_that_sends_its_headers_byte_by_byte_is_told_and_cut_off(house):
    connection, wire = house.connect()
    house.now_s = 105.0
    for byte in HEAD[:20]:
        connection.data_received(bytes([byte]))
        house.now_s += 0.49
    connection.check()
    assert wire.closed is None
    after(house, connection, 15.0)
    assert wire.closed == "closed"
    head, body = wire.sent.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"the request's headers did not arrive within 10 s" in body
    assert f"Content-Length: {len(body)}".encode() in head


def test_a_connection_may_wait_longer_for_a_further_request(house):
    connection, wire = house.connect()
    house.answered(connection)
    after(house, connection, 29.9)
    assert wire.closed is None
    after(house, connection, 30.0)
    assert wire.closed == "closed"


def test_a_further_request_must_arrive_in_time_once_it_has_begun(house):
    connection, wire = house.connect()
    house.answered(connection)
    house.now_s = 125.0
    connection.data_received(b"G")
    after(house, connection, 34.9)
    assert wire.closed is None
    after(house, connection, 35.0)
    assert wire.closed == "closed"
    assert b"HTTP/1.1 408 " in wire.sent


def test_a_request_that_is_answered_has_no_deadline_here(house):
    connection, wire = house.connect()
    connection.data_received(HEAD)
    after(house, connection, 1e6)
    assert wire.closed is None


def test_a_client_that_does_not_take_its_answer_is_cut_off(house):
    connection, wire = house.connect()
    connection.data_received(HEAD)
    connection.pause_writing()
    after(house, connection, 29.9)
    assert wire.closed is None
    connection.resume_writing()
    after(house, connection, 60.0)
    assert wire.closed is None
    connection.pause_writing()
    after(house, connection, 90.0)
    assert wire.closed == "aborted"


def test_a_close_that_waits_for_the_client_ends_too(house):
    connection, wire = house.connect()
    after(house, connection, 10.0)
    after(house, connection, 11.0)
    after(house, connection, 40.9)
    assert wire.closed == "closed"
    after(house, connection, 41.0)
    assert wire.closed == "aborted"


def test_beyond_the_most_the_one_that_waited_longest_makes_room(house):
    first, first_wire = house.connect()
    house.answered(first)
    house.now_s = 101.0
    _, silent_wire = house.connect()
    house.now_s = 102.0
    # One that never asked goes before one that did, though it has not waited as long.
    _, third_wire = house.connect()
    assert (first_wire.closed, silent_wire.closed, third_wire.closed) == (None, "aborted", None)
    third_wire.abort()
    house.now_s = 103.0
    _, fourth_wire = house.connect()
    assert (first_wire.closed, fourth_wire.closed) == (None, None)


def test_where_all_are_busy_the_new_one_is_refused(house):
    wires = []
    for _ in range(2):
        connection, wire = house.connect()
        connection.data_received(HEAD)
        wires.append(wire)
    _, last = house.connect()
    assert [wire.closed for wire in [*wires, last]] == [None, None, "aborted"]


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"a" * 100_000]
)
def test_what_is_no_http_gets_a_sentence(house, garbage):
    connection, wire = house.connect()
    connection.data_received(garbage)
    assert wire.sent.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert (
        b'"message":"the request is not HTTP/1.1; its first line, a header or a chunk is malformed"'
        in wire.sent
    )
    assert wire.closed == "closed"


def test_a_malformed_chunk_ends_the_request_without_an_error_of_the_application(house, heard):
    connection, wire = house.connect()
    connection.data_received(HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")
    house.step()
    connection.data_received(b"zzz\r\n")
    house.answer.set()
    house.step()
    assert wire.sent.count(b"HTTP/1.1 ") == 1
    assert wire.sent.startswith(b"HTTP/1.1 400 ")
    assert heard == ["Invalid HTTP request received."]


@pytest.mark.parametrize(
    ("soft", "num_open", "expected"),
    [
        (64, 20, (16, 8)),
        (1024, 24, (852, 128)),
        (20_000, 30, (MAX_CONNECTIONS, 1024)),
    ],
)
def test_connections_leave_descriptors_for_the_rest(soft, num_open, expected):
    most, backlog = connection_bounds(soft, num_open)
    assert (most, backlog) == expected
    assert most + backlog + num_open < soft


def test_too_few_descriptors_are_told():
    sentence = (
        "the limit of open files is 40, which leaves the server 0 connections; raise it to 296 with ulimit -n"
    )
    with pytest.raises(ValueError, match=sentence):
        connection_bounds(40, 20)
