"""When a run leaves before its end.

Ctrl-C once: finish the step, save, leave; before the first step is done, when nothing is to be saved that is
not, leave now. Twice: leave now. Out of time: after a step, save and leave.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The run was to leave; everything is saved."""


class Deadline:
    """When a run of limited time has to leave, so that what it saves is written in time.

    It is near when less time is left than another step and a save may take: the longest step so far, the
    first with all that came before it, and the longest save.
    """

    def __init__(
        self, limit_s: float | None, started_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """No step was done.

        Args:
            limit_s: seconds from the start; None for any number.
            started_s: by the clock.
            clock: seconds, never going back.
        """
        self._limit_s, self._started_s, self._clock = limit_s, started_s, clock
        self._last_s, self._longest_s = started_s, 0.0

    def near(self, save_s: float) -> bool:
        """Whether to leave; asked once after each step.

        Args:
            save_s: of the longest save.
        """
        now = self._clock()
        self._longest_s, self._last_s = max(self._longest_s, now - self._last_s), now
        if self._limit_s is None:
            return False
        return now + self._longest_s + save_s > self._started_s + self._limit_s


class Interrupts:
    """While entered, SIGINT and SIGTERM set `asked`; a second one sets `twice` and raises KeyboardInterrupt.

    Outside the main thread signals cannot be caught, and `asked` stays False.

    Attributes:
        at_once: asked at the first signal whether all is saved as it stands; then that one sets `left` and
            raises KeyboardInterrupt.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Interrupts that tell the user through `say`."""
        self.asked = False
        # What is interrupted in its midst may raise another error than KeyboardInterrupt.
        self.twice = self.left = False
        self.at_once: Callable[[], bool] = bool
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        """Catch the signals."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.twice = True
            raise KeyboardInterrupt
        self.asked = True
        if self.at_once():
            self.left = True
            self._say("leaving before the first step is done; nothing is lost")
            raise KeyboardInterrupt
        self._say("finishing this step, then saving; once more leaves now")
