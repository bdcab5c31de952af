"""Frames over a socket between a runtime and an engine process: metadata as JSON, numbers as raw arrays.

    4 bytes   length of the header, little-endian
    8 bytes   length of the body
    header    JSON: {"kind": ..., "note": {...}, "arrays": [[name, dtype, shape], ...]}
    body      the concatenated arrays, row-major

Received data is neither unpickled nor executed, and an invalid frame raises an error that names the fault.
Neither end blocks here: a send buffer keeps what the socket does not accept yet. No torch.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import numpy as np

from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import from_columns, to_columns
from millrace.types import Completion, SamplingParams

# Frame kinds that a runtime sends, and those that it receives.
ORDERS = ("begin", "submit", "abort", "load")
REPORTS = ("ready", "drawn", "loaded", "refused", "beat")
LENGTHS = struct.Struct("<IQ")
# Upper bounds; a larger length means a corrupt header.
MAX_HEADER_BYTES = 1 << 28
MAX_BODY_BYTES = 1 << 34
DTYPES = ("uint8", "int16", "int32", "int64", "float32")
READ_BYTES = 1 << 18
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


class FrameError(RuntimeError):
    """Received bytes are no valid frame, or the frame's kind is not accepted at this end."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One message.

    Attributes:
        kind: message type.
        note: JSON-compatible metadata.
        arrays: numeric data by name.
    """

    kind: str
    note: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class Channel:
    """One end of a non-blocking connection.

    Attributes:
        ended: whether the peer has closed; all data before that has been received.
    """

    def __init__(self, end: socket.socket, kinds: Collection[str]) -> None:
        """Wrap a stream socket, which this owns from now on.

        Args:
            end: the socket.
            kinds: frame kinds that this end accepts.
        """
        end.setblocking(False)
        self.ended = False
        self._end, self._kinds = end, kinds
        self._incoming, self._outgoing = bytearray(), bytearray()

    @property
    def unsent(self) -> bool:
        """Whether unsent data is left; if so, call `flush` when the socket is writable."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select` and `poll`."""
        return self._end.fileno()

    def put(
        self,
        kind: str,
        note: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Queue a frame, and send as much as the socket accepts now.

        Args:
            kind: message type.
            note: JSON-compatible metadata.
            arrays: numeric data by name.
        """
        self._add(kind, note, arrays)
        self.flush()

    def _add(
        self, kind: str, note: Mapping[str, Any] | None, arrays: Mapping[str, np.ndarray] | None
    ) -> None:
        given = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        told = [[name, str(array.dtype), list(array.shape)] for name, array in given.items()]
        header = json.dumps({"kind": kind, "note": note or {}, "arrays": told}).encode()
        num_bytes = sum(array.nbytes for array in given.values())
        self._outgoing += LENGTHS.pack(len(header), num_bytes) + header
        for array in given.values():
            self._outgoing += array.tobytes()

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        while self._outgoing:
            try:
                del self._outgoing[: self._end.send(self._outgoing)]
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):  # `take` detects the closed peer
                self._outgoing.clear()

    def take(self) -> list[Frame]:
        """Return the complete frames received so far.

        Raises:
            FrameError: the data is no valid frame, or its kind is not accepted here.
        """
        while not self.ended:
            try:
                data = self._end.recv(READ_BYTES)
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
        self._end.close()

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
        begin = LENGTHS.size + header_bytes
        if len(data) < begin + body_bytes:
            return None
        frame = self._read(bytes(data[LENGTHS.size : begin]), data[begin : begin + body_bytes])
        del data[: begin + body_bytes]
        return frame

    def _read(self, header: bytes, body: bytearray) -> Frame:
        try:
            said = json.loads(header)
            kind, note = said["kind"], said["note"]
            told = [(name, word, [int(n) for n in shape]) for name, word, shape in said["arrays"]]
        except (ValueError, KeyError, TypeError) as error:
            raise FrameError(f"a frame's header cannot be read: {type(error).__name__}: {error}") from None
        if kind not in self._kinds:
            raise FrameError(f"a frame of kind {kind!r} came; here only {', '.join(sorted(self._kinds))} do")
        arrays = {}
        begin = 0
        for name, word, shape in told:
            if word not in DTYPES:
                raise FrameError(f"array {name} of frame {kind} is {word}; it may be {', '.join(DTYPES)}")
            end = begin + np.dtype(word).itemsize * math.prod(shape)
            if min(shape, default=0) < 0 or end > len(body):
                raise FrameError(
                    f"array {name} of frame {kind} has shape {shape}, for which its {len(body)} bytes do not "
                    "suffice"
                )
            arrays[name] = np.frombuffer(body, word, math.prod(shape), begin).reshape(shape)
            begin = end
        if begin != len(body):
            raise FrameError(f"frame {kind} has {len(body) - begin} bytes that belong to no array")
        return Frame(kind, note, arrays)


def draws_as_frame(draws: Sequence[GenerateRequest]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Encode requests as a frame's note and arrays; consecutive requests with one prompt share its tokens."""
    groups = [(prompt, list(siblings)) for prompt, siblings in groupby(draws, lambda draw: draw.prompt)]
    told = [
        {
            "num_tokens": len(prompt),
            "draws": [(draw.id, _given(draw.params), draw.drawn is not None) for draw in siblings],
        }
        for prompt, siblings in groups
    ]
    tokens = [token for prompt, _ in groups for token in prompt]
    begun = [draw.drawn for draw in draws if draw.drawn is not None]
    words, columns = to_columns(begun) if begun else ([], {})
    return {"prompts": told, "drawn": words}, {"tokens": np.array(tokens, np.int64), **columns}


def draws_of(frame: Frame) -> list[list[GenerateRequest]]:
    """Decode the requests of `draws_as_frame`, grouped by prompt."""
    groups = []
    begin = 0
    columns = {name: array for name, array in frame.arrays.items() if name != "tokens"}
    drawn = iter(from_columns(frame.note["drawn"], columns))
    for told in frame.note["prompts"]:
        end = begin + told["num_tokens"]
        prompt = tuple(frame.arrays["tokens"][begin:end].tolist())
        groups.append(
            [
                GenerateRequest(id, prompt, SamplingParams(**_tuples(params)), next(drawn) if begun else None)
                for id, params, begun in told["draws"]
            ]
        )
        begin = end
    return groups


def drawn_as_frame(
    drawn: Sequence[tuple[str, int, int, Completion]],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Encode finished requests as a frame's note and arrays.

    Args:
        drawn: (id, engine step of the start, engine step of the end, completion) of each request.
    """
    words, columns = to_columns([completion for *_, completion in drawn])
    return {"draws": [(id, began, ended) for id, began, ended, _ in drawn], "words": words}, columns


def drawn_of(frame: Frame) -> list[tuple[str, int, int, Completion]]:
    """Decode the finished requests of `drawn_as_frame`.

    Raises:
        FrameError: note and arrays are inconsistent.
    """
    try:
        completions = from_columns(frame.note["words"], frame.arrays)
    except ValueError as error:
        raise FrameError(f"frame {frame.kind} does not fit: {error}") from None
    return [(*draw, completion) for draw, completion in zip(frame.note["draws"], completions, strict=True)]


def _given(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    return {name: value for name, default in DEFAULTS.items() if (value := getattr(params, name)) != default}


def _tuples(value: Any) -> Any:
    """Convert lists from JSON back to tuples."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
