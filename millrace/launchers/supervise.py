"""Watching the ranks of a run: when it is over, and which rank failed first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

# How often the ranks are looked at.
WATCH_S = 0.1
# How long the others may take to end once one has failed, and how long the first has to say why itself.
GRACE_S = 5.0
TELLING_S = 1.0
# How ranks end that were asked to leave, and those that lost the others.
INTERRUPTED = 130
LOST = 75
# Lines that are shown of what a failed rank said.
SHOWN_LINES = 60


class RankFailed(RuntimeError):
    """A rank ended before its run did; the message holds the last of what it said."""


def watch(
    look: Callable[[], Mapping[int, int]],
    num_ranks: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int | None:
    """Wait until all ranks have ended as they should, or one has failed.

    Args:
        look: the exit codes of those that have ended, by rank, in the order in which they were seen to.
        num_ranks: how many there are.
        clock: seconds, never going back.
        sleep: lets so many of them pass.

    Returns:
        the rank that failed first; None if none did.
    """
    first_s: float | None = None
    while True:
        ended = look()
        # Where one left at once because the user said so twice, the others could but lose it.
        right = (0, INTERRUPTED, LOST) if INTERRUPTED in ended.values() else (0,)
        wrong = [rank for rank, code in ended.items() if code not in right]
        if not wrong and len(ended) == num_ranks:
            return None
        first_s = clock() if wrong and first_s is None else first_s
        if first_s is not None:
            waited_s = clock() - first_s
            # Who lost the others is not to blame, and the first rank says itself what went wrong.
            blamed = [rank for rank in wrong if ended[rank] != LOST]
            if 0 in blamed:
                return 0
            if blamed and waited_s > TELLING_S:
                return blamed[0]
            if waited_s > GRACE_S or len(ended) == num_ranks:
                return (blamed or wrong)[0]
        sleep(WATCH_S)


def failure(what: str, said: str) -> RankFailed:
    """The error of a rank that failed: what happened to it, and the end of what it said."""
    return RankFailed("\n".join([what, *said.splitlines()[-SHOWN_LINES:]]))
