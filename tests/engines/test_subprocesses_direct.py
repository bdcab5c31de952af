"""What a runtime of processes draws for a caller who waits, as an engine: beside events, whoever is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from millrace.engines.subprocesses import EngineFailed, SubprocessBackend
from millrace.rollout.backend import (
    EngineJoined,
    EngineLost,
    GenerateResult,
    Submit,
)
from millrace.types import SamplingParams
from tests.engines.fake_engine import TOKENS
from tests.engines.test_subprocesses import LIMIT_S, Trainer, _fake, pids, requests, running, until, waited

pytestmark = pytest.mark.world

assert _fake  # every engine here is one that stands in


def ask(backend: SubprocessBackend, num: int) -> list[tuple[int, ...]]:
    return [c.token_ids for c in backend.generate([(1,)] * num, [SamplingParams()] * num)]


def test_what_it_generates_itself_is_no_event() -> None:
    with running() as backend:
        with pytest.raises(RuntimeError, match="no engine was given weights yet"):
            print(backend.version)
        backend.update_weights(Trainer().named_tensors(), 0)
        assert backend.version == 0
        backend.execute(Submit("engine-0", requests("a")))
        assert ask(backend, 2) == [TOKENS, TOKENS]
        (completed,) = waited(backend, LIMIT_S)
        assert isinstance(completed, GenerateResult)
        assert completed.id == "a"


def until_it_generates(backend: SubprocessBackend) -> None:
    while not backend._engines.alive["engine-0"].in_flight:
        time.sleep(0.01)


def test_what_it_generates_survives_a_loss(tmp_path: Path) -> None:
    with running(f"until {tmp_path / 'told'}") as backend:
        backend.update_weights(Trainer().named_tensors(), 0)
        caller = threading.Thread(target=lambda: found.extend(ask(backend, 3)))
        found: list[tuple[int, ...]] = []
        caller.start()
        until_it_generates(backend)
        assert found == []
        os.kill(pids(backend)[0], signal.SIGKILL)
        assert until(backend, EngineLost) == [
            EngineLost("engine-0", "its process was killed by signal 9 (SIGKILL)")
        ]
        (tmp_path / "told").touch()
        caller.join(LIMIT_S)
        assert found == [TOKENS] * 3
        assert waited(backend, 0.0) == [EngineJoined("engine-1")]


def test_a_deadline_that_is_missed_has_its_name() -> None:
    missed = pytest.raises(EngineFailed, match=r"^waited 0.1 s for an engine to load the newest weights$")
    with running(load_s=0.1) as backend, missed:
        ask(backend, 1)


def test_a_wait_ends_with_the_engines() -> None:
    found: list[BaseException] = []

    def wait(backend: SubprocessBackend) -> None:
        try:
            ask(backend, 1)
        except RuntimeError as error:
            found.append(error)

    with running("mute") as backend:
        caller = threading.Thread(target=wait, args=(backend,))
        backend._manifest = backend._engines.alive["engine-0"].loaded = {"version": 0}
        caller.start()
        until_it_generates(backend)
    caller.join(LIMIT_S)
    assert [str(error) for error in found] == ["the engines were closed during a wait"]


def test_what_it_cannot_serve_itself_harms_nothing_else() -> None:
    with running("strict") as backend:
        backend.update_weights(Trainer().named_tensors(), 0)
        with pytest.raises(ValueError, match="^prompt 0 of 2: the prompt is empty$"):
            ask(backend, 2)
        assert waited(backend, 0.0) == []
