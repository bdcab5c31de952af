"""Frames arrive as they were sent, in whatever pieces; what is no frame is refused by name."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace.engines.wire import Channel, Frame, FrameError
from millrace.processes.worker import HEADER, KEY_BYTES, START, to_header
from millrace.rollout.serialization import pack_results, unpack_results
from tests.rollout.test_remote_shared import completion

KINDS = ("a", "b")
KEY = bytes(KEY_BYTES)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """A socket to write bytes to, and the line that reads them."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, KEY, KINDS)
    yield ours, channel
    ours.close()
    channel.close()


def body(**changes: Any) -> bytes:
    return json.dumps({"kind": "a", "metadata": {}, "arrays": []} | changes).encode()


def raw(body: bytes, data: bytes = b"") -> bytes:
    return to_header(KEY, START, body, len(data)) + body + data


def through(frame: tuple[dict[str, Any], dict[str, np.ndarray]]) -> Frame:
    """A frame at the other end."""
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, KEY, ()), Channel(theirs, KEY, KINDS)
    sender.send("a", *frame)
    frames = receiver.receive()
    while not frames:
        sender.flush()
        frames = receiver.receive()
    sender.close()
    receiver.close()
    return frames[0]


def test_frames_arrive_in_pieces_of_any_length(ends: tuple[socket.socket, Channel]) -> None:
    ours, channel = ends
    numbers = random.Random(0)
    arrays = {"x": np.arange(6, dtype=np.int64).reshape(2, 3), "empty": np.empty((0, 2), np.float32)}
    told = [[name, str(array.dtype), array.shape] for name, array in arrays.items()]
    one = raw(body(kind="b", metadata={"é": [1, None]}, arrays=told), arrays["x"].tobytes())
    data = one * 20
    frames = []
    while data:
        cut = numbers.randrange(1, 200)
        ours.sendall(data[:cut])
        data = data[cut:]
        frames += channel.receive()
    assert len(frames) == 20
    for frame in frames:
        assert (frame.kind, frame.metadata) == ("b", {"é": [1, None]})
        for name, array in arrays.items():
            assert frame.arrays[name].dtype == array.dtype and np.array_equal(frame.arrays[name], array)
            frame.arrays[name][:] = 1


def test_nobody_waits_for_a_full_socket() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, KEY, ()), Channel(theirs, KEY, KINDS)
    large = np.arange(1 << 20, dtype=np.int32)
    sender.send("a", {"n": 1}, {"large": large})
    sender.send("b", {"n": 2})
    assert sender.unsent
    frames: list[Frame] = []
    while len(frames) < 2:
        frames += receiver.receive()
        sender.flush()
    assert not sender.unsent
    assert [frame.metadata["n"] for frame in frames] == [1, 2]
    assert np.array_equal(frames[0].arrays["large"], large)
    sender.close()
    assert receiver.receive() == [] and receiver.ended
    receiver.send("a")
    assert not receiver.unsent
    receiver.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HEADER.pack((1 << 28) + 1, 0, 0, b""), "wrote into its socket what is no frame"),
        (to_header(KEY, 0, b"{}", (1 << 34) + 1), "wrote into its socket what is no frame"),
        (to_header(bytes([1] * KEY_BYTES), 0, body()) + body(), "wrote into its socket what is no frame"),
        (raw(b"{nothing"), "header cannot be read: JSONDecodeError"),
        (raw(b'{"kind": "a", "arrays": []}'), "a frame has no field 'metadata'"),
        (raw(b"[]"), "header cannot be read: TypeError"),
        (raw(body(arrays=[["x", "int32"]])), "header cannot be read: ValueError"),
        (raw(body(kind="c")), "a frame of kind 'c' came; here only a, b do"),
        (
            raw(body(arrays=[["x", "object", [1]]]), b"12345678"),
            "array x is object; it may be",
        ),
        (
            raw(body(arrays=[["x", "int32", [2]]]), b"1234567"),
            r"array x has shape \[2\], for",
        ),
        (raw(body(arrays=[["x", "int32", [-1, -1]]]), b"1234"), r"array x has shape \[-1, -1\]"),
        (raw(body(arrays=[["x", "int16", [1]]]), b"1234"), "2 bytes belong to no array"),
    ],
)
def test_what_is_no_frame_is_refused(ends: tuple[socket.socket, Channel], data: bytes, words: str) -> None:
    ours, channel = ends
    ours.sendall(data)
    with pytest.raises(FrameError, match=words):
        channel.receive()


def test_metadata_and_arrays_that_do_not_fit_are_refused() -> None:
    fields, columns = pack_results([("a", 0, 1, completion(3))])
    frame = through((fields, columns | {"logprobs": np.zeros(9, np.float32)}))
    with pytest.raises(FrameError, match="^frame a does not fit: column logprobs holds 9 numbers"):
        frame.unpack(unpack_results)
