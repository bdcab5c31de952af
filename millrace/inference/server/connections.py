"""Client connections: a bounded number, each with deadlines for headers, idle time and writes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from millrace.inference.server.http_errors import ApiError
from millrace.inference.server.limits import Limits

# More than one client needs; each takes some 20 KiB.
MAX_CONNECTIONS = 4096
# Descriptors for everything else the server may open: weights, the process that tokenizes, the event loop.
SPARE_DESCRIPTORS = 20
MIN_CONNECTIONS = 8


def connection_bounds(soft_limit: int, num_open: int) -> tuple[int, int]:
    """Return the maximal number of connections and the accept backlog for a limit of open files.

    A whole backlog can be accepted before surplus connections are closed, so it counts against the limit.
    `soft_limit` is that of file descriptors (`ulimit -n`), `num_open` are open already; too few left are a
    ValueError.
    """
    backlog = max(8, min(1024, soft_limit // 8))
    room = soft_limit - num_open - SPARE_DESCRIPTORS - backlog
    if room < MIN_CONNECTIONS:
        raise ValueError(
            f"the limit of open files is {soft_limit}, which leaves the server {max(0, room)} connections; "
            f"raise it to {soft_limit + 256} with ulimit -n"
        )
    return min(MAX_CONNECTIONS, room), backlog


def open_descriptors() -> tuple[int, int]:
    """Return the soft limit of file descriptors, and the number of open ones."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return soft, len(os.listdir("/dev/fd"))


class Connection(H11Protocol):
    """uvicorn's connection with deadlines for the client.

    `check`, called twice a second, closes it if the client sends no request in time or does not read its
    response. Above the maximal number of connections, the longest idle one is closed; connections without any
    request go first. So idle clients do not block others.
    """

    def __init__(
        self, *, limits: Limits, max_connections: int, clock: Callable[[], float], **uvicorns: Any
    ) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._max_connections = max_connections
        self._clock = clock
        # Time at which the wait for a request began.
        self._since_s = clock()
        # Time of the request's first byte, while its headers are incomplete.
        self._heard_s: float | None = None
        # Time since which the client reads nothing of the response.
        self._blocked_s: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is in progress."""
        return self._last is None or self._last.response_complete

    @property
    def _last(self) -> RequestResponseCycle | None:
        """The last request and its response, None before the first; uvicorn's type lacks the None."""
        return self.cycle

    def connection_made(self, transport: Any) -> None:
        """Register the connection; above the maximum, close the longest idle one."""
        super().connection_made(transport)
        if len(self.connections) <= self._max_connections:
            return
        mine = [cast(Connection, one) for one in self.connections]
        there = [one for one in mine if not one.transport.is_closing()]
        if len(there) > self._max_connections:
            idle = [one for one in there if one.is_waiting and one is not self]
            longest = min(idle, key=lambda one: (one._last is not None, one._since_s), default=self)
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Record the time of a request's first byte."""
        if self.is_waiting and self._heard_s is None:
            self._heard_s = self._clock()
        super().data_received(data)
        if not self.is_waiting:
            self._heard_s = None

    def on_response_complete(self) -> None:
        """Start the idle deadline for the next request."""
        self._since_s, self._heard_s = self._clock(), None
        super().on_response_complete()
        # `check` closes idle connections instead of uvicorn's timer.
        self._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        """Start the write deadline: the client reads more slowly than the server writes."""
        self._blocked_s = self._clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop the write deadline: the client has read most of the response."""
        self._blocked_s = None
        super().resume_writing()

    def check(self) -> None:
        """Close the connection if a deadline has passed."""
        now_s, limits = self._clock(), self._limits
        if self._blocked_s is None and self.transport.is_closing():
            self._blocked_s = now_s  # it closes once the client has read the rest
        if self._blocked_s is not None:
            if now_s - self._blocked_s >= limits.write_timeout_s:
                self.transport.abort()
        elif self.is_waiting and self._heard_s is not None:
            if now_s - self._heard_s >= limits.header_timeout_s:
                sentence = f"the request's headers did not arrive within {limits.header_timeout_s:g} s"
                self._refuse(ApiError(408, sentence))
        elif self.is_waiting:
            allowed_s = limits.header_timeout_s if self._last is None else limits.idle_timeout_s
            if now_s - self._since_s >= allowed_s:
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Respond to malformed HTTP with a JSON error."""
        self._refuse(
            ApiError(400, "the request is not HTTP/1.1; its first line, a header or a chunk is malformed")
        )

    def _refuse(self, error: ApiError) -> None:
        """Send an error without the application, unless a response has begun, and close."""
        if self._last is not None:
            self._last.disconnected = True
            self._last.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.response().body
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode("ascii") + bytes(body))
        self.transport.close()
