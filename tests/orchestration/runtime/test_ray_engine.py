"""What engines on Ray do without Ray: calls, tokens, weights in pieces, and draws as in any other process."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.orchestration.engines import open_engine
from millrace.orchestration.runtime import ray_engine
from millrace.orchestration.runtime.base import Draw
from millrace.orchestration.runtime.child import Settings, read_files
from millrace.orchestration.runtime.frames import ORDERS, Frame, Line, drawn_of, draws_as_frame
from millrace.orchestration.runtime.ray_engine import Called, Engine, RemoteChild, inside
from millrace.transport.memory import SharedWeights
from tests.orchestration.runtime.test_engine_process import same_bits
from tests.orchestration.runtime.test_real_engines import PARAMS, PROMPTS, saved

HOST = "127.0.0.1"
LIMIT_S = 60.0


def until(hear: Callable[[], Any]) -> Any:
    """What is heard in the end."""
    ends_s = time.monotonic() + LIMIT_S
    while not (found := hear()):
        assert time.monotonic() < ends_s
        time.sleep(0.005)
    return found


def call(line: Called, said: str) -> socket.socket:
    end = socket.create_connection((HOST, line.port), timeout=LIMIT_S)
    end.sendall(said.encode())
    return end


def test_who_does_not_say_the_token_is_hung_up_on() -> None:
    line, another = Called(HOST), Called(HOST)
    assert len(line.token) == 64 and another.token != line.token
    another.close()
    wrong = line.token[:-1] + ("0" if line.token[-1] != "0" else "1")
    for said in (wrong, "{}" * 40):
        stranger = call(line, said)
        assert line.take() == []
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    line.put("abort", {"ids": ["before"]})
    assert line.unsent and not line.ended
    friend = Line(call(line, line.token), ORDERS)
    assert line.take() == []
    line.flush()
    assert [frame.note for frame in until(friend.take)] == [{"ids": ["before"]}]
    friend.put("beat")
    assert [frame.kind for frame in until(line.take)] == ["beat"]
    friend.close()
    until(lambda: line.take() or line.ended)
    line.close()


def test_what_is_large_goes_out_in_its_turn() -> None:
    line = Called(HOST)
    friend = Line(call(line, line.token), ("submit", "abort"))
    line.take()
    many = np.arange(3_000_000, dtype=np.int32)
    line.put("submit", {}, {"numbers": many})
    line.put("submit", {}, {"numbers": many[::-1]})
    line.put("abort", {"ids": ["last"]})
    assert line.unsent
    heard: list[Frame] = []

    def all_of_it() -> bool:
        line.flush()
        heard.extend(friend.take())
        return len(heard) == 3

    until(all_of_it)
    assert [frame.kind for frame in heard] == ["submit", "submit", "abort"]
    assert np.array_equal(heard[0].arrays["numbers"], many)
    assert np.array_equal(heard[1].arrays["numbers"], many[::-1])
    assert not line.unsent
    line.close()
    friend.close()


@pytest.mark.timeout(300)
def test_an_engine_that_called_proves_its_weights_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "PIECE_BYTES", 5000)
    models = saved(tmp_path)
    line, weights = Called(HOST), SharedWeights()
    process: Any = SimpleNamespace(poll=lambda: None)
    child = RemoteChild("engine-0", process, line, -1, io.BytesIO(), 0, weights=weights.handle)
    serve = threading.Thread(
        target=Engine("engine-0").serve,
        args=(HOST, line.port, line.token, asdict(Settings(read_files(tmp_path), 1))),
    )
    serve.start()
    heard: list[Frame] = []

    def hear(kind: str) -> Frame:
        def found() -> Frame | None:
            line.flush()
            heard.extend(line.take())
            return next((frame for frame in heard if frame.kind == kind), None)

        frame = until(found)
        heard.remove(frame)
        return frame

    hear("ready")
    twin = open_engine(tmp_path)
    for version, model in enumerate(models):
        child.give("load", weights.write(model.named_parameters(), version))
        loaded = hear("loaded")
        assert (loaded.note["version"], loaded.note["error"]) == (version, "")
        assert sum(frame.kind == "beat" for frame in heard) > 10
        heard.clear()
        draws = [Draw(f"{version}-{i}", PROMPTS[i], PARAMS[i]) for i in range(4)]
        child.give("submit", *draws_as_frame(draws))
        drawn = []
        while len(drawn) < 4:
            drawn += drawn_of(hear("drawn"))
        twin.load_weights(model.named_parameters(), version)
        ours = {id: completion for id, _, _, completion in drawn}
        for draw, theirs in zip(draws, twin.generate(PROMPTS, PARAMS), strict=True):
            assert same_bits(ours[draw.id], theirs)
    line.close()
    serve.join(LIMIT_S)
    assert not serve.is_alive()
    weights.close()


def test_a_process_that_ray_did_not_start_says_so() -> None:
    assert not inside()
