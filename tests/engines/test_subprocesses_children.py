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
    draws,
    pids,
    running,
    until,
)

pytestmark = pytest.mark.world

__all__ = ["_fake"]


def ask(runtime: SubprocessBackend, num: int) -> list[tuple[int, ...]]:
    return [c.token_ids for c in runtime.generate([(1,)] * num, [SamplingParams()] * num)]


def test_records_tell_what_engines_took_up_and_who_was_asked() -> None:
    with running("counting") as runtime:
        runtime.send(Trainer().named_tensors(), 0)
        assert runtime.records() == []
        ask(runtime, 1)
        runtime.begin()
        runtime.load("engine-0", 0)
        until(runtime, WeightsLoaded)
        runtime.submit("engine-0", draws("a"))
        until(runtime, GenerateResult)
        took = {"engine": "engine-0", "orders": [(2, "l"), (4, "s")]}
        assert runtime.records() == [("took", took)]
        assert runtime.records() == []
        runtime.abort("engine-0", ["a"])
        assert ask(runtime, 2) == [TOKENS] * 2
        asked = ("asked", {"engine": "engine-0", "draws": [0, 1]})
        took = {"engine": "engine-0", "orders": [(6, "a"), (8, "d")]}
        assert runtime.records() == [asked, ("took", took)]


def test_in_a_replay_nobody_is_lost_but_by_the_log() -> None:
    with running() as runtime:
        runtime.send(Trainer().named_tensors(), 0)
        runtime.begin(RecordedCommands([]))
        os.kill(pids(runtime)[0], signal.SIGKILL)
        with pytest.raises(
            ReplayError, match="^engine-0 is lost, and in the run it was not lost here: .*SIGKILL"
        ):
            until(runtime, EngineJoined)


def test_in_a_replay_an_engine_ends_once_it_has_drawn_what_the_run_heard_of_it() -> None:
    # The first was lost when it had drawn one of two.
    events = [
        {"kind": "asked", "engine": "engine-0", "draws": [0, 1]},
        {"kind": "asked", "engine": "engine-7", "draws": [1]},
        {"kind": "took", "engine": "engine-7", "orders": [[0, "l"], [0, "d"]]},
    ]
    with running() as runtime:
        runtime.send(Trainer().named_tensors(), 0)
        runtime.begin(RecordedCommands(events))
        ended = threading.Thread(target=runtime.end, args=("engine-0",))
        ended.start()
        found: list[tuple[int, ...]] = []
        asked = threading.Thread(target=lambda: found.extend(ask(runtime, 2)))
        # It is asked before it may end.
        ended.join(0.2)
        assert ended.is_alive()
        asked.start()
        ended.join(LIMIT_S)
        assert runtime.engines() == []
        runtime.start("engine-7")
        assert until(runtime, EngineJoined) == [EngineJoined("engine-7")]
        # The draw comes first here, and passes after the load, as it did in the run.
        asked.join(0.2)
        assert found == []
        runtime.load("engine-7", 0)
        assert until(runtime, WeightsLoaded) == [WeightsLoaded("engine-7", 0, 7)]
        asked.join(LIMIT_S)
        assert found == [TOKENS] * 2
