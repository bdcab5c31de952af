"""The script that kills processes of a run: what counts as one that lives on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.scripts import load_script

pytestmark = pytest.mark.world

kills = load_script("killed_run")


def kills_with(below: dict[int, int]):
    return kills.KilledRun(Path("nowhere"), random.Random(0), 1, [], lambda *_: {}, (), below=below)


def test_a_process_that_ended_and_was_not_waited_for_is_gone(monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = kills_with({child.pid: kills.started(child.pid)})
    assert ended.left() == [child.pid]
    monkeypatch.setattr(kills, "GONE_S", 0.0)
    with pytest.raises(kills.Failed, match=rf"^these live on: {child.pid} b'"):
        ended.check_gone()
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert kills.started(child.pid) is None and not ended.left()
    child.wait()
    assert kills.started(child.pid) is None and not ended.left()


def test_another_process_with_the_number_of_one_that_ended_is_not_the_same():
    own = os.getpid()
    started = kills.started(own)
    assert kills_with({own: started}).left() == [own]
    assert not kills_with({own: started - 1}).left()
