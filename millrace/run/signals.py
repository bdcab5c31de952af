"""Early exits of a run: Ctrl-C and the time limit.

First Ctrl-C: finish the step, save, exit; if there is nothing to save yet, exit at once. Second Ctrl-C: exit
at once. Out of time: save and exit after a step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop; everything is saved."""


class Deadline:
    """The latest time at which a run of limited time must leave to save its state.

    It is near when less time is left than one more step and a save may take: the longest step so far (the
    first includes start-up) and the longest save.
    """

    def __init__(
        self, limit_s: float | None, started_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock, before the first step.

        Args:
            limit_s: seconds from the start; None for no limit.
            started_s: time of the start by `clock`.
            clock: monotonic seconds.
        """
        self._limit_s, self._started_s, self._clock = limit_s, started_s, clock
        self._last_s, self._longest_s = started_s, 0.0

    def near(self, save_s: float) -> bool:
        """Whether the run must leave now; called once after each step.

        Args:
            save_s: duration of the longest save.
        """
        now = self._clock()
        self._longest_s, self._last_s = max(self._longest_s, now - self._last_s), now
        if self._limit_s is None:
            return False
        return now + self._longest_s + save_s > self._started_s + self._limit_s


class Interrupts:
    """While entered, SIGINT and SIGTERM set `asked`; a second one sets `twice` and raises KeyboardInterrupt.

    Signals cannot be caught outside the main thread, where `asked` stays False.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Report signals to the user through `say`."""
        self.asked = False
        # Interrupted code may raise another error than KeyboardInterrupt.
        self.twice = self.left = False
        self._at_once: Callable[[], bool] = bool
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Install the signal handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def leave_at_once_if(self, condition: Callable[[], bool]) -> None:
        """Make the first signal set `left` and raise KeyboardInterrupt if the condition then holds."""
        self._at_once = condition

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.twice = True
            raise KeyboardInterrupt
        self.asked = True
        if self._at_once():
            self.left = True
            self._say("leaving before the first step is done; nothing is lost")
            raise KeyboardInterrupt
        self._say("finishing this step, then saving; once more leaves now")
