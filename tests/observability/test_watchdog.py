"""Waits are known while they last, and a run that stalls ends with the reason, however stuck it is."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.observability import watchdog
from millrace.observability.metrics import Spans
from millrace.observability.watchdog import Wait, Watchdog
from millrace.rollout.engine_pool import Engines
from millrace.run.folder import RunFolder
from millrace.run.status import read_status

STANDS = {"stage": "sft", "step": 3, "steps": 9}


def watching(
    folder: Path,
    spans: Spans,
    *,
    clock: Callable[[], float] = time.perf_counter,
    facts: Callable[[], dict[str, Any]] = lambda: STANDS,
) -> Watchdog:
    return Watchdog(
        folder / "status.json",
        limit_s=60.0,
        phase=lambda: spans.open,
        facts=facts,
        stalled=lambda text: None,
        clock=clock,
    )


def test_waits_are_known_while_they_last(tmp_path):
    spans = Spans()
    dog = watching(tmp_path, spans)
    assert dog.waits() == []
    with spans("sample"), dog.waiting("trainer", "batch 3", deadline_s=7.0, on=lambda: ["group 12"]):
        phase, wait = dog.waits()
    assert (phase.owner, phase.reason, phase.deadline_s) == ("run", "sample to end", 60.0)
    assert (wait.owner, wait.reason, wait.deadline_s, wait.on) == ("trainer", "batch 3", 7.0, ("group 12",))
    assert 0 <= wait.waited_s <= phase.waited_s
    assert dog.waits() == []


def test_a_wait_that_fails_is_over(tmp_path):
    dog = watching(tmp_path, Spans())
    with pytest.raises(KeyError), dog.waiting("trainer", "batch 3", deadline_s=7.0):
        raise KeyError
    assert dog.waits() == []


def test_two_waits_of_one_kind_are_two(tmp_path):
    dog = watching(tmp_path, Spans())
    with dog.waiting("a", "b", deadline_s=1.0):
        with dog.waiting("a", "b", deadline_s=1.0):
            assert len(dog.waits()) == 2
        assert len(dog.waits()) == 1


def test_the_innermost_wait_of_ten_seconds_is_worth_a_line(tmp_path):
    now = [0.0]
    spans = Spans(lambda: now[0])
    dog = watching(tmp_path, spans, clock=lambda: now[0])
    with spans("sample"):
        now[0] = 5.0
        with dog.waiting("trainer", "batch 3", deadline_s=600.0):
            now[0] = 9.9
            assert dog.line() == ""
            now[0] = 17.0
            assert dog.line() == "waiting 12 s of 600: trainer for batch 3"
    assert dog.line() == ""


def test_a_wait_says_who_what_since_when_until_when_and_on_whom():
    assert str(Wait("trainer", "batch 3", 12.4, 600.0, ("group 7 (engine-0)", "group 9"))) == (
        "trainer waits for batch 3 since 12 s, at most 600 s: group 7 (engine-0); group 9"
    )
    assert str(Wait("run", "train to end", 0.2, 0.5)) == "run waits for train to end since 0 s, at most 0.5 s"


class Looks:
    """Where the run stands, and how often the watchdog has asked for it."""

    def __init__(self) -> None:
        self._num = threading.Semaphore(0)

    def __call__(self) -> dict[str, Any]:
        self._num.release()
        return STANDS

    def wait(self) -> None:
        """Until it has asked twice: what it heard the first time is written."""
        for _ in range(2):
            assert self._num.acquire(timeout=60)


def test_the_status_is_written_while_watched_and_gone_after(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    spans, looks = Spans(), Looks()
    path = tmp_path / "status.json"
    with spans("train"), watching(tmp_path, spans, facts=looks):
        looks.wait()
        told = json.loads(path.read_text(encoding="utf-8"))
    assert told["at"] == STANDS
    assert [wait["reason"] for wait in told["waits"]] == ["train to end"]
    assert not path.exists()


STUCK = """
    import sys, threading, time
    from pathlib import Path
    from millrace.observability.metrics import Spans
    from millrace.observability import watchdog

    folder, limit_s, wait_s, hangs = Path(sys.argv[1]), *map(float, sys.argv[2:])
    watchdog.LOOK_S, watchdog.LAST_WORDS_S = 0.05, 0.1 if hangs else 60.0
    now_s, said = [0.0], threading.Event()
    spans = Spans(lambda: now_s[0])

    class Words(threading.Thread):
        # However long they take to begin: time is counted from then on.
        def join(self, timeout=None):
            said.wait()
            super().join(timeout)

    def stalled(text):
        (folder / "said").write_text(text)
        said.set()
        time.sleep(600 * hangs)

    dog = watchdog.Watchdog(
        folder / "status.json",
        limit_s=limit_s,
        phase=lambda: spans.open,
        facts=lambda: {},
        stalled=stalled,
        clock=lambda: now_s[0],
    )
    threading.Thread = Words
    with dog, spans("train"), dog.waiting("trainer", "rank 1", deadline_s=wait_s):
        now_s[0] = 100.0
        stuck = threading.Lock()
        stuck.acquire()
        stuck.acquire()
"""


def stuck(folder: Path, *, limit_s: float, wait_s: float, hangs: bool = False) -> tuple[int, str]:
    """What a run says that hangs in a phase and in a wait from 0 s on, once its clock is at 100 s."""
    given = [str(folder), str(limit_s), str(wait_s), str(int(hangs))]
    command = [sys.executable, "-c", textwrap.dedent(STUCK), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stderr


@pytest.mark.world
def test_a_phase_that_takes_too_long_ends_the_run_with_who_waits_for_whom(tmp_path):
    code, said = stuck(tmp_path, limit_s=70, wait_s=600)
    assert code == 1
    assert said.splitlines() == [
        "error: the run stalled: run waits for train to end since 100 s, at most 70 s",
        "  trainer waits for rank 1 since 100 s, at most 600 s",
        f"continue with: millrace resume {tmp_path}",
    ]
    assert (tmp_path / "said").read_text().startswith("the run stalled")
    stall = (tmp_path / "stall.txt").read_text()
    assert "thread MainThread" in stall
    assert "in <module>" in stall


@pytest.mark.world
def test_a_wait_that_takes_too_long_ends_the_run(tmp_path):
    code, said = stuck(tmp_path, limit_s=600, wait_s=70)
    assert code == 1
    assert said.startswith("error: the run stalled: trainer waits for rank 1 since 100 s, at most 70 s\n")


def test_what_else_there_is_to_say_is_in_the_status(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    looks = Looks()
    dog = watching(tmp_path, Spans(), facts=looks)
    engines = {"target": 2, "activity": {"a": "draining"}, "reason": "", "last_request": "id"}
    RunFolder(tmp_path).recipe.write_text("")
    with dog, dog.reporting(lambda: {"engines": engines}), RunFolder(tmp_path) as folder:
        folder.lock()
        looks.wait()
        assert read_status(tmp_path).engines == Engines(2, {"a": "draining"}, last_request="id")


@pytest.mark.world
def test_last_words_that_hang_do_not_keep_the_run_alive(tmp_path):
    code, _ = stuck(tmp_path, limit_s=70, wait_s=600, hangs=True)
    assert (code, (tmp_path / "said").exists()) == (1, True)
