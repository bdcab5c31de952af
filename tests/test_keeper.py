"""A keeper ends its child and all that the child started, and ends as the child did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from millrace.keeper import keeper_command
from tests.rewards.helpers import LIMIT_S, ends_within, is_running

pytestmark = pytest.mark.world

# Starts a process in its own group, one in a session of its own and one that is nobody's child, then waits.
FAMILY = """
import os, subprocess, sys, time
nothing = subprocess.DEVNULL
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
start = "subprocess.Popen(sleep, start_new_session=True, stdout=-3, stderr=-3).pid"
orphan = f"import subprocess; sleep = {sleep!r}; print({start})"
pids = [
    os.getpid(),
    subprocess.Popen(sleep, stdout=nothing, stderr=nothing).pid,
    eval(start),
    int(subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE).stdout),
]
print(*pids, flush=True)
time.sleep(600)
"""


@contextmanager
def kept(command: Sequence[str], **options: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A keeper, and the end of its lifeline that a test may close."""
    read_end, lifeline = os.pipe()
    keeper = subprocess.Popen(
        keeper_command(read_end, command, **options),
        pass_fds=(read_end,),
        # Not the test's own, which may be at its end already.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(read_end)
    with keeper:
        try:
            yield keeper, lifeline
        finally:
            with suppress(OSError):
                os.close(lifeline)


@pytest.mark.parametrize(
    ("script", "codes", "code"),
    [
        ("exit 0", "own", 0),
        ("exit 3", "own", 3),
        ("kill -9 $$", "own", -9),
        ("kill -15 $$", "own", -15),
        ("exit 137", "own", 137),
        ("exit 137", "shell", -9),
        ("exit 3", "shell", 3),
        ("exit 255", "shell", 255),
    ],
)
def test_it_ends_as_its_child_did(script, codes, code):
    with kept(["sh", "-c", script], codes=codes) as (keeper, _):
        assert keeper.wait(LIMIT_S) == code


def test_a_program_that_is_not_there_is_named():
    with kept(["/no/such/program"]) as (keeper, _):
        said = keeper.communicate(timeout=LIMIT_S)[1]
    assert (keeper.returncode, said) == (127, "/no/such/program: No such file or directory\n")


@pytest.mark.attack("processes that outlive who started them")
@pytest.mark.parametrize("end", ["lifeline", "terminate", "child", "stopped"])
def test_nothing_is_left_of_what_the_child_started(tmp_path, end):
    folder = tmp_path / "temporary"
    folder.mkdir()
    (folder / "file").write_text("text")
    with kept([sys.executable, "-c", FAMILY], remove=str(folder)) as (keeper, lifeline):
        assert keeper.stdout is not None
        family = [int(pid) for pid in keeper.stdout.readline().split()]
        assert len(family) == 4 and all(map(is_running, family))
        if end == "child":
            os.kill(family[0], signal.SIGKILL)
        elif end == "terminate":
            keeper.terminate()
        else:
            if end == "stopped":
                os.kill(family[0], signal.SIGSTOP)
            os.close(lifeline)
        assert keeper.wait(LIMIT_S) == -signal.SIGKILL
    assert not any(map(is_running, family))
    assert not folder.exists()


@pytest.mark.attack("a reward starts more and more processes")
def test_a_child_that_starts_too_many_processes_is_ended_with_them():
    script = "for number in $(seq 20); do sleep 600 & done; echo $!; wait"
    with kept(["sh", "-c", script], most=15) as (keeper, _):
        assert keeper.stdout is not None and keeper.stderr is not None
        last = int(keeper.stdout.readline())
        assert keeper.wait(LIMIT_S) == -signal.SIGKILL
        assert keeper.stderr.read() == "more than 15 processes\n"
    assert not is_running(last)


@pytest.mark.slow
def test_a_child_with_as_many_processes_as_it_may_have_goes_on():
    script = "for number in $(seq 14); do sleep 600 & done; echo started; sleep 2.5; kill $(jobs -p); exit 5"
    with kept(["bash", "-c", script], most=16) as (keeper, _):
        assert keeper.wait(LIMIT_S) == 5


def test_a_child_ends_with_a_keeper_that_is_killed():
    with kept([sys.executable, "-c", FAMILY]) as (keeper, _):
        assert keeper.stdout is not None
        child, *others = (int(pid) for pid in keeper.stdout.readline().split())
        keeper.kill()
        assert ends_within(child)
    for other in others:  # these it cannot end any more
        os.kill(other, signal.SIGKILL)


def test_the_childs_pipes_close_with_the_child():
    with kept([sys.executable, "-c", "import os; os.close(1); import sys; sys.stdin.read()"]) as (keeper, _):
        assert keeper.stdout is not None
        assert keeper.stdout.read() == ""
        assert keeper.poll() is None


def test_the_child_does_not_hold_the_lifeline():
    lists = "import os; print(*sorted(os.listdir('/proc/self/fd'), key=int))"
    with kept([sys.executable, "-c", lists]) as (keeper, _):
        # The last is the listing's own.
        assert keeper.communicate(timeout=LIMIT_S)[0] == "0 1 2 3\n"
