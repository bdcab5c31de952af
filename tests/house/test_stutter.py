"""The script that stops processes: all of them go on, and the exit code is the command's."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest

from tests.house.scripts import load_script
from tests.house.source import ROOT

pytestmark = pytest.mark.world

stutter = load_script("stutter")
# A child that counts until it has counted so far, however often it is stopped.
CHILD = "x = 0\nwhile x < 10_000_000: x += 1\nprint('counted')"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])\nsys.exit(7)"


@pytest.mark.slow
def test_children_are_stopped_and_go_on_and_the_exit_code_is_passed_on():
    command = [sys.executable, str(ROOT / "scripts" / "stutter.py"), "--pause", "0.5", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 7, done.stderr
    assert "counted\n" in done.stdout
    (stops,) = re.findall(r"^(\d+) stops of 0.1 to 0.5 s$", done.stdout, re.MULTILINE)
    assert int(stops) > 0


def test_what_is_stopped_goes_on_when_the_script_is_interrupted(monkeypatch):
    signals: list[tuple[int, int]] = []

    def note(process: int, number: int) -> None:
        signals.append((process, number))
        if number == stutter.signal.SIGSTOP:
            raise KeyboardInterrupt

    monkeypatch.setattr(stutter, "below", lambda process: iter([12345]))
    monkeypatch.setattr(stutter, "_runs", lambda process: True)
    monkeypatch.setattr(stutter.os, "kill", note)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as command:
        with pytest.raises(KeyboardInterrupt):
            stutter.stutter(command, random.Random(0), 0.01)
        assert command.stdin is not None
        command.stdin.write(b"\n")
    assert [number for _, number in signals] == [stutter.signal.SIGSTOP, stutter.signal.SIGCONT]
