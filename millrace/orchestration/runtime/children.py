"""The engines' processes of a run: one that is lost is replaced, unless that came to nothing too often."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator

from millrace.orchestration.runtime.base import Event, Lost
from millrace.orchestration.runtime.child import Child, Settings, StartChild, start
from millrace.orchestration.runtime.frames import Frame, FrameError


class EngineFailed(RuntimeError):
    """No engine can be had any more; the message says why."""


class Children:
    """Engines of one runtime. Whoever calls holds the lock of a `ProcessRuntime`.

    Attributes:
        living: those that are not lost by name, in the order in which they were started.
        opened: every first engine has started; until then, one that is lost is not replaced.
    """

    def __init__(
        self,
        settings: Settings,
        weights: int,
        tell: Callable[[Event], None],
        *,
        silence_s: float,
        max_barren: int,
        start: StartChild = start,
    ) -> None:
        """No engine yet.

        Args:
            settings: of each engine.
            weights: descriptor of the memory through which weights come.
            tell: is told of engines that are lost.
            silence_s: an engine that works and is not heard of for so long is lost.
            max_barren: so many engines may be lost one after the other in one place without having drawn.
            start: makes them.
        """
        self._start = start
        self.living: dict[str, Child] = {}
        self.opened = False
        self._settings, self._weights, self._tell = settings, weights, tell
        self._silence_s, self._max_barren = silence_s, max_barren
        self._num_started = 0

    def start(self, num_barren: int = 0) -> None:
        """Start one engine more, after so many that were lost without having drawn anything."""
        name = f"engine-{self._num_started}"
        self._num_started += 1
        self.living[name] = self._start(name, self._settings, self._weights, num_barren=num_barren)

    def watch(self, poll: select.poll) -> None:
        """Have `poll` end when an engine says something, or its line takes what waits in it."""
        for child in self.living.values():
            poll.register(child.line, select.POLLIN | (select.POLLOUT if child.line.unsent else 0))

    def hear(self) -> Iterator[tuple[Child, Frame]]:
        """What engines have said; those that are dead, late or not understood are lost.

        Raises:
            EngineFailed: as `lose`.
        """
        for child in list(self.living.values()):
            reason = ""
            try:
                for frame in child.line.take():
                    child.heard_s = time.monotonic()
                    yield child, frame
                    if child.name not in self.living:
                        break
            except FrameError as error:
                reason = str(error)
            if child.name not in self.living:
                continue
            child.line.flush()
            if child.line.ended or child.process.poll() is not None:
                reason = reason or child.obituary()
            reason = reason or child.overdue(time.monotonic(), self._silence_s)
            if reason:
                self.lose(child, reason)

    def lose(self, child: Child, reason: str) -> None:
        """End an engine, and start another one in its place.

        Raises:
            EngineFailed: one of the first has not started, or too many in this place came to nothing.
        """
        reason += child.last_words()
        del self.living[child.name]
        child.kill()
        if not self.opened:
            raise EngineFailed(f"{child.name} could not be started: {reason}")
        if child.ready:
            self._tell(Lost(child.name, reason))
        num_barren = 0 if child.num_drawn else child.num_barren + 1
        if num_barren > self._max_barren:
            raise EngineFailed(
                f"{num_barren} engines were lost one after the other before they had drawn anything, at last "
                f"{child.name}: {reason}"
            )
        self.start(num_barren)

    def close(self) -> None:
        """End every engine."""
        while self.living:
            self.living.popitem()[1].kill()
