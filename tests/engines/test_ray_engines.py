"""What engines on Ray do without Ray: calls, tokens, weights in pieces, and draws as in any other process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.engines import ray_engines, weight_pieces
from millrace.engines.build_engine import open_engine
from millrace.engines.handle import EngineSettings, read_files
from millrace.engines.ray_engines import EngineActor, ListeningChannel, RayEngine, inside
from millrace.engines.wire import COMMANDS, Channel, Frame
from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import pack_requests, unpack_results
from millrace.transport.shared_memory import SharedWeights
from tests.engines.test_engine_worker import same_bits
from tests.engines.test_real_engines import PARAMS, PROMPTS, saved

HOST = "127.0.0.1"
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engines, "TOKEN_S", LIMIT_S)


def until(hear: Callable[[], Any]) -> Any:
    """What is heard in the end."""
    ends_s = time.monotonic() + LIMIT_S
    while not (found := hear()):
        assert time.monotonic() < ends_s
        time.sleep(0.005)
    return found


def call(channel: ListeningChannel, said: str) -> socket.socket:
    end = socket.create_connection((HOST, channel.port), timeout=LIMIT_S)
    end.sendall(said.encode())
    return end


def hung_up(end: socket.socket) -> bool:
    """Whether the other end has closed a connection over which nothing comes."""
    try:
        assert end.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.world
def test_who_does_not_say_the_token_is_hung_up_on() -> None:
    channel, another = ListeningChannel(HOST), ListeningChannel(HOST)
    assert len(channel.token) == 64 and another.token != channel.token
    another.close()
    wrong = channel.token[:-1] + ("0" if channel.token[-1] != "0" else "1")
    for said in (wrong, "{}" * 40):
        stranger = call(channel, said)
        stranger.setblocking(False)
        until(lambda stranger=stranger: channel.receive() or hung_up(stranger))
        stranger.close()
    channel.send("abort", {"ids": ["before"]})
    assert channel.unsent and not channel.ended
    friend = Channel(call(channel, channel.token), bytes.fromhex(channel.token), COMMANDS)

    def heard_by_the_friend() -> list[Frame]:
        assert channel.receive() == []
        channel.flush()
        return friend.receive()

    assert [frame.metadata for frame in until(heard_by_the_friend)] == [{"ids": ["before"]}]
    friend.send("heartbeat")
    assert [frame.kind for frame in until(channel.receive)] == ["heartbeat"]
    friend.close()
    until(lambda: channel.receive() or channel.ended)
    channel.close()


@pytest.mark.world
def test_what_is_large_goes_out_in_its_turn() -> None:
    channel = ListeningChannel(HOST)
    friend = Channel(call(channel, channel.token), bytes.fromhex(channel.token), ("submit", "abort"))
    until(lambda: channel.receive() or channel._open)
    many = np.arange(3_000_000, dtype=np.int32)
    channel.send("submit", {}, {"numbers": many})
    channel.send("submit", {}, {"numbers": many[::-1]})
    channel.send("abort", {"ids": ["last"]})
    assert channel.unsent
    heard: list[Frame] = []

    def all_of_it() -> bool:
        channel.flush()
        heard.extend(friend.receive())
        return len(heard) == 3

    until(all_of_it)
    assert [frame.kind for frame in heard] == ["submit", "submit", "abort"]
    assert np.array_equal(heard[0].arrays["numbers"], many)
    assert np.array_equal(heard[1].arrays["numbers"], many[::-1])
    assert not channel.unsent
    channel.close()
    friend.close()


class There:
    """An engine that has called, in a thread, and what it said."""

    def __init__(self, folder: Path, weights: SharedWeights) -> None:
        self.channel = ListeningChannel(HOST)
        ray: Any = SimpleNamespace()
        self.handle = RayEngine(ray, None, None, self.channel, weights.handle, lambda: None)
        self.held: int | None = None
        settings = asdict(EngineSettings(read_files(folder), 1))
        self.serve = threading.Thread(
            target=EngineActor("engine-0").serve, args=(HOST, self.channel.port, self.channel.token, settings)
        )
        self.frames: list[Frame] = []

    def __enter__(self) -> There:
        self.serve.start()
        self.receive("ready")
        return self

    def __exit__(self, *error: object) -> None:
        self.channel.close()
        self.serve.join(LIMIT_S)
        assert not self.serve.is_alive()

    def receive(self, kind: str) -> Frame:
        """The next frame of a kind; all before it are kept."""

        def found() -> Frame | None:
            self.channel.flush()
            self.frames.extend(self.channel.receive())
            return next((frame for frame in self.frames if frame.kind == kind), None)

        frame: Frame = until(found)
        self.frames.remove(frame)
        return frame

    def load(self, metadata: Mapping[str, Any]) -> tuple[str, int]:
        """What it says of weights, and in how many pieces they came."""
        self.frames.clear()
        self.handle.update_weights(metadata, self.held)
        error = self.receive("weights_loaded").metadata["error"]
        if not error:
            self.held = metadata["version"]
        return error, sum(frame.kind == "heartbeat" for frame in self.frames)


@pytest.mark.world
@pytest.mark.timeout(300)
def test_an_engine_that_called_proves_its_weights_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pieces, "PIECE_BYTES", 5000)
    models = saved(tmp_path)
    with closing(SharedWeights()) as weights, There(tmp_path, weights) as there:
        twin = open_engine(tmp_path)
        for version, model in enumerate(models):
            error, num_pieces = there.load(weights.write(model.named_parameters(), version))
            assert error == "" and num_pieces > 10
            requests = [GenerateRequest(f"{version}-{i}", PROMPTS[i], PARAMS[i]) for i in range(4)]
            there.handle.send("submit", *pack_requests(requests))
            completed = []
            while len(completed) < 4:
                completed += there.receive("completed").unpack(unpack_results)
            twin.update_weights(model.named_parameters(), version)
            ours = {id: completion for id, _, _, completion in completed}
            for request, theirs in zip(requests, twin.generate(PROMPTS, PARAMS), strict=True):
                assert same_bits(ours[request.id], theirs)


@pytest.mark.world
@pytest.mark.timeout(300)
def test_an_engine_that_holds_the_last_version_is_sent_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_pieces, "PIECE_BYTES", 5000)
    model = saved(tmp_path)[0]

    def step() -> None:
        with torch.no_grad():
            next(model.parameters()).view(-1)[:3] += 1

    with closing(SharedWeights(delta=True)) as weights, There(tmp_path, weights) as there:
        error, num_whole = there.load(weights.write(model.named_parameters(), 0))
        assert error == "" and num_whole > 10
        for version in (1, 2):
            step()
            error, num_pieces = there.load(weights.write(model.named_parameters(), version))
            assert error == "" and num_pieces < num_whole / 2
        # Who missed a version holds other weights than those from which anything is known to have changed.
        for version in (3, 4):
            step()
            metadata = weights.write(model.named_parameters(), version)
        assert there.load(metadata) == ("", num_whole)
        # What was refused is sent whole, as everything is that nobody knows the state of.
        step()
        metadata = weights.write(model.named_parameters(), 5)
        begin, end = next(iter(metadata["changes"]["packed"].values()))
        os.pwrite(weights.handle, b"\xff" * (end - begin), begin)
        assert "do not fit" in there.load(metadata)[0]
        there.held = None
        assert there.load(metadata) == ("", num_whole)


def test_a_process_that_ray_did_not_start_says_so() -> None:
    assert not inside()
