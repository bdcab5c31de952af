"""Orders, events, weights and losses, with processes that stand in for engines and start at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engines import handle
from millrace.engines.handle import EngineSettings
from millrace.engines.subprocesses import EngineFailed, SubprocessBackend
from millrace.rollout.backend import (
    EngineJoined,
    EngineLost,
    Event,
    GenerateRequest,
    GenerateResult,
    ScoreResult,
    WeightsLoaded,
)
from millrace.types import Outcome, Prompt, SamplingParams
from tests.engines.fake_engine import TOKENS
from tests.rewards.helpers import ends_within, is_running

pytestmark = pytest.mark.world

FAKE = "tests.engines.fake_engine"
PROMPT = Prompt("train:0", (1,), "text")
LIMIT_S = 60.0


class Judge:
    """Gives 1 to right answers."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.closed = False

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        self.threads.append(threading.current_thread().name)
        if "broken" in completions:
            raise ValueError("the judge is ill")
        return [Outcome("score", float(text == "right")) for text in completions]

    def close(self) -> None:
        self.closed = True


class Trainer:
    """One weight, whose number is how often it was asked for."""

    def __init__(self) -> None:
        self.num_asked = -1

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_asked += 1
        yield "weight", torch.tensor([float(self.num_asked)])


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "MODULE", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


class Clock:
    """Seconds that pass on command."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def running(manner: str = "obedient", **options: Any) -> Iterator[SubprocessBackend]:
    with SubprocessBackend(settings(manner), Judge(), Trainer().named_tensors, **options) as runtime:
        yield runtime


def settings(manner: str) -> EngineSettings:
    """Of an engine that behaves so."""
    return EngineSettings({"manner": manner.encode()}, 1)


def load(runtime: SubprocessBackend, engine: str, version: int) -> None:
    """Offer a version and have one engine load it."""
    runtime.offer(version)
    runtime.load(engine, version)


def draws(*ids: str) -> list[GenerateRequest]:
    return [GenerateRequest(id, (1, 2), SamplingParams(max_tokens=3)) for id in ids]


def until(runtime: SubprocessBackend, last: type[Event], num: int = 1) -> list[Event]:
    """Events up to so many of this kind; later ones are for the next call."""
    events: list[Event] = []
    deadline_s = time.monotonic() + LIMIT_S
    while len(places := [place for place, event in enumerate(events) if isinstance(event, last)]) < num:
        assert time.monotonic() < deadline_s, events
        events += runtime.wait(1.0)
    end = places[num - 1] + 1
    with runtime._news:
        runtime._events[:0] = events[end:]
    return events[:end]


def pids(runtime: SubprocessBackend) -> list[int]:
    return [one.process.pid for one in runtime._engines.living.values()]


def test_draws_loads_and_judgements_end_in_events() -> None:
    with running() as runtime:
        assert runtime.engines() == ["engine-0"]
        load(runtime, "engine-0", 0)
        assert until(runtime, WeightsLoaded) == [WeightsLoaded("engine-0", 0, 7)]
        runtime.submit("engine-0", draws("a", "b"))
        events = until(runtime, GenerateResult, 2)
        assert [(e.id, e.began, e.ended) for e in events if isinstance(e, GenerateResult)] == [
            ("a", 5, 8),
            ("b", 5, 8),
        ]
        assert all(isinstance(e, GenerateResult) and e.completion.token_ids == TOKENS for e in events)
        runtime.judge("call", [PROMPT] * 2, ["right", "wrong"])
        (judged,) = until(runtime, ScoreResult)
        assert isinstance(judged, ScoreResult)
        assert [outcome.value for outcome in judged.outcomes] == [1.0, 0.0]
        assert runtime._reward.threads == ["millrace-reward_0"]
        assert runtime.wait(0.0) == []


def test_engines_share_one_copy_of_a_version() -> None:
    trainer = Trainer()
    with SubprocessBackend(settings(""), Judge(), trainer.named_tensors, num_engines=2) as runtime:
        runtime.offer(0)
        for name in runtime.engines():
            runtime.load(name, 0)
        loaded = until(runtime, WeightsLoaded, 2)
        assert {e.engine for e in loaded if isinstance(e, WeightsLoaded)} == {"engine-0", "engine-1"}
        assert trainer.num_asked == 0
        load(runtime, "engine-1", 1)
        assert until(runtime, WeightsLoaded) == [WeightsLoaded("engine-1", 1, 7)]
        assert trainer.num_asked == 1


def test_the_next_version_waits_until_the_last_one_is_read() -> None:
    with running("slow") as runtime:
        load(runtime, "engine-0", 0)
        # It reads the weights some time after it was told to: were they written over, it would refuse them.
        load(runtime, "engine-0", 1)
        assert until(runtime, WeightsLoaded, 2) == [
            WeightsLoaded("engine-0", 0, 7),
            WeightsLoaded("engine-0", 1, 7),
        ]


def test_weights_that_were_brought_to_evaluate_are_not_copied_again() -> None:
    trainer = Trainer()
    with SubprocessBackend(settings("obedient"), Judge(), trainer.named_tensors, num_engines=2) as runtime:
        runtime.send(trainer.named_tensors(), 0)
        assert trainer.num_asked == 0
        for version, asked in ((0, 0), (1, 1)):
            runtime.offer(version)
            assert trainer.num_asked == asked
            for engine in ("engine-0", "engine-1"):
                runtime.load(engine, version)
            loaded = until(runtime, WeightsLoaded, 2)
            assert {
                (event.engine, event.version) for event in loaded if isinstance(event, WeightsLoaded)
            } == {
                ("engine-0", version),
                ("engine-1", version),
            }


def test_only_what_was_offered_last_is_loaded() -> None:
    trainer = Trainer()
    with SubprocessBackend(settings(""), Judge(), trainer.named_tensors) as runtime:
        for offered, wanted in ((None, 0), (0, 1), (1, 0)):
            if offered is not None:
                runtime.offer(offered)
            with pytest.raises(AssertionError, match="^it was not offered last"):
                runtime.load("engine-0", wanted)
        # The weights are taken when they are offered, whoever loads them and whenever.
        assert trainer.num_asked == 1
        runtime.load("engine-0", 1)
        assert until(runtime, WeightsLoaded) == [WeightsLoaded("engine-0", 1, 7)]
        assert trainer.num_asked == 1


def test_an_engine_that_reads_for_too_long_is_lost() -> None:
    with running("mute", load_s=0.3) as runtime:
        load(runtime, "engine-0", 0)
        load(runtime, "engine-0", 1)
        (lost,) = until(runtime, EngineLost)
        assert lost == EngineLost("engine-0", "it was still loading 0.3 s after version 1 was there")


def test_a_load_that_fails_is_tried_again() -> None:
    with running("clumsy") as runtime:
        load(runtime, "engine-0", 0)
        assert until(runtime, WeightsLoaded) == [WeightsLoaded("engine-0", 0, 7)]


def test_a_load_that_fails_twice_loses_the_engine() -> None:
    with running("liar") as runtime:
        load(runtime, "engine-0", 0)
        (lost,) = until(runtime, EngineLost)
        assert lost == EngineLost("engine-0", "it could not load version 0: weight differs")


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        ("crash", "its process ended with exit code 1; the last it printed: out of luck"),
        ("gibberish", "a frame's header was announced with 4294967295 bytes; at most 268435456 come"),
        ("mute", "it had to draw 1 completions and was not heard of for 300 s"),
    ],
)
def test_a_lost_engine_says_why_and_another_one_comes(manner: str, reason: str) -> None:
    clock = Clock()
    with running(manner, clock=clock) as runtime:
        if manner == "mute":
            # It proved its weights before it fell silent.
            runtime._engines.living["engine-0"].held = {"version": 0}
        (pid,) = pids(runtime)
        runtime.submit("engine-0", draws("a"))
        clock.now_s = 301.0 if manner == "mute" else 0.0
        assert until(runtime, EngineLost) == [EngineLost("engine-0", reason)]
        assert until(runtime, EngineJoined) == [EngineJoined("engine-1")]
        assert runtime.engines() == ["engine-1"]
        assert not is_running(pid)


def test_an_idle_engine_may_be_silent() -> None:
    clock = Clock()
    with running(clock=clock) as runtime:
        load(runtime, "engine-0", 0)
        until(runtime, WeightsLoaded)
        # One that worked would be lost as soon as it is looked at.
        clock.now_s = 1e9
        runtime._wake()
        assert runtime.wait(0.2) == []
        assert runtime.engines() == ["engine-0"]


def test_what_a_killed_engine_had_is_drawn_by_the_next_one(tmp_path: Path) -> None:
    trainer, told = Trainer(), tmp_path / "told"
    manner = settings(f"until {told}")
    with SubprocessBackend(manner, Judge(), trainer.named_tensors) as runtime:
        load(runtime, "engine-0", 0)
        until(runtime, WeightsLoaded)
        runtime.submit("engine-0", draws("a"))
        os.kill(pids(runtime)[0], signal.SIGKILL)
        assert until(runtime, EngineLost) == [
            EngineLost("engine-0", "its process was killed by signal 9 (SIGKILL)")
        ]
        # Orders for it are not heard any more.
        runtime.submit("engine-0", draws("b"))
        runtime.abort("engine-0", ["a"])
        runtime.load("engine-0", 0)
        until(runtime, EngineJoined)
        told.touch()
        runtime.load("engine-1", 0)
        until(runtime, WeightsLoaded)
        runtime.submit("engine-1", draws("c"))
        (drawn,) = until(runtime, GenerateResult)
        assert isinstance(drawn, GenerateResult)
        assert (drawn.engine, drawn.id) == ("engine-1", "c")
        assert trainer.num_asked == 0


def test_an_engine_can_be_given_up() -> None:
    with running() as runtime:
        os.kill(pids(runtime)[0], signal.SIGSTOP)
        runtime.lose("engine-0", "it drew nothing in 9 s")
        assert until(runtime, EngineLost) == [EngineLost("engine-0", "it drew nothing in 9 s")]
        assert until(runtime, EngineJoined) == [EngineJoined("engine-1")]
        runtime.lose("engine-0", "again")
        assert runtime.wait(0.2) == []


def test_engines_that_come_to_nothing_end_the_run() -> None:
    with running("crash", max_barren=1) as runtime:
        runtime.submit("engine-0", draws("a"))
        until(runtime, EngineJoined)
        runtime.submit("engine-1", draws("a"))
        with pytest.raises(EngineFailed, match="^2 engines were lost .* engine-1: .* printed: out of luck$"):
            until(runtime, EngineJoined)


def test_an_engine_that_has_drawn_may_always_be_replaced() -> None:
    with running("fragile", max_barren=0) as runtime:
        for number in range(2):
            runtime.submit(f"engine-{number}", draws("a"))
            until(runtime, GenerateResult)
            runtime.submit(f"engine-{number}", draws("fatal"))
            until(runtime, EngineJoined)
        assert runtime.engines() == ["engine-2"]


def test_an_engine_that_cannot_start_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="^engine-0 could not be started: .*exit code 1.*no such model$"):
        SubprocessBackend(settings("stillborn"), Judge(), Trainer().named_tensors)


def test_what_cannot_be_served_is_raised() -> None:
    with running("strict") as runtime:
        runtime.submit("engine-0", draws("a"))
        with pytest.raises(ValueError, match="^the prompt is empty$"):
            runtime.wait(LIMIT_S)


def test_what_a_reward_raises_is_raised() -> None:
    with running() as runtime:
        runtime.judge("call", [PROMPT], ["broken"])
        with pytest.raises(ValueError, match="^the judge is ill$"):
            runtime.wait(LIMIT_S)


class Slow(Judge):
    """Holds the first call until others wait."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.calls = threading.Event(), list[list[str]]()

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        assert self.go.wait(LIMIT_S)
        self.calls.append(list(completions))
        return super().score(prompts, completions)


def test_what_waits_for_the_reward_is_judged_in_one_call() -> None:
    """Groups of few answers then keep as many reward workers busy as the recipe asks for."""
    judge = Slow()
    with SubprocessBackend(settings(""), judge, Trainer().named_tensors) as runtime:
        for number, texts in enumerate((["right"], ["wrong", "right"], [], ["right"])):
            runtime.judge(f"call-{number}", [PROMPT] * len(texts), texts)
        judge.go.set()
        found: list[ScoreResult] = []
        while len(found) < 4:
            found += [event for event in runtime.wait(LIMIT_S) if isinstance(event, ScoreResult)]
    values = [(event.id, [outcome.value for outcome in event.outcomes]) for event in found]
    assert values == [("call-0", [1.0]), ("call-1", [0.0, 1.0]), ("call-2", []), ("call-3", [1.0])]
    assert sum(judge.calls, []) == ["right", "wrong", "right", "right"] and len(judge.calls) <= 2


class Hanging(Judge):
    over, in_time = threading.Event(), False

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        self.in_time = self.over.wait(LIMIT_S)
        raise ValueError("closed")

    def close(self) -> None:
        self.over.set()


def test_a_reward_that_hangs_keeps_nobody_from_leaving() -> None:
    judge = Hanging()
    with SubprocessBackend(settings(""), judge, Trainer().named_tensors) as runtime:
        runtime.judge("call", [PROMPT], ["right"])
    assert judge.in_time


def held() -> Counter[str]:
    """Open files of this process, memory that it shares, threads, and temporary files."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    # Address, rights, offset, device, inode, and the name if there is one.
    fields = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [name for *_, name in fields if name.startswith(("/dev/shm/", "/memfd:"))]
    threads = [f"thread {thread.name}" for thread in threading.enumerate()]
    return Counter([*files, *mapped, *threads, *os.listdir(tempfile.gettempdir())])


@pytest.mark.parametrize("ends", ["close", "error"])
def test_nothing_is_left_in_the_end(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = held()
    children: list[int] = []

    def use(runtime: SubprocessBackend) -> None:
        load(runtime, "engine-0", 0)
        until(runtime, WeightsLoaded)
        children.extend(pids(runtime))
        runtime.lose("engine-0", "no reason")
        until(runtime, EngineJoined)
        children.extend(pids(runtime))
        if ends == "error":
            raise KeyError("a mistake")

    def run() -> Any:
        with running() as runtime:
            use(runtime)
        runtime.close()
        return runtime._reward

    if ends == "error":
        with pytest.raises(KeyError, match="a mistake"):
            run()
    else:
        assert run().closed
    assert len(children) == 2
    assert not any(is_running(pid) for pid in children)
    # What other tests left to the garbage collector may be gone meanwhile.
    assert not held() - before


SCRIPT = f"""
import select
import sys
from millrace.engines import handle
from millrace.engines.handle import EngineSettings
from tests.rewards.helpers import child_of
handle.MODULE = {FAKE!r}
one = handle.start("engine-0", EngineSettings({{"manner": b"obedient"}}, 1), 1)
select.select([one.line], [], [])  # it is ready, and ends with its parent
print(child_of(one.process.pid), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_trainer_that_is_killed() -> None:
    """Not even of an engine that hangs, and would never read that its line is closed."""
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert is_running(pid)
        os.kill(pid, signal.SIGSTOP)
        trainer.kill()
        assert ends_within(pid, LIMIT_S)


def test_orders_from_another_thread_are_heard_by_who_waits() -> None:
    with running() as runtime:
        load(runtime, "engine-0", 0)
        until(runtime, WeightsLoaded)
        timer = threading.Timer(0.3, runtime.submit, ("engine-0", draws("a")))
        timer.start()
        (drawn,) = runtime.wait(LIMIT_S)
        timer.join()
        assert isinstance(drawn, GenerateResult)
