"""Frames arrive as they were sent, in whatever pieces; what is no frame is refused by name."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from millrace.engines.wire import (
    Channel,
    Frame,
    FrameError,
    requests_from_frame,
    requests_to_frame,
    results_from_frame,
    results_to_frame,
)
from millrace.processes.worker import HEADER, KEY_BYTES, START, to_header
from millrace.rollout.backend import GenerateRequest
from millrace.types import SamplingParams
from tests.rollout.test_remote_shared import check_same, completion

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
        (raw(b"{nothing"), "body cannot be read: JSONDecodeError"),
        (raw(b'{"kind": "a"}'), "body cannot be read: KeyError: 'metadata'"),
        (raw(b"[]"), "body cannot be read: TypeError"),
        (raw(body(arrays=[["x", "int32"]])), "body cannot be read: ValueError"),
        (raw(body(kind="c")), "a frame of kind 'c' came; here only a, b do"),
        (
            raw(body(arrays=[["x", "object", [1]]]), b"12345678"),
            "array x of frame a is object; it may be",
        ),
        (
            raw(body(arrays=[["x", "int32", [2]]]), b"1234567"),
            r"array x of frame a has shape \[2\], for",
        ),
        (raw(body(arrays=[["x", "int32", [-1, -1]]]), b"1234"), r"array x of frame a has shape \[-1, -1\]"),
        (raw(body(arrays=[["x", "int16", [1]]]), b"1234"), "frame a has 2 bytes that belong to no array"),
    ],
)
def test_what_is_no_frame_is_refused(ends: tuple[socket.socket, Channel], data: bytes, words: str) -> None:
    ours, channel = ends
    ours.sendall(data)
    with pytest.raises(FrameError, match=words):
        channel.receive()


EVERYTHING = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    stop_token_ids=(1, 2),
    stop=("é", "\n"),
    seed=(1 << 80) + 1,
    min_tokens=1,
    min_p=0.125,
    repetition_penalty=1.1,
    presence_penalty=-0.1,
    frequency_penalty=0.3,
    allowed_token_ids=(4, 5),
    forbidden_token_ids=(6,),
    logit_bias=((4, 0.1), (5, -2.0)),
    logprobs="raw",
    prompt_logprobs=True,
)


def test_draws_arrive_as_they_were() -> None:
    plain = SamplingParams()
    for name in SamplingParams.__slots__:
        assert getattr(EVERYTHING, name) != getattr(plain, name)
    requests = [
        GenerateRequest("a", (1, 2), EVERYTHING),
        GenerateRequest("b", (1, 2), plain),
        GenerateRequest("c", (), plain),
        GenerateRequest("d", (1 << 40,), plain),
        GenerateRequest("e", (1, 2), plain),
    ]
    frame = through(requests_to_frame(requests))
    assert requests_from_frame(frame) == [requests[:2], requests[2:3], requests[3:4], requests[4:]]
    assert len(frame.arrays["tokens"]) == 5
    assert list(frame.arrays) == ["tokens"]


def test_partial_output_arrives_with_its_request() -> None:
    begun = [None, completion(4), None, completion(7)]
    requests = [
        GenerateRequest(f"{i}", (i // 2,), SamplingParams(), completed) for i, completed in enumerate(begun)
    ]
    found = [
        request for group in requests_from_frame(through(requests_to_frame(requests))) for request in group
    ]
    assert [request.id for request in found] == ["0", "1", "2", "3"]
    assert found[0].partial_output is None and found[2].partial_output is None
    for place in (1, 3):
        check_same(found[place].partial_output, begun[place])


@pytest.mark.parametrize("num", [0, 1, 24])
def test_completions_arrive_as_they_were(num: int) -> None:
    completed = [(f"draw {seed}", seed, 2 * seed, completion(seed)) for seed in range(num)]
    back = results_from_frame(through(results_to_frame(completed)))
    assert [one[:3] for one in back] == [one[:3] for one in completed]
    for one, other in zip(completed, back, strict=True):
        check_same(one[3], other[3])


def test_completions_that_do_not_fit_are_refused() -> None:
    metadata, columns = results_to_frame([("a", 0, 1, completion(3))])
    frame = through((metadata, columns | {"logprobs": np.zeros(9, np.float32)}))
    with pytest.raises(FrameError, match="^frame a does not fit: column logprobs holds 9 numbers"):
        results_from_frame(frame)
