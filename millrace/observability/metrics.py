"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """Seconds spent under each name: `with spans("sample"): ...`, then `spans.take()` once a step.

    One object belongs to one thread.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: str | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `name`, also when the block raises.

        Raises:
            RuntimeError: another span is open; its seconds would count twice.
        """
        if self._open is not None:
            raise RuntimeError(f"span {name} was opened inside span {self._open}; close {self._open} first")
        self._open = name
        start = self._clock()
        try:
            yield
        finally:
            self._open = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken
