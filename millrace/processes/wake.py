"""Ends the `select.poll` of another thread. No torch."""

from __future__ import annotations

import socket
from contextlib import suppress


class Wake:
    """A descriptor that becomes readable when any thread calls `set`, until `clear`."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._receiver.fileno()

    def set(self) -> None:
        """Make it readable; a full socket is readable already."""
        with suppress(BlockingIOError):
            self._sender.send(b".")

    def clear(self) -> None:
        """Make it unreadable again."""
        with suppress(BlockingIOError):
            self._receiver.recv(1 << 16)

    def close(self) -> None:
        """Close both ends."""
        self._receiver.close()
        self._sender.close()
