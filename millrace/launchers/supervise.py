"""Monitor the ranks of a run: wait for its end, and find the rank that failed first."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LOOPBACK = "127.0.0.1"
# Polling interval.
WATCH_S = 0.1
# After a failure: how long other ranks may take to end, and how long to wait for an error of rank 0, which
# prints its own.
GRACE_S = 5.0
TELLING_S = 1.0
# Exit codes of ranks that left on request, and of ranks that lost the connection to others.
INTERRUPTED = 130
LOST = 75
# Length of the log tail of a failed rank.
SHOWN_LINES = 60


class RankFailed(RuntimeError):
    """A rank failed; the message holds the tail of its output."""


def watch(
    look: Callable[[], Mapping[int, int]],
    num_ranks: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int | None:
    """Wait until all ranks have ended without error, or one has failed; return the one that failed first.

    `look` returns the exit codes of the ranks that have ended, by rank, in the order of detection.
    """
    first_s: float | None = None
    while True:
        ended = look()
        # When the user interrupts a rank twice, the others inevitably lose it.
        right = (0, INTERRUPTED, LOST) if INTERRUPTED in ended.values() else (0,)
        wrong = [rank for rank, code in ended.items() if code not in right]
        if not wrong and len(ended) == num_ranks:
            return None
        first_s = clock() if wrong and first_s is None else first_s
        if first_s is not None:
            waited_s = clock() - first_s
            # A lost connection is only a consequence, and rank 0 prints its own error.
            blamed = [rank for rank in wrong if ended[rank] != LOST]
            if 0 in blamed:
                return 0
            if blamed and waited_s > TELLING_S:
                return blamed[0]
            if waited_s > GRACE_S or len(ended) == num_ranks:
                return (blamed or wrong)[0]
        sleep(WATCH_S)


@contextmanager
def handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Install signal handlers for the time of a block."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rendezvous(num_ranks: int, host: str, port: int, *, one_machine: bool) -> dict[str, str]:
    """The variables that torchrun gives every rank, for a store that is open already."""
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return {**shared, "GLOO_SOCKET_IFNAME": "lo"} if one_machine else shared


def failure(what: str, said: str) -> RankFailed:
    """Return the error for a failed rank, with the tail of its output."""
    return RankFailed("\n".join([what, *said.splitlines()[-SHOWN_LINES:]]))
