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
from millrace.observability.plain import plain_text
from millrace.rollout.backend import (
    Abort,
    EngineJoined,
    EngineLost,
    Event,
    GenerateRequest,
    GenerateResult,
    LoadWeights,
    Score,
    ScoreResult,
    StopEngine,
    Submit,
    UpdateWeights,
    WeightsLoaded,
)
from millrace.types import Outcome, Prompt, SamplingParams
from tests.engines.fake_engine import TOKENS
from tests.rewards.helpers import ends_within, is_running

pytestmark = pytest.mark.world

FAKE = "tests.engines.fake_engine:serve"
PROMPT = Prompt("train:0", (1,), "text")
LIMIT_S = 60.0


class Judge:
    """Gives 1 to right answers."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.closed = False

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[object] = ()
    ) -> list[Outcome]:
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
    monkeypatch.setattr(handle, "ENTRY", FAKE)


class Clock:
    """Seconds that pass on command."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def running(manner: str = "obedient", **options: Any) -> Iterator[SubprocessBackend]:
    with SubprocessBackend(settings(manner), Judge(), Trainer().named_tensors, **options) as backend:
        yield backend


def settings(manner: str) -> EngineSettings:
    """Of an engine that behaves so."""
    return EngineSettings({"manner": manner.encode()}, 1)


def load(backend: SubprocessBackend, engine: str, version: int) -> None:
    """Offer a version and have one engine load it."""
    backend.execute(UpdateWeights(version))
    backend.execute(LoadWeights(engine, version))


def requests(*ids: str) -> list[GenerateRequest]:
    return [GenerateRequest(id, (1, 2), SamplingParams(max_tokens=3)) for id in ids]


def waited(backend: SubprocessBackend, timeout_s: float) -> list[Event]:
    """The events of one wait."""
    backend.wait(timeout_s)
    return backend.poll()


def until(backend: SubprocessBackend, last: type[Event], num: int = 1) -> list[Event]:
    """Events up to so many of this kind; later ones are for the next call."""
    events: list[Event] = []
    deadline_s = time.monotonic() + LIMIT_S
    while len(places := [place for place, event in enumerate(events) if isinstance(event, last)]) < num:
        assert time.monotonic() < deadline_s, events
        events += waited(backend, 1.0)
    end = places[num - 1] + 1
    with backend._changed:
        backend._events[:0] = events[end:]
    return events[:end]


def pids(backend: SubprocessBackend) -> list[int]:
    return [one.handle._popen.pid for one in backend._engines.alive.values()]


def test_draws_loads_and_judgements_end_in_events() -> None:
    with running() as backend:
        assert backend.engines() == ["engine-0"]
        load(backend, "engine-0", 0)
        assert until(backend, WeightsLoaded) == [WeightsLoaded("engine-0", 0, 7)]
        backend.execute(Submit("engine-0", requests("a", "b")))
        events = until(backend, GenerateResult, 2)
        assert [(e.id, e.began, e.ended) for e in events if isinstance(e, GenerateResult)] == [
            ("a", 5, 8),
            ("b", 5, 8),
        ]
        assert all(isinstance(e, GenerateResult) and e.completion.token_ids == TOKENS for e in events)
        backend.execute(Score("call", [PROMPT] * 2, ["right", "wrong"]))
        (judged,) = until(backend, ScoreResult)
        assert isinstance(judged, ScoreResult)
        assert [outcome.value for outcome in judged.outcomes] == [1.0, 0.0]
        assert backend._reward.threads == ["millrace-reward_0"]
        assert waited(backend, 0.0) == []


def test_counters_of_engines_with_workers_are_metrics_also_those_of_lost_ones() -> None:
    with running("divided", num_engines=2) as backend:
        assert backend.metrics == {}
        backend.execute(UpdateWeights(0))
        for name in backend.engines():
            backend.execute(LoadWeights(name, 0))
            backend.execute(Submit(name, requests(name)))
        until(backend, GenerateResult, 2)
        total = {"engine/prompt_tokens_computed": 20.0, "engine/workers_lost": 2.0}
        assert backend.metrics == {**total, "engine/imported_fraction": 0.5}
        backend.execute(StopEngine("engine-0", "on purpose"))
        until(backend, EngineLost)
        assert backend.metrics == {**total, "engine/imported_fraction": 0.5}


def test_engines_share_one_copy_of_a_version() -> None:
    trainer = Trainer()
    with SubprocessBackend(settings(""), Judge(), trainer.named_tensors, num_engines=2) as backend:
        backend.execute(UpdateWeights(0))
        for name in backend.engines():
            backend.execute(LoadWeights(name, 0))
        loaded = until(backend, WeightsLoaded, 2)
        assert {e.engine for e in loaded if isinstance(e, WeightsLoaded)} == {"engine-0", "engine-1"}
        assert trainer.num_asked == 0
        load(backend, "engine-1", 1)
        assert until(backend, WeightsLoaded) == [WeightsLoaded("engine-1", 1, 7)]
        assert trainer.num_asked == 1


@pytest.mark.slow
def test_the_next_version_waits_until_the_last_one_is_read() -> None:
    with running("slow") as backend:
        load(backend, "engine-0", 0)
        # It reads the weights some time after it was told to: were they written over, it would refuse them.
        load(backend, "engine-0", 1)
        assert until(backend, WeightsLoaded, 2) == [
            WeightsLoaded("engine-0", 0, 7),
            WeightsLoaded("engine-0", 1, 7),
        ]


def test_weights_that_were_brought_to_evaluate_are_not_copied_again() -> None:
    trainer = Trainer()
    with SubprocessBackend(settings("obedient"), Judge(), trainer.named_tensors, num_engines=2) as backend:
        backend.update_weights(trainer.named_tensors(), 0)
        assert trainer.num_asked == 0
        for version, expected in ((0, 0), (1, 1)):
            backend.execute(UpdateWeights(version))
            assert trainer.num_asked == expected
            for engine in ("engine-0", "engine-1"):
                backend.execute(LoadWeights(engine, version))
            loaded = until(backend, WeightsLoaded, 2)
            assert {
                (event.engine, event.version) for event in loaded if isinstance(event, WeightsLoaded)
            } == {
                ("engine-0", version),
                ("engine-1", version),
            }


def test_only_what_was_offered_last_is_loaded() -> None:
    trainer = Trainer()
    with SubprocessBackend(settings(""), Judge(), trainer.named_tensors) as backend:
        for offered, target in ((None, 0), (0, 1), (1, 0)):
            if offered is not None:
                backend.execute(UpdateWeights(offered))
            with pytest.raises(AssertionError, match="^no weight update had this version last"):
                backend.execute(LoadWeights("engine-0", target))
        # The weights are taken when they are offered, whoever loads them and whenever.
        assert trainer.num_asked == 1
        backend.execute(LoadWeights("engine-0", 1))
        assert until(backend, WeightsLoaded) == [WeightsLoaded("engine-0", 1, 7)]
        assert trainer.num_asked == 1


def test_an_engine_that_reads_for_too_long_is_lost() -> None:
    with running("mute", load_s=0.3) as backend:
        load(backend, "engine-0", 0)
        load(backend, "engine-0", 1)
        (lost,) = until(backend, EngineLost)
        assert lost == EngineLost("engine-0", "it was still loading 0.3 s after version 1 was written")


def test_a_load_that_fails_is_tried_again() -> None:
    with running("clumsy") as backend:
        load(backend, "engine-0", 0)
        assert until(backend, WeightsLoaded) == [WeightsLoaded("engine-0", 0, 7)]


def test_a_load_that_fails_twice_loses_the_engine() -> None:
    with running("liar") as backend:
        load(backend, "engine-0", 0)
        (lost,) = until(backend, EngineLost)
        assert lost == EngineLost("engine-0", "it could not load version 0: weight differs")


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        ("crash", "its process ended with exit code 1; the last it printed: out of luck"),
        ("gibberish", "wrote into its socket what is no frame: " + plain_text(repr(b"\xff" * 100), 100)),
        ("mute", "it had to generate 1 completions and sent no message for 300 s"),
    ],
)
def test_a_lost_engine_says_why_and_another_one_comes(manner: str, reason: str) -> None:
    clock = Clock()
    with running(manner, clock=clock) as backend:
        if manner == "mute":
            # It proved its weights before it fell silent.
            backend._engines.alive["engine-0"].loaded = {"version": 0}
        (pid,) = pids(backend)
        backend.execute(Submit("engine-0", requests("a")))
        clock.now_s = 301.0 if manner == "mute" else 0.0
        assert until(backend, EngineLost) == [EngineLost("engine-0", reason)]
        assert until(backend, EngineJoined) == [EngineJoined("engine-1")]
        assert backend.engines() == ["engine-1"]
        assert not is_running(pid)


def test_an_idle_engine_may_be_silent() -> None:
    clock = Clock()
    with running(clock=clock) as backend:
        load(backend, "engine-0", 0)
        until(backend, WeightsLoaded)
        # One that worked would be lost as soon as it is looked at.
        clock.now_s = 1e9
        backend._wake.set()
        assert waited(backend, 0.2) == []
        assert backend.engines() == ["engine-0"]


def test_what_a_killed_engine_had_is_drawn_by_the_next_one(tmp_path: Path) -> None:
    trainer, told = Trainer(), tmp_path / "told"
    manner = settings(f"until {told}")
    with SubprocessBackend(manner, Judge(), trainer.named_tensors) as backend:
        load(backend, "engine-0", 0)
        until(backend, WeightsLoaded)
        backend.execute(Submit("engine-0", requests("a")))
        os.kill(pids(backend)[0], signal.SIGKILL)
        assert until(backend, EngineLost) == [
            EngineLost("engine-0", "its process was killed by signal 9 (SIGKILL)")
        ]
        # Orders for it are not heard any more.
        backend.execute(Submit("engine-0", requests("b")))
        backend.execute(Abort("engine-0", ["a"]))
        backend.execute(LoadWeights("engine-0", 0))
        until(backend, EngineJoined)
        told.touch()
        backend.execute(LoadWeights("engine-1", 0))
        until(backend, WeightsLoaded)
        backend.execute(Submit("engine-1", requests("c")))
        (completed,) = until(backend, GenerateResult)
        assert isinstance(completed, GenerateResult)
        assert (completed.engine, completed.id) == ("engine-1", "c")
        assert trainer.num_asked == 0


@pytest.mark.slow
def test_an_engine_can_be_given_up() -> None:
    with running() as backend:
        os.kill(pids(backend)[0], signal.SIGSTOP)
        backend.execute(StopEngine("engine-0", "it drew nothing in 9 s"))
        assert until(backend, EngineLost) == [EngineLost("engine-0", "it drew nothing in 9 s")]
        assert until(backend, EngineJoined) == [EngineJoined("engine-1")]
        backend.execute(StopEngine("engine-0", "again"))
        assert waited(backend, 0.2) == []


def test_engines_that_come_to_nothing_end_the_run() -> None:
    with running("crash", max_restarts=1) as backend:
        backend.execute(Submit("engine-0", requests("a")))
        until(backend, EngineJoined)
        backend.execute(Submit("engine-1", requests("a")))
        with pytest.raises(EngineFailed, match="^2 engines were lost .* engine-1: .* printed: out of luck$"):
            until(backend, EngineJoined)


@pytest.mark.slow
def test_an_engine_that_has_drawn_may_always_be_replaced() -> None:
    with running("fragile", max_restarts=0) as backend:
        for number in range(2):
            backend.execute(Submit(f"engine-{number}", requests("a")))
            until(backend, GenerateResult)
            backend.execute(Submit(f"engine-{number}", requests("fatal")))
            until(backend, EngineJoined)
        assert backend.engines() == ["engine-2"]


def test_an_engine_that_cannot_start_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="^engine-0 could not be started: .*exit code 1.*no such model$"):
        SubprocessBackend(settings("stillborn"), Judge(), Trainer().named_tensors)


def test_what_cannot_be_served_is_raised() -> None:
    with running("strict") as backend:
        backend.execute(Submit("engine-0", requests("a")))
        with pytest.raises(ValueError, match="^the prompt is empty$"):
            backend.wait(LIMIT_S)


def test_what_a_reward_raises_is_raised() -> None:
    with running() as backend:
        backend.execute(Score("call", [PROMPT], ["broken"]))
        with pytest.raises(ValueError, match="^the judge is ill$"):
            backend.wait(LIMIT_S)


class Slow(Judge):
    """Holds the first call until others wait."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.calls = threading.Event(), list[list[str]]()

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[object] = ()
    ) -> list[Outcome]:
        assert self.go.wait(LIMIT_S)
        self.calls.append(list(completions))
        return super().score(prompts, completions)


def test_what_waits_for_the_reward_is_judged_in_one_call() -> None:
    """Groups of few answers then keep as many reward workers busy as the recipe asks for."""
    score = Slow()
    with SubprocessBackend(settings(""), score, Trainer().named_tensors) as backend:
        for number, texts in enumerate((["right"], ["wrong", "right"], [], ["right"])):
            backend.execute(Score(f"call-{number}", [PROMPT] * len(texts), texts))
        score.go.set()
        found: list[ScoreResult] = []
        while len(found) < 4:
            found += [event for event in waited(backend, LIMIT_S) if isinstance(event, ScoreResult)]
    values = [(event.id, [outcome.value for outcome in event.outcomes]) for event in found]
    assert values == [("call-0", [1.0]), ("call-1", [0.0, 1.0]), ("call-2", []), ("call-3", [1.0])]
    assert sum(score.calls, []) == ["right", "wrong", "right", "right"] and len(score.calls) <= 2


class Hanging(Judge):
    over, in_time = threading.Event(), False

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[object] = ()
    ) -> list[Outcome]:
        self.in_time = self.over.wait(LIMIT_S)
        raise ValueError("closed")

    def close(self) -> None:
        self.over.set()


def test_a_reward_that_hangs_keeps_nobody_from_leaving() -> None:
    score = Hanging()
    with SubprocessBackend(settings(""), score, Trainer().named_tensors) as backend:
        backend.execute(Score("call", [PROMPT], ["right"]))
    assert score.in_time


def weights_held() -> Counter[str]:
    """Open files of this process, memory that it shares, threads, and temporary files."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    # Address, rights, offset, device, inode, and the name if there is one.
    fields = [channel.split(maxsplit=5) for channel in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [name for *_, name in fields if name.startswith(("/dev/shm/", "/memfd:"))]
    threads = [f"thread {thread.name}" for thread in threading.enumerate()]
    return Counter([*files, *mapped, *threads, *os.listdir(tempfile.gettempdir())])


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("ends", ["close", "error"])
def test_nothing_is_left_in_the_end(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = weights_held()
    children: list[int] = []

    def use(backend: SubprocessBackend) -> None:
        load(backend, "engine-0", 0)
        until(backend, WeightsLoaded)
        children.extend(pids(backend))
        backend.execute(StopEngine("engine-0", "no reason"))
        until(backend, EngineJoined)
        children.extend(pids(backend))
        if ends == "error":
            raise KeyError("a mistake")

    def run() -> Any:
        with running() as backend:
            use(backend)
        backend.close()
        return backend._reward

    if ends == "error":
        with pytest.raises(KeyError, match="a mistake"):
            run()
    else:
        assert run().closed
    assert len(children) == 2
    assert not any(is_running(pid) for pid in children)
    # What other tests left to the garbage collector may be gone meanwhile.
    assert not weights_held() - before


SCRIPT = f"""
import sys
from millrace.engines import handle
from millrace.engines.handle import EngineSettings
from tests.rewards.helpers import child_of
handle.ENTRY = {FAKE!r}
one = handle.start("engine-0", EngineSettings({{"manner": b"obedient"}}, 1), 1)
while not one.receive():  # it is ready, and ends with its parent
    one.watch()
print(child_of(one._popen.pid), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_trainer_that_is_killed() -> None:
    """Not even of an engine that hangs, and would never read that its connection is closed."""
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert is_running(pid)
        os.kill(pid, signal.SIGSTOP)
        trainer.kill()
        assert ends_within(pid, LIMIT_S)


def test_commands_of_another_thread_wake_a_wait() -> None:
    with running() as backend:
        load(backend, "engine-0", 0)
        until(backend, WeightsLoaded)
        timer = threading.Timer(0.3, backend.execute, [Submit("engine-0", requests("a"))])
        timer.start()
        (completed,) = waited(backend, LIMIT_S)
        timer.join()
        assert isinstance(completed, GenerateResult)
