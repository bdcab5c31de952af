"""What engines say they took up becomes a record, and in a replay they end and start as they are told."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from millrace.engines.recorded import RecordedCommands, ReplayError
from millrace.engines.subprocesses import SubprocessBackend
from millrace.rollout.backend import EngineJoined, GenerateResult, WeightsLoaded
from millrace.types import SamplingParams
from tests.engines.fake_engine import TOKENS
from tests.engines.test_subprocesses import (
    LIMIT_S,
    Trainer,
    _fake,
    pids,
    requests,
    running,
    until,
)

pytestmark = pytest.mark.world

__all__ = ["_fake"]


def ask(backend: SubprocessBackend, num: int) -> list[tuple[int, ...]]:
    return [c.token_ids for c in backend.generate([(1,)] * num, [SamplingParams()] * num)]


def test_records_have_started_commands_and_blocking_requests() -> None:
    with running("counting") as backend:
        backend.send(Trainer().named_tensors(), 0)
        assert backend.records() == []
        ask(backend, 1)
        backend.begin()
        backend.load("engine-0", 0)
        until(backend, WeightsLoaded)
        backend.submit("engine-0", requests("a"))
        until(backend, GenerateResult)
        started = {"engine": "engine-0", "commands": [(2, ["load"]), (4, ["submit"])]}
        assert backend.records() == [("commands_started", started)]
        assert backend.records() == []
        backend.abort("engine-0", ["a"])
        assert ask(backend, 2) == [TOKENS] * 2
        blocking_request = ("blocking_request", {"engine": "engine-0", "requests": [0, 1]})
        started = {"engine": "engine-0", "commands": [(6, ["abort"]), (8, ["blocking_submit"])]}
        assert backend.records() == [blocking_request, ("commands_started", started)]


def test_in_a_replay_nobody_is_lost_but_by_the_log() -> None:
    with running() as backend:
        backend.send(Trainer().named_tensors(), 0)
        backend.begin(RecordedCommands([]))
        os.kill(pids(backend)[0], signal.SIGKILL)
        with pytest.raises(
            ReplayError, match="^engine-0 is lost, and in the run it was not lost here: .*SIGKILL"
        ):
            until(backend, EngineJoined)


def test_in_a_replay_an_engine_ends_after_its_pending_results() -> None:
    # The first was lost when it had drawn one of two.
    events = [
        {"kind": "blocking_request", "engine": "engine-0", "requests": [0, 1]},
        {"kind": "blocking_request", "engine": "engine-7", "requests": [1]},
        {
            "kind": "commands_started",
            "engine": "engine-7",
            "commands": [[0, ["load"]], [0, ["blocking_submit"]]],
        },
    ]
    with running() as backend:
        backend.send(Trainer().named_tensors(), 0)
        backend.begin(RecordedCommands(events))
        ended = threading.Thread(target=backend.end, args=("engine-0",))
        ended.start()
        found: list[tuple[int, ...]] = []
        caller = threading.Thread(target=lambda: found.extend(ask(backend, 2)))
        # It is asked before it may end.
        ended.join(0.2)
        assert ended.is_alive()
        caller.start()
        ended.join(LIMIT_S)
        assert backend.engines() == []
        backend.start("engine-7")
        assert until(backend, EngineJoined) == [EngineJoined("engine-7")]
        # The request comes first here, and passes after the load, as it did in the run.
        caller.join(0.2)
        assert found == []
        backend.load("engine-7", 0)
        assert until(backend, WeightsLoaded) == [WeightsLoaded("engine-7", 0, 7)]
        caller.join(LIMIT_S)
        assert found == [TOKENS] * 2
