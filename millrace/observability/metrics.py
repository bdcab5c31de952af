"""Time and memory of a step by span."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millrace.observability.peak_memory import PeakMemory


class Spans:
    """Seconds spent under each name: `with spans("sample"): ...`, then `spans.take()` once a step.

    One object belongs to one thread. The clock is monotonic, in seconds; `memory` records the peak of each
    span. `failed` is the last span in which an error was raised.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, memory: PeakMemory | None = None
    ) -> None:
        self.failed: str | None = None
        self._report: Callable[[str, float], None] = lambda name, seconds: None
        self._clock = clock
        self._memory = memory
        self._seconds: dict[str, float] = {}
        self._parts: dict[str, float] = {}
        # Seconds under any name since the beginning, for `rest`.
        self._named = 0.0
        self._open: str | None = None
        self._open_part: str | None = None
        self._began = 0.0

    def report_ends(self, report: Callable[[str, float], None]) -> None:
        """Call `report` with the name and the seconds of each span when it ends."""
        self._report = report

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `name`, also when it raises; RuntimeError inside another span."""
        if self._open is not None:
            raise RuntimeError(f"span {name} was opened inside span {self._open}; close {self._open} first")
        if self._memory is not None:
            self._memory.restart()
        self._began = self._clock()
        self._open = name
        try:
            yield
        except BaseException:
            self.failed = name
            raise
        finally:
            self._open = None
            seconds = self._clock() - self._began
            self.add(name, seconds)
            if self._memory is not None:
                self._memory.note(name)
            self._report(name, seconds)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that passed before, outside of a block."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._named += seconds

    def rename(self, name: str, to: str) -> None:
        """Count the seconds under a name since the last `take` under another."""
        if name in self._seconds:
            self._seconds[to] = self._seconds.get(to, 0.0) + self._seconds.pop(name)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Also add the seconds of the block, which is inside the span `train`, to `train/NAME`.

        The span's own seconds include them. RuntimeError outside of a span, or inside another part.
        """
        if self._open is None or self._open_part is not None:
            place = "outside a span" if self._open is None else f"inside part {self._open_part}"
            raise RuntimeError(f"part {name} was opened {place}; open it inside a span alone")
        key, began, self._open_part = f"{self._open}/{name}", self._clock(), name
        try:
            yield
        finally:
            self._open_part = None
            seconds = self._clock() - began
            self._parts[key] = self._parts.get(key, 0.0) + seconds
            self._report(key, seconds)

    @contextmanager
    def rest(self, name: str) -> Iterator[None]:
        """Add the seconds of the block that no inner span covers to `name`; `take` may be called inside."""
        began, before = self._clock(), self._named
        try:
            yield
        finally:
            within = self._named - before
            self.add(name, max(0.0, self._clock() - began - within))

    @property
    def open(self) -> tuple[str, float] | None:
        """Return the open span and the clock's seconds at its start; thread-safe."""
        name = self._open
        return None if name is None else (name, self._began)

    def take(self) -> dict[str, float]:
        """Return and clear the seconds by name since the last call; of parts under `train/NAME`."""
        taken, self._seconds, self._parts = self._seconds | self._parts, {}, {}
        return taken
