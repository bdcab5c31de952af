"""The report of a running run: rewritten at a bounded cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Least seconds between two reports, and largest fraction of the time spent on writing them.
EVERY_S = 30.0
MOST_FRACTION = 0.02


class LiveReport:
    """Rewrites the report during a run, so that a killed run leaves a recent one."""

    def __init__(self, write: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Create it, due at once.

        Args:
            write: writes the report of the current state.
            clock: monotonic seconds.
        """
        self._write, self._clock = write, clock
        self._due_s = -math.inf

    def update(self) -> None:
        """Write the report if it is due; called after each step."""
        began_s = self._clock()
        if began_s < self._due_s:
            return
        self._write()
        ended_s = self._clock()
        self._due_s = ended_s + max(EVERY_S, (ended_s - began_s) / MOST_FRACTION)
