"""An engine's process from the trainer's side: what it is started from, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.engines.handle import read_files, write_files
from millrace.engines.subprocesses import START_S, SupervisedEngine
from millrace.engines.wire import FrameError
from tests.engines.test_real_engines import saved
from tests.rewards.helpers import comes, ends_within


def test_files_that_were_read_are_written_again(tmp_path: Path) -> None:
    files = {"engine.json": b"{}", "deep/er/name": b"\0\1"}
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    write_files(files, tmp_path / "one")
    write_files(read_files(tmp_path / "one"), tmp_path / "other")
    assert read_files(tmp_path / "other") == files
    assert (tmp_path / "other" / "deep" / "er" / "name").read_bytes() == b"\0\1"


@pytest.mark.parametrize("name", ["/tmp/name", "deep/../../name"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep" / "one"
    folder.mkdir(parents=True)
    with pytest.raises(FrameError, match=f"a file of the engine is called {name}, which leads out"):
        write_files({"engine.json": b"{}", name: b""}, folder)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def silent(until_s: float, **state: Any) -> SupervisedEngine:
    """An engine whose last message came at 100 s; it is so late now."""
    nothing: Any = SimpleNamespace()
    seconds = iter([100.0, until_s])
    return SupervisedEngine("engine-0", nothing, lambda: next(seconds), **state)


@pytest.mark.parametrize(
    ("state", "most_s", "doing"),
    [
        ({"ready": False}, START_S, "to start"),
        ({"ready": True, "loading": {"version": 3}}, 7.0, "to load version 3"),
        (
            {"ready": True, "loaded": {"version": 3}, "in_flight": {"a", "b"}},
            7.0,
            "to generate 2 completions",
        ),
    ],
)
def test_an_engine_that_works_is_overdue_when_it_was_silent_for_too_long(
    state: dict[str, Any], most_s: float, doing: str
) -> None:
    assert silent(100.0 + most_s, **state).overdue(7.0) == ""
    assert (
        silent(101.0 + most_s, **state).overdue(7.0) == f"it had {doing} and sent no message for {most_s:g} s"
    )


def test_an_idle_engine_is_never_overdue() -> None:
    assert silent(1e9, ready=True, loaded={"version": 3}).overdue(7.0) == ""
    # Its request waits for weights.
    assert silent(1e9, ready=True, in_flight={"a"}).overdue(7.0) == ""


START = """
import os, signal, sys
from pathlib import Path
from millrace.engines.handle import EngineSettings, read_files, start
from tests.rewards.helpers import child_of
one = start("engine-0", EngineSettings(read_files(Path(sys.argv[1])), 1), 1)
engine = child_of(one._popen.pid)
os.kill(engine, signal.SIGSTOP)
print(engine, flush=True)
sys.stdin.read()
"""


@pytest.mark.attack("processes that outlive who started them")
@pytest.mark.world
@pytest.mark.timeout(300)
def test_nothing_stays_of_a_trainer_that_is_killed_while_an_engine_starts(tmp_path: Path) -> None:
    """Not even of an engine that is stopped, and would never run again."""
    shell, place = tmp_path / "shell", tmp_path / "temporary"
    for folder in (shell, place):
        folder.mkdir()
    saved(shell)
    command = [sys.executable, "-c", START, str(shell)]
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as trainer:
        assert trainer.stdout is not None
        engine = int(trainer.stdout.readline())
        (folder,) = place.glob("millrace-engine-*/engine.json")
        trainer.kill()
    assert ends_within(engine)
    assert comes(lambda: not list(place.glob("millrace-engine-*")))
