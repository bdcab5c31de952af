"""Start, monitor and end the ranks of a run as local processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from millrace.distributed.ranks import open_store
from millrace.launchers.supervise import GRACE_S, INTERRUPTED, LOOPBACK, failure, handled, rendezvous, watch


def run_ranks(command: Sequence[str], num_ranks: int, *, environment: Mapping[str, str] | None = None) -> int:
    """Run a command as every rank of one run, wait for all of them, and return rank 0's exit code.

    Rank 0 writes to the terminal; the output of another rank is shown only if it fails. When one rank fails,
    the others are ended. The code is `INTERRUPTED` if a rank left on request. If rank 0 failed, it has
    printed the error. `environment` is added to the variables of this process.

    Raises:
        RankFailed: another rank failed first, or a rank was killed.
    """
    # This process hosts the store, as torchrun's agent does.
    store = open_store(LOOPBACK)
    shared = {
        **os.environ,
        **(environment or {}),
        **rendezvous(num_ranks, LOOPBACK, store.port, one_machine=True),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(num_ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with logs[rank].open("wb") as log:
                    ranks.append(_start(command, own, None if rank == 0 else log))
            # A terminal sends Ctrl-C to every rank itself.
            forward = partial(_send, ranks)
            with handled({signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: forward}):
                failed = watch(lambda: _codes(ranks), num_ranks)
        finally:
            _end(ranks)
        codes = [rank.returncode for rank in ranks]
        if failed is None and INTERRUPTED in codes:
            return INTERRUPTED
        if failed is None or (failed == 0 and codes[0] > 0):
            return codes[0]
        code = codes[failed]
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        said = logs[failed].read_text(encoding="utf-8", errors="replace") if failed else ""
        raise failure(f"rank {failed} of {num_ranks} ended with {how}", said)


def _start(command: Sequence[str], own: Mapping[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    # Output of other ranks must not interleave with that of rank 0.
    return subprocess.Popen(command, env=own, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _codes(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    return {rank: code for rank, one in enumerate(ranks) if (code := one.poll()) is not None}


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int, frame: object) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for running ranks to notice that the others are gone, then kill them."""
    deadline_s = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def this_command() -> list[str]:
    """Return the command line of this process, to rerun it as a rank."""
    return [sys.executable, "-m", "millrace.cli.main", *sys.argv[1:]]
