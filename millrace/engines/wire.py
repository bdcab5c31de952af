"""Messages between a backend and an engine: metadata as JSON, numbers as raw arrays.

A message is one frame of `processes.worker`, whose body and data `rollout.serialization` encodes: the fields
`kind` and `metadata`, and the arrays. Received data is neither unpickled nor executed, and an invalid message
raises an error that names the fault. No torch.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from millrace.processes.frames import FrameSocket
from millrace.processes.worker import START
from millrace.rollout.serialization import Arrays, Fields, decode, encode

# Frame kinds that a backend sends, and those that it receives.
COMMANDS = ("restart_turns", "submit", "blocking_submit", "abort", "update_weights")
REPORTS = ("ready", "completed", "weights_loaded", "refused", "heartbeat")
# Upper bounds; a larger length means a corrupt header.
MAX_BODY_BYTES = 1 << 28
MAX_DATA_BYTES = 1 << 34

Unpacked = TypeVar("Unpacked")


class HasFileno(Protocol):
    """What `select` takes."""

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        ...


class FrameError(RuntimeError):
    """Received bytes are no valid frame, or the frame's kind is not accepted at this end."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message.

    Attributes:
        kind: message type.
        metadata: JSON-compatible.
        arrays: numeric data by name.
    """

    kind: str
    metadata: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]

    def unpack(self, unpack: Callable[[Fields, Arrays], Unpacked]) -> Unpacked:
        """Return what a function of `rollout.serialization` makes of the metadata and arrays.

        Raises:
            FrameError: metadata and arrays are inconsistent.
        """
        try:
            return unpack(self.metadata, self.arrays)
        except ValueError as error:
            raise FrameError(f"frame {self.kind} does not fit: {error}") from None


class Channel(FrameSocket):
    """One end of a non-blocking connection, over which messages are sent and received."""

    def __init__(self, connection: socket.socket, key: bytes, kinds: Collection[str]) -> None:
        """Take over a stream socket; `kinds` are the frame kinds that this end accepts."""
        super().__init__(connection, key, MAX_BODY_BYTES, MAX_DATA_BYTES)
        self._kinds = kinds

    def send(
        self,
        kind: str,
        metadata: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Queue a frame and send what fits; its arrays must stay unchanged until the peer has replied."""
        self.queue(START, *serialized(kind, metadata or {}, arrays or {}))
        self.flush()

    def wait(self, timeout_s: float | None, also: Sequence[HasFileno] = ()) -> list[Frame]:
        """Wait until something arrives, None without end, and send meanwhile; see `receive`.

        It ends, too, when one of `also` is readable.
        """
        select.select([self, *also], [self] if self.unsent else [], [], timeout_s)
        self.flush()
        return self.receive()

    def receive(self) -> list[Frame]:
        """Return the complete frames received so far.

        Raises:
            FrameError: the data is no valid frame, or its kind is not accepted here.
        """
        frames = [parsed(body, data, self._kinds) for _, body, data in self.take()]
        if self.fault:
            raise FrameError(self.fault)
        return frames


def serialized(
    kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[bytes, list[memoryview]]:
    """Serialize a message as a frame's body and data."""
    return encode({"kind": kind, "metadata": metadata}, arrays)


def parsed(body: bytes, data: bytearray, kinds: Collection[str]) -> Frame:
    """Parse a frame's body and data; the arrays share the memory of the data.

    Raises:
        FrameError: they are no valid message, or its kind is none of `kinds`.
    """
    try:
        fields, arrays = decode(body, data)
        kind, metadata = fields["kind"], fields["metadata"]
    except ValueError as error:
        raise FrameError(f"a frame cannot be decoded: {error}") from None
    except KeyError as error:
        raise FrameError(f"a frame has no field {error}") from None
    if kind not in kinds:
        raise FrameError(f"a frame of kind {kind!r} came; here only {', '.join(sorted(kinds))} do")
    return Frame(kind, metadata, arrays)
