"""The ranks of a run as processes of this machine: started, watched, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from millrace.orchestration.ranks import LOST

# How often the ranks are looked at.
WATCH_S = 0.1
# How long the others may take to end once one has failed, and how long the first has to say why itself.
GRACE_S = 5.0
TELLING_S = 1.0
# How ranks end that were asked to leave.
INTERRUPTED = 130
# Lines of a failed rank's error output that are shown.
SHOWN_LINES = 60


class RankFailed(RuntimeError):
    """A rank ended before its run did; the message holds the last of what it said."""


def run_ranks(command: Sequence[str], num_ranks: int, *, environment: Mapping[str, str] | None = None) -> int:
    """Run the same command as every rank of one run, and wait for all of them.

    The first rank has the terminal; what the others say is shown only if they fail. When one ends with an
    error, the others are ended too.

    Args:
        command: of one rank.
        num_ranks: how many there are.
        environment: variables besides those of this process.

    Returns:
        the first rank's exit code; where it failed, it said why.

    Raises:
        RankFailed: another rank failed first, or one was killed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        **(environment or {}),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        # The store is this process's, as it is torchrun's agent's.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with logs[rank].open("wb") as log:
                    ranks.append(_start(command, own, None if rank == 0 else log))
            failed = _watch(ranks)
        finally:
            _end(ranks)
        if failed is None or (failed == 0 and ranks[0].returncode > 0):
            return ranks[0].returncode
        code = ranks[failed].returncode
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        said = logs[failed].read_text(encoding="utf-8", errors="replace") if failed else ""
        lines = said.splitlines()[-SHOWN_LINES:]
        raise RankFailed("\n".join([f"rank {failed} of {num_ranks} ended with {how}", *lines]))


def _start(command: Sequence[str], own: Mapping[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    # Whatever else a rank says must not stand between the lines of the first.
    return subprocess.Popen(command, env=own, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended as they should, or one has failed: which."""
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda number, frame: _tell(ranks, number))
    first_s: float | None = None
    try:
        while True:
            ended = {rank: code for rank, one in enumerate(ranks) if (code := one.poll()) is not None}
            wrong = [rank for rank, code in ended.items() if code not in (0, INTERRUPTED)]
            if not wrong and len(ended) == len(ranks):
                return None
            first_s = time.monotonic() if wrong and first_s is None else first_s
            if first_s is not None:
                waited_s = time.monotonic() - first_s
                # Who lost the others is not to blame, and the first rank says itself what went wrong.
                blamed = [rank for rank in wrong if ended[rank] != LOST]
                if 0 in blamed or (blamed and waited_s > TELLING_S):
                    return blamed[0]
                if waited_s > GRACE_S or len(ended) == len(ranks):
                    return (blamed or wrong)[0]
            time.sleep(WATCH_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run: asked first, then killed."""
    deadline_s = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def this_command() -> list[str]:
    """The command line of this process, to be run again as a rank."""
    return [sys.executable, "-m", "millrace.cli.main", *sys.argv[1:]]
