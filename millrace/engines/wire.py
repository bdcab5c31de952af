"""Frames over a socket between a backend and an engine process: metadata as JSON, numbers as raw arrays.

    4 bytes   length of the header, little-endian
    8 bytes   length of the body
    header    JSON: {"kind": ..., "metadata": {...}, "arrays": [[name, dtype, shape], ...]}
    body      the concatenated arrays, row-major

Received data is neither unpickled nor executed, and an invalid frame raises an error that names the fault.
Neither end blocks here: a send buffer keeps what the socket does not accept yet. No torch.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from millrace.rollout.serialization import Arrays, Fields

# Frame kinds that a backend sends, and those that it receives.
COMMANDS = ("restart_turns", "submit", "blocking_submit", "abort", "update_weights")
REPORTS = ("ready", "completed", "weights_loaded", "refused", "heartbeat")
LENGTHS = struct.Struct("<IQ")
# Upper bounds; a larger length means a corrupt header.
MAX_HEADER_BYTES = 1 << 28
MAX_BODY_BYTES = 1 << 34
DTYPES = ("uint8", "int16", "int32", "int64", "float32")
READ_BYTES = 1 << 18

Unpacked = TypeVar("Unpacked")


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


class Channel:
    """One end of a non-blocking connection.

    Attributes:
        ended: whether the peer has closed; all data before that has been received.
    """

    def __init__(self, connection: socket.socket, kinds: Collection[str]) -> None:
        """Take over a stream socket; `kinds` are the frame kinds that this end accepts."""
        connection.setblocking(False)
        self.ended = False
        self._socket, self._kinds = connection, kinds
        self._incoming, self._outgoing = bytearray(), bytearray()
        # Frames are serialized one by one: weights are large.
        self._unsent: deque[tuple[str, Mapping[str, Any], Mapping[str, np.ndarray]]] = deque()

    @property
    def unsent(self) -> bool:
        """Whether unsent data is left; if so, call `flush` when the socket is writable."""
        return bool(self._unsent or self._outgoing)

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select` and `poll`."""
        return self._socket.fileno()

    def send(
        self,
        kind: str,
        metadata: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Queue a frame and send what fits; its arrays must stay unchanged until the peer has replied."""
        self._unsent.append((kind, metadata or {}, arrays or {}))
        self.flush()

    def _serialize(self, kind: str, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        entries = [[name, str(array.dtype), list(array.shape)] for name, array in contiguous.items()]
        header = json.dumps({"kind": kind, "metadata": metadata, "arrays": entries}).encode()
        num_bytes = sum(array.nbytes for array in contiguous.values())
        self._outgoing += LENGTHS.pack(len(header), num_bytes) + header
        for array in contiguous.values():
            self._outgoing += array.tobytes()

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        while self.unsent:
            if not self._outgoing:
                self._serialize(*self._unsent.popleft())
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):  # `take` detects the closed peer
                self._outgoing.clear()
                self._unsent.clear()

    def take(self) -> list[Frame]:
        """Return the complete frames received so far.

        Raises:
            FrameError: the data is no valid frame, or its kind is not accepted here.
        """
        while not self.ended:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self._incoming += data
            self.ended = not data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _next(self) -> Frame | None:
        data = self._incoming
        if len(data) < LENGTHS.size:
            return None
        header_bytes, body_bytes = LENGTHS.unpack_from(data)
        for what, length, most in (
            ("header", header_bytes, MAX_HEADER_BYTES),
            ("body", body_bytes, MAX_BODY_BYTES),
        ):
            if length > most:
                raise FrameError(f"a frame's {what} was announced with {length} bytes; at most {most} come")
        start = LENGTHS.size + header_bytes
        if len(data) < start + body_bytes:
            return None
        frame = self._parse(bytes(data[LENGTHS.size : start]), data[start : start + body_bytes])
        del data[: start + body_bytes]
        return frame

    def _parse(self, header: bytes, body: bytearray) -> Frame:
        try:
            parsed = json.loads(header)
            kind, metadata = parsed["kind"], parsed["metadata"]
            entries = [(name, dtype, [int(n) for n in shape]) for name, dtype, shape in parsed["arrays"]]
        except (ValueError, KeyError, TypeError) as error:
            raise FrameError(f"a frame's header cannot be read: {type(error).__name__}: {error}") from None
        if kind not in self._kinds:
            raise FrameError(f"a frame of kind {kind!r} came; here only {', '.join(sorted(self._kinds))} do")
        arrays = {}
        start = 0
        for name, dtype, shape in entries:
            if dtype not in DTYPES:
                raise FrameError(f"array {name} of frame {kind} is {dtype}; it may be {', '.join(DTYPES)}")
            stop = start + np.dtype(dtype).itemsize * math.prod(shape)
            if min(shape, default=0) < 0 or stop > len(body):
                raise FrameError(
                    f"array {name} of frame {kind} has shape {shape}, for which its {len(body)} bytes do not "
                    "suffice"
                )
            arrays[name] = np.frombuffer(body, dtype, math.prod(shape), start).reshape(shape)
            start = stop
        if start != len(body):
            raise FrameError(f"frame {kind} has {len(body) - start} bytes that belong to no array")
        return Frame(kind, metadata, arrays)
