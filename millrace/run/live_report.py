"""The report of a run that goes on: written again and again, at a bounded cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Seconds between two reports at least, and the fraction of the time that writing them may take.
EVERY_S = 30.0
MOST_FRACTION = 0.02


class LiveReport:
    """Writes the report of a run while it goes on, so that a killed run leaves one that is not old."""

    def __init__(self, write: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """No report was written yet.

        Args:
            write: the report, as things stand.
            clock: seconds, never going back.
        """
        self._write, self._clock = write, clock
        self._due_s = -math.inf

    def update(self) -> None:
        """Write the report if the last one is long enough ago; called after each step."""
        began_s = self._clock()
        if began_s < self._due_s:
            return
        self._write()
        ended_s = self._clock()
        self._due_s = ended_s + max(EVERY_S, (ended_s - began_s) / MOST_FRACTION)
