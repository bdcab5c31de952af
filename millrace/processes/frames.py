"""A socket of frames that never blocks. `worker` gives the form of a frame."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence
from hmac import compare_digest
from itertools import islice

from millrace.observability.plain import plain_text
from millrace.processes.worker import HEADER, to_header

_READ_BYTES = 1 << 18
# Parts of frames in one system call.
_MAX_PARTS = 256


class FrameSocket:
    """One end of a socket, which never blocks: what the socket does not accept is kept.

    Attributes:
        ended: whether the peer has closed; all its frames have been taken.
        fault: description of bytes that are no frame of the peer; empty if there were none.
    """

    def __init__(
        self, connection: socket.socket, key: bytes, max_body_bytes: int, max_data_bytes: int = 0
    ) -> None:
        connection.setblocking(False)
        self.ended, self.fault = False, ""
        self._socket, self._key = connection, key
        self._max_body_bytes, self._max_data_bytes = max_body_bytes, max_data_bytes
        self._incoming, self._outgoing = bytearray(), deque[memoryview]()

    @property
    def unsent(self) -> bool:
        """Whether `flush` is to be called when the socket is writable."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def queue(self, id: int, body: bytes, data: Sequence[memoryview] = ()) -> None:
        """Queue a frame for `flush`; its data (bytes) is not copied: it must not change until it is sent."""
        header = to_header(self._key, id, body, sum(map(len, data)))
        self._outgoing += [memoryview(header), memoryview(body), *data]

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        while self._outgoing:
            try:
                num_sent = self._socket.sendmsg(islice(self._outgoing, _MAX_PARTS))
            except BlockingIOError:
                return
            except OSError:  # the connection has ended, which `take` detects
                self._outgoing.clear()
                return
            while self._outgoing and num_sent >= len(self._outgoing[0]):
                num_sent -= len(self._outgoing.popleft())
            if num_sent:
                self._outgoing[0] = self._outgoing[0][num_sent:]

    def watch(self) -> list[tuple[int, int]]:
        """Send what the socket accepts; return the descriptors and events of `select.poll` to wait for."""
        self.flush()
        return [(self.fileno(), select.POLLIN | (select.POLLOUT if self.unsent else 0))]

    def take(self) -> list[tuple[int, bytes, bytearray]]:
        """Read until a frame is complete or nothing is left; return id, body and data of all that are."""
        frames: list[tuple[int, bytes, bytearray]] = []
        while not (frames or self.ended or self.fault):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:  # it had not read everything, or its machine is not reached any more
                data = b""
            self.ended = not data
            self._incoming += data
            while (frame := self._next()) is not None:
                frames.append(frame)
        return frames

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _next(self) -> tuple[int, bytes, bytearray] | None:
        if len(self._incoming) < HEADER.size:
            return None
        num_body_bytes, id, num_data_bytes, _ = HEADER.unpack_from(self._incoming)
        start = HEADER.size + num_body_bytes
        stop = start + num_data_bytes
        accepted = num_body_bytes <= self._max_body_bytes and num_data_bytes <= self._max_data_bytes
        if accepted and stop > len(self._incoming):
            return None
        body = bytes(self._incoming[HEADER.size : start])
        header = self._incoming[: HEADER.size]
        if not accepted or not compare_digest(header, to_header(self._key, id, body, num_data_bytes)):
            written = plain_text(repr(bytes(self._incoming[:100])), 100)
            self.fault = f"wrote into its socket what is no frame: {written}"
            return None
        data = self._incoming[start:stop]
        del self._incoming[:stop]
        return id, body, data
