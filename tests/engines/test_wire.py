"""Frames arrive as they were sent, in whatever pieces; what is no frame is refused by name."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace.engines.wire import LENGTHS, Channel, Frame, FrameError
from millrace.rollout.serialization import pack_results, unpack_results
from tests.rollout.test_remote_shared import completion

KINDS = ("a", "b")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """A socket to write bytes to, and the line that reads them."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, KINDS)
    yield ours, channel
    ours.close()
    channel.close()


def header(**changes: Any) -> bytes:
    return json.dumps({"kind": "a", "metadata": {}, "arrays": []} | changes).encode()


def raw(head: bytes, body: bytes = b"") -> bytes:
    return LENGTHS.pack(len(head), len(body)) + head + body


def through(frame: tuple[dict[str, Any], dict[str, np.ndarray]]) -> Frame:
    """A frame at the other end."""
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, ()), Channel(theirs, KINDS)
    sender.send("a", *frame)
    frames = receiver.take()
    while not frames:
        sender.flush()
        frames = receiver.take()
    sender.close()
    receiver.close()
    return frames[0]


def test_frames_arrive_in_pieces_of_any_length(ends: tuple[socket.socket, Channel]) -> None:
    ours, channel = ends
    numbers = random.Random(0)
    arrays = {"x": np.arange(6, dtype=np.int64).reshape(2, 3), "empty": np.empty((0, 2), np.float32)}
    told = [[name, str(array.dtype), array.shape] for name, array in arrays.items()]
    one = raw(header(kind="b", metadata={"é": [1, None]}, arrays=told), arrays["x"].tobytes())
    data = one * 20
    frames = []
    while data:
        cut = numbers.randrange(1, 200)
        ours.sendall(data[:cut])
        data = data[cut:]
        frames += channel.take()
    assert len(frames) == 20
    for frame in frames:
        assert (frame.kind, frame.metadata) == ("b", {"é": [1, None]})
        for name, array in arrays.items():
            assert frame.arrays[name].dtype == array.dtype and np.array_equal(frame.arrays[name], array)
            frame.arrays[name][:] = 1


def test_nobody_waits_for_a_full_socket() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours, ()), Channel(theirs, KINDS)
    large = np.arange(1 << 20, dtype=np.int32)
    sender.send("a", {"n": 1}, {"large": large})
    sender.send("b", {"n": 2})
    assert sender.unsent
    frames: list[Frame] = []
    while len(frames) < 2:
        frames += receiver.take()
        sender.flush()
    assert not sender.unsent
    assert [frame.metadata["n"] for frame in frames] == [1, 2]
    assert np.array_equal(frames[0].arrays["large"], large)
    sender.close()
    assert receiver.take() == [] and receiver.ended
    receiver.send("a")
    assert not receiver.unsent
    receiver.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LENGTHS.pack((1 << 28) + 1, 0), "header was announced with 268435457 bytes; at most 268435456 come"),
        (
            LENGTHS.pack(2, (1 << 34) + 1),
            "body was announced with 17179869185 bytes; at most",
        ),
        (raw(b"{nothing"), "header cannot be read: JSONDecodeError"),
        (raw(b'{"kind": "a"}'), "header cannot be read: KeyError: 'metadata'"),
        (raw(b"[]"), "header cannot be read: TypeError"),
        (raw(header(arrays=[["x", "int32"]])), "header cannot be read: ValueError"),
        (raw(header(kind="c")), "a frame of kind 'c' came; here only a, b do"),
        (
            raw(header(arrays=[["x", "object", [1]]]), b"12345678"),
            "array x of frame a is object; it may be",
        ),
        (
            raw(header(arrays=[["x", "int32", [2]]]), b"1234567"),
            r"array x of frame a has shape \[2\], for",
        ),
        (raw(header(arrays=[["x", "int32", [-1, -1]]]), b"1234"), r"array x of frame a has shape \[-1, -1\]"),
        (raw(header(arrays=[["x", "int16", [1]]]), b"1234"), "frame a has 2 bytes that belong to no array"),
    ],
)
def test_what_is_no_frame_is_refused(ends: tuple[socket.socket, Channel], data: bytes, words: str) -> None:
    ours, channel = ends
    ours.sendall(data)
    with pytest.raises(FrameError, match=words):
        channel.take()


def test_metadata_and_arrays_that_do_not_fit_are_refused() -> None:
    fields, columns = pack_results([("a", 0, 1, completion(3))])
    frame = through((fields, columns | {"logprobs": np.zeros(9, np.float32)}))
    with pytest.raises(FrameError, match="^frame a does not fit: column logprobs holds 9 numbers"):
        frame.unpack(unpack_results)
