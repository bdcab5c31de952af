"""What a runtime of processes draws for a caller who waits, as an engine: beside events, whoever is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from millrace.engines.subprocesses import EngineFailed, SubprocessBackend
from millrace.rollout.backend import EngineJoined, EngineLost, GenerateResult
from millrace.types import SamplingParams
from tests.engines.fake_engine import TOKENS
from tests.engines.test_subprocesses import LIMIT_S, Trainer, _fake, draws, pids, running, until

pytestmark = pytest.mark.world

assert _fake  # every engine here is one that stands in


def ask(runtime: SubprocessBackend, num: int) -> list[tuple[int, ...]]:
    return [c.token_ids for c in runtime.generate([(1,)] * num, [SamplingParams()] * num)]


def test_what_it_generates_itself_is_no_event() -> None:
    with running() as runtime:
        with pytest.raises(RuntimeError, match="no engine was given weights yet"):
            print(runtime.version)
        runtime.send(Trainer().named_tensors(), 0)
        assert runtime.version == 0
        runtime.submit("engine-0", draws("a"))
        assert ask(runtime, 2) == [TOKENS, TOKENS]
        (drawn,) = runtime.wait(LIMIT_S)
        assert isinstance(drawn, GenerateResult)
        assert drawn.id == "a"


def until_it_draws(runtime: SubprocessBackend) -> None:
    while not runtime._engines.living["engine-0"].drawing:
        time.sleep(0.01)


def test_what_it_generates_survives_a_loss(tmp_path: Path) -> None:
    with running(f"until {tmp_path / 'told'}") as runtime:
        runtime.send(Trainer().named_tensors(), 0)
        asked = threading.Thread(target=lambda: found.extend(ask(runtime, 3)))
        found: list[tuple[int, ...]] = []
        asked.start()
        until_it_draws(runtime)
        assert found == []
        os.kill(pids(runtime)[0], signal.SIGKILL)
        assert until(runtime, EngineLost) == [
            EngineLost("engine-0", "its process was killed by signal 9 (SIGKILL)")
        ]
        (tmp_path / "told").touch()
        asked.join(LIMIT_S)
        assert found == [TOKENS] * 3
        assert runtime.wait(0.0) == [EngineJoined("engine-1")]


def test_a_deadline_that_is_missed_has_its_name() -> None:
    missed = pytest.raises(EngineFailed, match=r"^waited 0.1 s for an engine to hold the newest weights$")
    with running(load_s=0.1) as runtime, missed:
        ask(runtime, 1)


def test_who_waits_hears_of_the_end() -> None:
    found: list[BaseException] = []

    def wait(runtime: SubprocessBackend) -> None:
        try:
            ask(runtime, 1)
        except RuntimeError as error:
            found.append(error)

    with running("mute") as runtime:
        asked = threading.Thread(target=wait, args=(runtime,))
        runtime._note = runtime._engines.living["engine-0"].held = {"version": 0}
        asked.start()
        until_it_draws(runtime)
    asked.join(LIMIT_S)
    assert [str(error) for error in found] == ["the engines were ended while somebody waited for them"]


def test_what_it_cannot_serve_itself_harms_nothing_else() -> None:
    with running("strict") as runtime:
        runtime.send(Trainer().named_tensors(), 0)
        with pytest.raises(ValueError, match="^prompt 0 of 2: the prompt is empty$"):
            ask(runtime, 2)
        assert runtime.wait(0.0) == []
