"""Waits are known while they last, and a run that stalls ends with the reason, however stuck it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.observability.metrics import Spans
from millrace.orchestration import watchdog
from millrace.orchestration.fleet import Engines
from millrace.orchestration.run_folder import RunFolder
from millrace.orchestration.status import read_status
from millrace.orchestration.watchdog import Wait, Watchdog

STANDS = {"stage": "warmup", "step": 3, "steps": 9}


def watching(folder: Path, spans: Spans, *, clock: Callable[[], float] = time.perf_counter) -> Watchdog:
    return Watchdog(
        folder / "status.json",
        limit_s=60.0,
        phase=lambda: spans.open,
        facts=lambda: STANDS,
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


@pytest.mark.world
def test_the_status_is_written_while_watched_and_gone_after(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    spans = Spans()
    path = tmp_path / "status.json"
    with spans("train"), watching(tmp_path, spans):
        until = time.monotonic() + 30
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        told = json.loads(path.read_text(encoding="utf-8"))
    assert told["at"] == STANDS
    assert [wait["reason"] for wait in told["waits"]] == ["train to end"]
    assert not path.exists()


STUCK = """
    import sys, threading, time
    from pathlib import Path
    from millrace.observability.metrics import Spans
    from millrace.orchestration import watchdog

    watchdog.LOOK_S, watchdog.GRACE_S, watchdog.LAST_WORDS_S = 0.05, 0.1, WORDS
    spans, folder = Spans(), Path(sys.argv[1])

    def stalled(text):
        (folder / "said").write_text(text)
        time.sleep(60 * HANGS)

    dog = watchdog.Watchdog(
        folder / "status.json",
        limit_s=LIMIT,
        phase=lambda: spans.open,
        facts=lambda: {},
        stalled=stalled,
    )
    with dog, spans("train"), dog.waiting("trainer", "rank 1", deadline_s=WAIT):
        stuck = threading.Lock()
        stuck.acquire()
        stuck.acquire()
"""


def stuck(
    folder: Path, *, limit_s: float = 60.0, wait_s: float = 60.0, hangs: bool = False
) -> tuple[int, str]:
    program = textwrap.dedent(STUCK).replace("HANGS", str(int(hangs)))
    program = program.replace("LIMIT", str(limit_s)).replace("WAIT", str(wait_s))
    # A busy machine may be slow to speak.
    program = program.replace("WORDS", "2" if hangs else "40")
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.world
def test_a_phase_that_takes_too_long_ends_the_run_with_who_waits_for_whom(tmp_path):
    code, said = stuck(tmp_path, limit_s=0.2)
    assert code == 1
    first, second, third = said.splitlines()
    assert re.match(r"error: the run stalled: run waits for train to end since \d+ s, at most 0.2 s", first)
    assert re.match(r"  trainer waits for rank 1 since \d+ s, at most 60 s", second)
    assert third == f"continue with: millrace resume {tmp_path}"
    assert (tmp_path / "said").read_text().startswith("the run stalled")
    stall = (tmp_path / "stall.txt").read_text()
    assert "thread MainThread" in stall
    assert "in <module>" in stall


@pytest.mark.world
def test_a_wait_that_takes_too_long_ends_the_run(tmp_path):
    code, said = stuck(tmp_path, wait_s=0.2)
    assert code == 1
    assert re.match(r"error: the run stalled: trainer waits for rank 1 since \d+ s, at most 0.2 s", said)


def test_what_else_there_is_to_say_is_in_the_status(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.01)
    dog = watching(tmp_path, Spans())
    dog.more = lambda: {"engines": {"wanted": 2, "doing": {"a": "leaves"}, "reason": "", "asked": "id"}}
    RunFolder(tmp_path).recipe.write_text("")
    with dog, RunFolder(tmp_path) as folder:
        folder.lock()
        begun_s = time.monotonic()
        while (found := read_status(tmp_path).engines) is None:
            assert time.monotonic() - begun_s < 20
        assert found == Engines(2, {"a": "leaves"}, asked="id")


@pytest.mark.world
def test_last_words_that_hang_do_not_keep_the_run_alive(tmp_path):
    started = time.monotonic()
    code, _ = stuck(tmp_path, limit_s=0.2, hangs=True)
    assert (code, (tmp_path / "said").exists()) == (1, True)
    assert time.monotonic() - started < 50
