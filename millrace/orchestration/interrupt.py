"""Ctrl-C once: finish the step, save, leave. Twice: leave now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While entered, SIGINT and SIGTERM set `asked`; a second one sets `twice` and raises KeyboardInterrupt.

    Outside the main thread signals cannot be caught, and `asked` stays False.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Interrupts that tell the user through `say`."""
        self.asked = False
        # What is interrupted in its midst may raise another error than KeyboardInterrupt.
        self.twice = False
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
        self._say("finishing this step, then saving; once more leaves now")
