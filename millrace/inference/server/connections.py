"""One client's connection: one of a bounded number, with a deadline for what the client must do next."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from millrace.inference.server.errors import ApiError
from millrace.inference.server.limits import Limits

# More than one client has use for; each takes some 20 KiB.
MAX_CONNECTIONS = 4096
# Descriptors for everything else the server may open: weights, the process that tokenizes, the event loop.
SPARE_DESCRIPTORS = 20
MIN_CONNECTIONS = 8


def connection_bounds(soft_limit: int, num_open: int) -> tuple[int, int]:
    """How many connections the open file descriptors allow, and how many are accepted at a time.

    Those that are accepted at a time are open before the surplus can be closed.

    Args:
        soft_limit: descriptors that this process may have (`ulimit -n`).
        num_open: that it has already.

    Raises:
        ValueError: too few are left.
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
    """How many descriptors this process may have, and has."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return soft, len(os.listdir("/dev/fd"))


class Connection(H11Protocol):
    """uvicorn's connection, whose client cannot keep it for nothing.

    `check`, called twice a second, closes it where the client sent no request in time, or does not take its
    answer. Beyond the most connections, the one that waited longest for a request is closed: first one that
    never sent any. So clients that send nothing do not keep others out.
    """

    def __init__(
        self, *, limits: Limits, max_connections: int, clock: Callable[[], float], **uvicorns: Any
    ) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._max_connections = max_connections
        self._clock = clock
        # Since when a request is waited for.
        self._since_s = clock()
        # Since its first byte, while its headers are not complete.
        self._heard_s: float | None = None
        # Since when the client does not take what was written.
        self._blocked_s: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the client has sent no request, or has the answer to its last one."""
        return self._last is None or self._last.response_complete

    @property
    def _last(self) -> RequestResponseCycle | None:
        """The last request and its answer. uvicorn declares it as always there."""
        return self.cycle

    def connection_made(self, transport: Any) -> None:
        """Take a place, if need be that of another one."""
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
        """Note when a request begins."""
        if self.is_waiting and self._heard_s is None:
            self._heard_s = self._clock()
        super().data_received(data)
        if not self.is_waiting:
            self._heard_s = None

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._since_s, self._heard_s = self._clock(), None
        super().on_response_complete()
        # `check` does it.
        self._unset_keepalive_if_required()

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it is made."""
        self._blocked_s = self._clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._blocked_s = None
        super().resume_writing()

    def check(self) -> None:
        """Close the connection if the client is late."""
        now_s, limits = self._clock(), self._limits
        if self._blocked_s is None and self.transport.is_closing():
            self._blocked_s = now_s  # it closes once what was written is taken
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
        """Answer what is no HTTP, as JSON."""
        self._refuse(
            ApiError(400, "the request is not HTTP/1.1; its first line, a header or a chunk is malformed")
        )

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, where no answer has begun, and close."""
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
