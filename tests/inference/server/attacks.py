"""What a hostile client or model does to a server. Each takes a URL and returns what it saw."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

# A chat template that never comes to an end for one message, and one that asks for 10 GB.
LOOPING = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}<{{ messages[0].content }}>"
)
GROWING = (
    "{% if messages[0].content == 'grow' %}{{ 'x' * 10000000000 }}{% endif %}<{{ messages[0].content }}>"
)
PAUSE_S = 0.02
HANG_S = 60.0


def connect(url: str, *, receive_bytes: int | None = None) -> socket.socket:
    """Connect; with `receive_bytes` the system keeps about so many that were not read."""
    place = urlsplit(url)
    wire = socket.socket()
    wire.settimeout(HANG_S)
    if receive_bytes is not None:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    wire.connect((place.hostname, place.port))
    return wire


@contextmanager
def silent_clients(url: str, count: int) -> Iterator[list[socket.socket]]:
    """Connections that send nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(connect(url)) for _ in range(count)]


def read_to_end(wire: socket.socket) -> bytes:
    """What a server still sends, until it closes."""
    answer = b""
    try:
        while more := wire.recv(4096):
            answer += more
    except ConnectionResetError:
        pass
    return answer


def trickle(url: str, begin: bytes = b"", byte: bytes = b"a") -> bytes:
    """Send a beginning, then a byte every 20 ms, until the server closes; what it answered.

    Raises:
        TimeoutError: it has not closed after a minute.
    """
    deadline_s = time.monotonic() + HANG_S
    with connect(url) as wire:
        wire.sendall(begin)
        wire.settimeout(PAUSE_S)
        answer = b""
        while time.monotonic() < deadline_s:
            try:
                wire.sendall(byte)
                more = wire.recv(4096)
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                return answer
            if not more:
                return answer
            answer += more
    raise TimeoutError(f"the server has not closed a connection that sent a byte every {PAUSE_S} s")


def slow_headers(url: str) -> bytes:
    """Headers that never end."""
    return trickle(url, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")


def slow_body(url: str) -> bytes:
    """A body that never ends."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return trickle(url, head + b"Content-Length: 1000000\r\n\r\n{", b" ")
