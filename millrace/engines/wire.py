"""Messages between a backend and an engine: metadata as JSON, numbers as raw arrays.

A message is one frame of `processes.worker`. Its body is {"kind": ..., "metadata": {...}, "arrays": [[name,
dtype, shape], ...]} in JSON, its data the concatenated arrays, row-major. Received data is neither unpickled
nor executed, and an invalid message raises an error that names the fault. No torch.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import numpy as np

from millrace.processes.frames import FrameSocket
from millrace.processes.worker import START
from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import from_columns, to_columns
from millrace.types import Completion, SamplingParams

# Frame kinds that a backend sends, and those that it receives.
COMMANDS = ("restart_turns", "submit", "blocking_submit", "abort", "load")
REPORTS = ("ready", "completed", "loaded", "refused", "heartbeat")
# Upper bounds; a larger length means a corrupt header.
MAX_BODY_BYTES = 1 << 28
MAX_DATA_BYTES = 1 << 34
DTYPES = ("uint8", "int16", "int32", "int64", "float32")
DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


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
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    entries = [[name, str(array.dtype), list(array.shape)] for name, array in contiguous.items()]
    body = json.dumps({"kind": kind, "metadata": metadata, "arrays": entries}).encode()
    return body, [array.reshape(-1).view(np.uint8).data for array in contiguous.values()]


def parsed(body: bytes, data: bytearray, kinds: Collection[str]) -> Frame:
    """Parse a frame's body and data; the arrays share the memory of the data.

    Raises:
        FrameError: they are no valid message, or its kind is none of `kinds`.
    """
    try:
        message = json.loads(body)
        kind, metadata = message["kind"], message["metadata"]
        entries = [(name, dtype, [int(n) for n in shape]) for name, dtype, shape in message["arrays"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FrameError(f"a frame's body cannot be read: {type(error).__name__}: {error}") from None
    if kind not in kinds:
        raise FrameError(f"a frame of kind {kind!r} came; here only {', '.join(sorted(kinds))} do")
    arrays = {}
    start = 0
    for name, dtype, shape in entries:
        if dtype not in DTYPES:
            raise FrameError(f"array {name} of frame {kind} is {dtype}; it may be {', '.join(DTYPES)}")
        stop = start + np.dtype(dtype).itemsize * math.prod(shape)
        if min(shape, default=0) < 0 or stop > len(data):
            raise FrameError(
                f"array {name} of frame {kind} has shape {shape}, for which its {len(data)} bytes do not "
                "suffice"
            )
        arrays[name] = np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)
        start = stop
    if start != len(data):
        raise FrameError(f"frame {kind} has {len(data) - start} bytes that belong to no array")
    return Frame(kind, metadata, arrays)


def requests_to_frame(requests: Sequence[GenerateRequest]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Encode requests as a frame's metadata and arrays; neighbours with one prompt share its tokens."""
    groups = [(prompt, list(group)) for prompt, group in groupby(requests, lambda one: one.prompt)]
    entries = [
        {
            "num_tokens": len(prompt),
            "requests": [
                (one.id, _changed_fields(one.params), one.partial_output is not None) for one in group
            ],
        }
        for prompt, group in groups
    ]
    tokens = [token for prompt, _ in groups for token in prompt]
    partial = [one.partial_output for one in requests if one.partial_output is not None]
    completions, columns = to_columns(partial) if partial else ([], {})
    return {"prompts": entries, "partial_outputs": completions}, {
        "tokens": np.array(tokens, np.int64),
        **columns,
    }


def requests_from_frame(frame: Frame) -> list[list[GenerateRequest]]:
    """Decode the requests of `requests_to_frame`, grouped by prompt."""
    groups = []
    start = 0
    columns = {name: array for name, array in frame.arrays.items() if name != "tokens"}
    partial = iter(from_columns(frame.metadata["partial_outputs"], columns))
    for entry in frame.metadata["prompts"]:
        stop = start + entry["num_tokens"]
        prompt = tuple(frame.arrays["tokens"][start:stop].tolist())
        groups.append(
            [
                GenerateRequest(
                    id, prompt, SamplingParams(**_tuples(params)), next(partial) if has_partial else None
                )
                for id, params, has_partial in entry["requests"]
            ]
        )
        start = stop
    return groups


def results_to_frame(
    results: Sequence[tuple[str, int, int, Completion]],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Encode finished requests as a frame's metadata and arrays.

    Args:
        results: (id, engine step of the start, engine step of the end, completion) of each request.
    """
    completions, columns = to_columns([completion for *_, completion in results])
    requests = [(id, began, ended) for id, began, ended, _ in results]
    return {"requests": requests, "completions": completions}, columns


def results_from_frame(frame: Frame) -> list[tuple[str, int, int, Completion]]:
    """Decode the finished requests of `results_to_frame`.

    Raises:
        FrameError: metadata and arrays are inconsistent.
    """
    try:
        completions = from_columns(frame.metadata["completions"], frame.arrays)
    except ValueError as error:
        raise FrameError(f"frame {frame.kind} does not fit: {error}") from None
    requests = frame.metadata["requests"]
    return [(*request, completion) for request, completion in zip(requests, completions, strict=True)]


def _changed_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    return {name: value for name, default in DEFAULTS.items() if (value := getattr(params, name)) != default}


def _tuples(value: Any) -> Any:
    """Convert lists from JSON back to tuples."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
