"""An engine's process from the trainer's side: what it is started from, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.orchestration.runtime.child import read_files, write_files
from tests.orchestration.runtime.test_real_engines import LIMIT_S, saved
from tests.rewards.helpers import ends_within


def test_files_that_were_read_are_written_again(tmp_path: Path) -> None:
    files = {"engine.json": b"{}", "deep/er/name": b"\0\1"}
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    write_files(files, tmp_path / "one")
    write_files(read_files(tmp_path / "one"), tmp_path / "other")
    assert read_files(tmp_path / "other") == files
    assert (tmp_path / "other" / "deep" / "er" / "name").read_bytes() == b"\0\1"


START = """
import sys
from pathlib import Path
from millrace.orchestration.runtime.child import Settings, read_files, start
one = start("engine-0", Settings(read_files(Path(sys.argv[1])), 1), 1)
print(one.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.world
@pytest.mark.timeout(300)
def test_no_folder_stays_of_a_trainer_that_is_killed_while_an_engine_starts(tmp_path: Path) -> None:
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
    assert ends_within(engine, LIMIT_S)
    assert not list(place.glob("millrace-engine-*"))
