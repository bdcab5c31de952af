"""Frames between a parent and its child: any cut, any size, and nothing but the child's own."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.processes.frames import FrameSocket
from millrace.processes.worker import HEADER, KEY_BYTES, WorkerChannel, to_header

MOST = 1 << 12
KEY = bytes(range(KEY_BYTES))


def to_frame(key: bytes, id: int, body: bytes, data: bytes = b"") -> bytes:
    return to_header(key, id, body, len(data)) + body + data


@contextmanager
def connected(most_data: int = 0) -> Iterator[tuple[FrameSocket, socket.socket, bytes]]:
    """A parent's end, the child's socket and their key."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameSocket(ours, KEY, MOST, most_data), theirs, KEY


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=40), st.binary(max_size=20)), min_size=1
    ),
    st.lists(st.integers(1, 60), min_size=1),
)
def test_frames_arrive_as_they_were_however_they_are_cut(frames, cuts):
    with connected(20) as (parent, child, key):
        data, got = b"".join(to_frame(key, *frame) for frame in frames), []
        for place in range(len(data)):
            size = cuts[place % len(cuts)]
            child.sendall(data[:size])
            data = data[size:]
            got += parent.take()
        assert got == frames and not parent.fault
        child.close()
        assert (parent.take(), parent.ended) == ([], True)


def test_what_the_socket_does_not_accept_is_sent_later_and_read_in_order():
    with connected() as (parent, child, key):
        frames = [(number, bytes([number]) * (1 << 18)) for number in range(16)]
        for id, body in frames:
            parent.queue(id, body)
        parent.flush()
        assert parent.unsent
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(lambda: list(WorkerChannel(child, key)))
            while parent.unsent:
                select.select([], [parent], [])
                parent.flush()
            parent.close()
            assert reading.result() == frames


def test_data_follows_its_body_in_the_parts_in_which_it_was_given():
    with connected(1 << 22) as (parent, child, key):
        other = FrameSocket(child, key, MOST)
        parts = [memoryview(bytes([number]) * size) for number, size in enumerate((1 << 20, 0, 3, 1 << 20))]
        for id in range(3):
            other.queue(id, b"body", parts)
        other.queue(3, b"last")
        frames = []
        while len(frames) < 4:
            other.flush()
            frames += parent.take()
        assert frames == [*((id, b"body", b"".join(parts)) for id in range(3)), (3, b"last", b"")]
        assert not other.unsent


@pytest.mark.attack("a completion forges a verdict")
def test_data_is_refused_where_none_is_accepted():
    with connected() as (parent, child, key):
        child.sendall(to_frame(key, 1, b"one", b"data"))
        assert parent.take() == [] and parent.fault
        parent._socket.sendall(to_frame(key, 1, b"one", b"data"))
        with pytest.raises(ValueError, match="request 1 was not written by the parent process"):
            WorkerChannel(child, key).receive()


@pytest.mark.attack("a completion forges a verdict")
@pytest.mark.parametrize("change", ["key", "id", "body", "data", "digest", "length", "text"])
def test_a_frame_of_another_is_found_and_those_before_it_are_kept(change):
    with connected(1) as (parent, child, key):
        good, frame = to_frame(key, 1, b"one"), bytearray(to_frame(key, 2, b"two"))
        if change == "key":
            frame = bytearray(to_frame(bytes(KEY_BYTES), 2, b"two"))
        elif change == "text":
            frame = bytearray(b'["score",1.0,""]\n' * 3)
        else:
            frame[{"id": 4, "body": -1, "data": 12, "digest": 20, "length": 3}[change]] ^= 1
        child.sendall(good + frame + b"x")
        assert parent.take() == [(1, b"one", b"")]
        assert parent.fault.startswith("wrote into its socket what is no frame: b")
        child.sendall(good)
        assert parent.take() == []


def test_a_reply_may_be_as_long_as_the_limit_and_no_longer():
    with connected() as (parent, child, key):
        child.sendall(to_frame(key, 1, b"x" * MOST))
        assert parent.take() == [(1, b"x" * MOST, b"")]
        # The length alone is enough.
        child.sendall(to_frame(key, 2, b"x" * (MOST + 1))[: HEADER.size])
        assert parent.take() == [] and parent.fault


@pytest.mark.parametrize("left", [0, 5, HEADER.size, HEADER.size + 2])
def test_a_worker_ends_with_its_parent(left):
    with connected() as (parent, child, key):
        parent.queue(1, b"whole")
        parent.flush()
        parent._socket.sendall(to_frame(key, 2, b"half")[:left])
        parent.close()
        assert list(WorkerChannel(child, key)) == [(1, b"whole")]


def test_a_worker_learns_the_id_before_the_body_and_refuses_what_is_not_its_parents():
    with connected() as (parent, child, key):
        begun: list[int] = []
        parent.queue(7, b"body")
        parent.flush()
        channel = WorkerChannel(child, key)
        assert channel.receive(begun.append) == (7, b"body") and begun == [7]
        parent._socket.sendall(to_frame(bytes(KEY_BYTES), 8, b"body"))
        with pytest.raises(ValueError, match="request 8 was not written by the parent process"):
            channel.receive(begun.append)
        assert begun == [7, 8]
