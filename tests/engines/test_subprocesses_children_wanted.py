"""Another number of engines on the way, with processes that stand in for engines."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.engines import handle
from millrace.engines.ray_placement import RayTrainerError
from millrace.engines.subprocesses import EngineFailed
from millrace.rollout.backend import (
    DRAINED,
    EngineJoined,
    EngineLost,
    Retire,
    Scale,
    ScaleRequest,
    StopEngine,
    WeightsLoaded,
)
from millrace.types import SamplingParams
from tests.engines.fake_engine import TOKENS
from tests.engines.test_subprocesses import LIMIT_S, Trainer, _fake, load, pids, running, until, waited
from tests.rewards.helpers import is_running

pytestmark = pytest.mark.world

NOTHING = "one after the other before they had completed a request"
assert _fake  # a fixture of every test here, too


class Starts:
    """Starts engines: so many that behave, then others."""

    def __init__(self, *then: str | Exception, good: int = 1) -> None:
        self.then, self.good = list(then), good

    def __call__(self, name: str, settings: Any, weights: int) -> Any:
        if self.good:
            self.good -= 1
            return handle.start(name, settings, weights)
        manner = self.then.pop(0)
        if isinstance(manner, Exception):
            raise manner
        return handle.start(name, handle.EngineSettings({"manner": manner.encode()}, 1), weights)


@pytest.mark.slow
def test_engines_are_added_and_retired_and_replaced_up_to_the_number_that_is_wanted() -> None:
    with running() as backend:
        backend.execute(Scale(3))
        joined = until(backend, EngineJoined, 2)
        assert set(joined) == {EngineJoined("engine-1"), EngineJoined("engine-2")}
        backend.execute(Scale(2))
        # Who has started is for the caller to choose.
        assert backend.engines() == ["engine-0", "engine-1", "engine-2"]
        (first, *_) = pids(backend)
        backend.execute(Retire("engine-0"))
        assert until(backend, EngineLost) == [EngineLost("engine-0", DRAINED)]
        assert not is_running(first)
        os.kill(pids(backend)[0], signal.SIGKILL)
        events = until(backend, EngineJoined)
        assert events[0] == EngineLost("engine-1", "its process was killed by signal 9 (SIGKILL)")
        assert events[1:] == [EngineJoined("engine-3")]
        assert backend.engines() == ["engine-2", "engine-3"]
        backend.execute(Retire("engine-0"))
        assert waited(backend, 0.0) == []


@pytest.mark.slow
def test_one_that_is_lost_while_another_one_is_too_many_is_not_replaced_twice() -> None:
    with running(num_engines=2) as backend:
        backend.execute(Scale(1))
        os.kill(pids(backend)[0], signal.SIGKILL)
        assert [event.engine for event in until(backend, EngineLost)] == ["engine-0"]
        assert list(backend._engines.alive) == ["engine-1"]
        # By now it is the only one.
        backend.execute(Retire("engine-1"))
        assert until(backend, EngineJoined) == [EngineLost("engine-1", DRAINED), EngineJoined("engine-2")]


def test_who_has_not_started_is_ended_where_it_is_too_many(tmp_path: Path) -> None:
    with running(start=Starts(*[f"late {tmp_path / 'told'}"] * 3)) as backend:
        backend.execute(Scale(4))
        begun = pids(backend)[1:]
        backend.execute(Scale(2))
        assert len(backend._engines.alive) == 2
        (tmp_path / "told").touch()
        assert until(backend, EngineJoined) == [EngineJoined("engine-1")]
        assert [is_running(pid) for pid in begun] == [True, False, False]
        assert waited(backend, 0.2) == []


def test_who_leaves_draws_first_what_somebody_waits_for(tmp_path: Path) -> None:
    with running(f"until {tmp_path / 'told'}", num_engines=2) as backend:
        backend.update_weights(Trainer().named_tensors(), 0)
        found: list[Any] = []
        params = [SamplingParams(max_tokens=3)]
        waits = threading.Thread(target=lambda: found.extend(backend.generate([(1, 2)], params)))
        waits.start()
        while not backend._engines.alive["engine-0"].in_flight:
            time.sleep(0.01)
        backend.execute(Scale(1))
        backend.execute(Retire("engine-0"))
        assert waited(backend, 0.2) == []
        # Whoever asks now asks another one.
        backend._engines.alive["engine-1"].loaded = backend._manifest
        assert backend._engine_with_weights() == "engine-1"
        (tmp_path / "told").touch()
        assert until(backend, EngineLost) == [EngineLost("engine-0", DRAINED)]
        waits.join(LIMIT_S)
        assert [one.token_ids for one in found] == [TOKENS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (
            "stillborn",
            "engine-1 could not be started: its process ended with exit code 1; the last it printed: no such",
        ),
        (RayTrainerError("one engine more needs 1 CPU"), "one engine more needs 1 CPU"),
        (OSError(12, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
    ],
)
def test_a_run_goes_on_without_engines_that_cannot_be_added(then: str | Exception, reason: str) -> None:
    starts = Starts(then)
    with running(start=starts) as backend:
        backend.execute(Scale(2))
        (target,) = until(backend, ScaleRequest)
        assert isinstance(target, ScaleRequest)
        assert target.number == 1 and target.reason.startswith(reason)
        load(backend, "engine-0", 0)
        assert until(backend, WeightsLoaded) == [WeightsLoaded("engine-0", 0, 7)]
        # The one that was there from the beginning is replaced as ever.
        starts.good = 1
        backend.execute(StopEngine("engine-0", "no reason"))
        assert until(backend, EngineJoined)[-1] == EngineJoined("engine-2")


@pytest.mark.slow
def test_a_run_goes_on_without_an_engine_that_was_added_and_never_draws() -> None:
    with running(start=Starts("crash", "crash"), max_restarts=1) as backend:
        backend.execute(Scale(2))
        for name in ("engine-1", "engine-2"):
            assert until(backend, EngineJoined)[-1] == EngineJoined(name)
            backend.execute(StopEngine(name, "it hangs"))
        events = until(backend, ScaleRequest)
        assert events == [
            EngineLost("engine-2", "it hangs"),
            ScaleRequest(1, "2 engines were lost " + NOTHING + ", at last engine-2: it hangs"),
        ]
        assert backend.engines() == ["engine-0"]


def test_without_any_other_engine_one_that_cannot_be_had_ends_the_run() -> None:
    starts = Starts(OSError(12, "Cannot allocate memory"))
    with running(start=starts) as backend, pytest.raises(OSError, match="Cannot allocate memory"):
        backend.execute(StopEngine("engine-0", "no reason"))
    starts = Starts("crash")
    with (
        running(start=starts, max_restarts=0) as backend,
        pytest.raises(EngineFailed, match="^1 engines were lost"),
    ):
        backend.execute(StopEngine("engine-0", "no reason"))
