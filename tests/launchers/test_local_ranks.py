from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from millrace.launchers import local_ranks
from millrace.launchers import supervise as watching
from millrace.launchers.local_ranks import run_ranks
from millrace.launchers.supervise import INTERRUPTED, LOST, RankFailed
from tests.rewards.helpers import LIMIT_S, comes, ends_within, is_running

pytestmark = pytest.mark.world


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks say or lose something one after the other, each may take its time."""
    monkeypatch.setattr(watching, "TELLING_S", LIMIT_S)
    monkeypatch.setattr(watching, "GRACE_S", LIMIT_S)


def command(body: str) -> list[str]:
    """A rank that knows its number as `rank`; it may `tell` a name and `hear` those that others tell."""
    lines = [
        "import os, sys, time",
        "rank = int(os.environ['RANK'])",
        "def tell(name): open(name, 'w').close()",
        "def hear(name):",
        "    while not os.path.exists(name): time.sleep(0.01)",
        body,
    ]
    return [sys.executable, "-c", "\n".join(lines)]


def test_every_rank_runs_and_knows_the_others(tmp_path: Path) -> None:
    body = "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME', 'MINE')\n"
    body += f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(' '.join(os.environ[n] for n in names))"
    assert run_ranks(command(body), 3, environment={"MINE": "x"}) == 0
    told = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert told == [f"{rank} {rank} 3 127.0.0.1 lo x" for rank in range(3)]


@pytest.mark.parametrize("code", [1, INTERRUPTED])
def test_the_first_ranks_code_is_the_runs(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # As where all ranks find the same mistake, or the user asked to leave.
    monkeypatch.chdir(tmp_path)
    body = f"hear('the other') if rank == 0 else tell('the other')\nprint('from', rank)\nsys.exit({code})"
    assert run_ranks(command(body), 2) == code
    assert capfd.readouterr().out == "from 0\n"


def test_a_rank_that_fails_ends_the_others_and_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The first rank only lost the others and the last one hangs: nothing more will be told.
    monkeypatch.setattr(watching, "TELLING_S", 0.05)
    monkeypatch.setattr(local_ranks, "GRACE_S", 0.05)
    body = f"""
if rank == 0:
    sys.exit({LOST})
if rank == 2:
    open('pid', 'w').write(str(os.getpid()))
    tell('hangs')
    time.sleep(600)
hear('hangs')
raise KeyError('mine')
"""
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 3 ended with exit code 1\n.*KeyError: 'mine'"):
        run_ranks(command(body), 3)
    assert not is_running(int(Path("pid").read_text()))


def test_a_rank_that_is_killed_is_named() -> None:
    body = f"rank and os.kill(os.getpid(), 9)\nsys.exit({LOST})"
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 ended with signal SIGKILL$"):
        run_ranks(command(body), 2)


def test_where_all_lost_each_other_the_first_is_named() -> None:
    with pytest.raises(RankFailed, match=f"rank 1 of 2 ended with exit code {LOST}"):
        run_ranks(command(f"rank and sys.exit({LOST})"), 2)


def test_a_request_to_end_reaches_every_rank(tmp_path: Path) -> None:
    body = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
    body += f"tell({str(tmp_path)!r} + f'/{{rank}}')\ntime.sleep(600)"
    before = signal.getsignal(signal.SIGTERM)

    def ask() -> None:
        while len(list(tmp_path.iterdir())) < 2 or signal.getsignal(signal.SIGTERM) == before:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    assert run_ranks(command(body), 2) == INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) == before


def test_where_one_left_at_once_the_run_was_interrupted() -> None:
    assert run_ranks(command(f"sys.exit({INTERRUPTED} if rank else {LOST})"), 2) == INTERRUPTED


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for the end of a parent")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    body = "from millrace.keeper import end_with_parent\nend_with_parent()\n"
    body += "open(f'{rank}.part', 'w').write(str(os.getpid()))\nos.rename(f'{rank}.part', str(rank))\n"
    ranks = command(body + "time.sleep(600)")
    launcher = f"from millrace.launchers.local_ranks import run_ranks\nrun_ranks({ranks!r}, 2)"
    process = subprocess.Popen([sys.executable, "-c", launcher], cwd=tmp_path)
    try:
        files = [tmp_path / str(rank) for rank in range(2)]
        assert comes(lambda: all(file.exists() for file in files))
    finally:
        process.kill()
        process.wait()
    assert all(ends_within(int(file.read_text())) for file in files)
