"""What engines say they took up becomes a record, and in a replay they end and start as they are told."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.engines.subprocesses import SubprocessBackend
from millrace.replay.recorded_log import ReplayError, RunSegment
from millrace.replay.replay_backend import ReplayBackend
from millrace.rollout.backend import (
    Abort,
    BlockingRequest,
    CommandsStarted,
    EngineJoined,
    EngineLost,
    Event,
    GenerateResult,
    LoadWeights,
    RestartTurns,
    Submit,
    WeightsLoaded,
)
from millrace.rollout.recorder import as_record
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


def reports(backend: SubprocessBackend) -> list[Event]:
    return [event for event in backend.poll() if isinstance(event, CommandsStarted | BlockingRequest)]


def test_started_commands_and_blocking_requests_are_events() -> None:
    with running("counting") as backend:
        backend.update_weights(Trainer().named_tensors(), 0)
        ask(backend, 1)
        assert reports(backend) == []
        backend.execute(RestartTurns())
        backend.execute(LoadWeights("engine-0", 0))
        until(backend, WeightsLoaded)
        backend.execute(Submit("engine-0", requests("a")))
        started, _ = until(backend, GenerateResult)
        assert started == CommandsStarted("engine-0", [[2, ["update_weights"]], [4, ["submit"]]])
        backend.execute(Abort("engine-0", ["a"]))
        assert ask(backend, 2) == [TOKENS] * 2
        assert reports(backend) == [
            BlockingRequest("engine-0", [0, 1]),
            CommandsStarted("engine-0", [[6, ["abort"]], [8, ["blocking_submit"]]]),
        ]


def replayed(backend: SubprocessBackend, *reported: Event) -> ReplayBackend:
    """A replay of what engines reported, before the first event of the log."""
    events = [{"kind": "events_received", "events": [as_record(event) for event in reported]}]
    log: Any = SimpleNamespace(segment=RunSegment(events, 1, 0), head=None, place="event 1 of the log")
    replay = ReplayBackend(backend, log, limit_s=LIMIT_S)
    replay.execute(RestartTurns())
    return replay


def test_in_a_replay_nobody_is_lost_but_by_the_log() -> None:
    with running() as backend:
        backend.update_weights(Trainer().named_tensors(), 0)
        replay = replayed(backend)
        os.kill(pids(backend)[0], signal.SIGKILL)
        replay.wait(LIMIT_S)
        with pytest.raises(
            ReplayError, match="^engine-0 is lost, and in the run it was not lost here: .*SIGKILL"
        ):
            while True:
                assert replay.poll() == []
                backend.wait(LIMIT_S)


@pytest.mark.slow
def test_in_a_replay_an_engine_ends_after_its_pending_results() -> None:
    with running() as backend:
        backend.update_weights(Trainer().named_tensors(), 0)
        # The first was lost when it had generated one of two.
        replay = replayed(
            backend,
            CommandsStarted("engine-0", [(0, ["blocking_submit"])]),
            BlockingRequest("engine-0", [0, 1]),
            BlockingRequest("engine-7", [1]),
            CommandsStarted("engine-7", [(0, ["update_weights"]), (0, ["blocking_submit"])]),
        )
        lost = EngineLost("engine-0", "it died")
        replay._recorded_log.head = {"kind": "events_received", "events": [as_record(lost)]}
        found: list[tuple[int, ...]] = []
        caller = threading.Thread(target=lambda: found.extend(ask(backend, 2)))
        # It is to serve requests before it may end; one of its two results is not used.
        assert replay.poll() == []
        assert backend.engines() == ["engine-0"]
        caller.start()
        while not (events := replay.poll()):
            time.sleep(0.01)
        assert events == [lost]
        assert backend.engines() == []
        joined = EngineJoined("engine-7")
        replay._recorded_log.head = {"kind": "events_received", "events": [as_record(joined)]}
        while not (events := replay.poll()):
            replay.wait(1.0)
        assert events == [joined]
        replay.execute(LoadWeights("engine-7", 0))
        caller.join(LIMIT_S)
        assert found == [TOKENS] * 2
