"""Who waits for what, since when and until when: `millrace status` shows it, and a run that stalls ends.

What a run does is a phase (a span of `Spans`); inside it, whoever waits for somebody else says so. A thread
of its own writes both to `status.json` each second, and ends the process when one of them has passed its
deadline: a thread that hangs in foreign code hears no exception.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

# How often the waits are looked at, and what one may take beyond its deadline to raise an error of its own.
LOOK_S = 1.0
GRACE_S = 5.0
# From when on a wait is worth a word on the console.
LONG_S = 10.0
# What the last words of a run that stalls may take.
LAST_WORDS_S = 10.0
STALLED = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait, as `status.json` shows it.

    Attributes:
        owner: who waits.
        reason: for what.
        waited_s: so long already.
        deadline_s: so long at most.
        on: those it waits for, with what they are doing.
    """

    owner: str
    reason: str
    waited_s: float
    deadline_s: float
    on: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Such as `trainer waits for batch 3 since 12 s, at most 600 s: group 7 (engine-0)`."""
        on = f": {'; '.join(self.on)}" if self.on else ""
        since = f"since {self.waited_s:.0f} s, at most {self.deadline_s:g} s"
        return f"{self.owner} waits for {self.reason} {since}{on}"


@dataclass(slots=True)
class _Held:
    owner: str
    reason: str
    since_s: float
    deadline_s: float
    on: Callable[[], Sequence[str]]


class Watchdog:
    """Watches a run while entered.

    Attributes:
        more: what else `status.json` is to say; asked each second.
    """

    def __init__(
        self,
        path: Path,
        *,
        limit_s: float,
        phase: Callable[[], tuple[str, float] | None],
        facts: Callable[[], dict[str, Any]],
        stalled: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """A watchdog that writes to `path`.

        Args:
            path: of `status.json`.
            limit_s: what one phase may take.
            phase: the name of what the run does now, and the seconds of `clock` it began at.
            facts: where the run stands (`stage`, `step`, `steps`).
            stalled: says the last words of a run that stalls and makes it one that can be resumed.
            clock: seconds, never going back.
        """
        self._path = path
        self._limit_s = limit_s
        self._phase = phase
        self._clock = clock
        self._facts = facts
        self._stalled = stalled
        self.more: Callable[[], dict[str, Any]] = dict
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="millrace-watchdog", daemon=True)

    @contextmanager
    def waiting(
        self, owner: str, reason: str, *, deadline_s: float, on: Callable[[], Sequence[str]] = tuple
    ) -> Iterator[None]:
        """Within the block somebody waits; who does must raise an error of its own at the deadline.

        Args:
            owner: who waits.
            reason: for what, such as `batch 3`.
            deadline_s: how long at most.
            on: asked now and then for those it waits for.
        """
        held = _Held(owner, reason, self._clock(), deadline_s, on)
        with self._lock:
            self._held[id(held)] = held
        try:
            yield
        finally:
            with self._lock:
                del self._held[id(held)]

    def waits(self) -> list[Wait]:
        """All of them, the phase first."""
        phase, now_s = self._phase(), self._clock()
        found = [] if phase is None else [Wait("run", f"{phase[0]} to end", now_s - phase[1], self._limit_s)]
        with self._lock:
            held = list(self._held.values())
        return found + [
            Wait(each.owner, each.reason, now_s - each.since_s, each.deadline_s, tuple(each.on()))
            for each in held
        ]

    def line(self) -> str:
        """The innermost wait of `LONG_S` and more, such as `waiting 12 s of 600: trainer for batch 3`.

        A phase that the run is busy with is none.
        """
        now_s = self._clock()
        with self._lock:
            held = list(self._held.values())
        lines = [
            f"waiting {now_s - each.since_s:.0f} s of {each.deadline_s:g}: {each.owner} for {each.reason}"
            for each in held
            if now_s - each.since_s >= LONG_S
        ]
        return lines[-1] if lines else ""

    def __enter__(self) -> Watchdog:
        """Begin to watch."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Nobody waits any more."""
        self._over.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            waits = self.waits()
            # A full disk is for the run itself to find.
            with suppress(OSError):
                self._write(waits)
            overdue = [wait for wait in waits if wait.waited_s > wait.deadline_s + GRACE_S]
            if overdue:
                self._end(overdue[0], waits)

    def _write(self, waits: Sequence[Wait]) -> None:
        told = {"pid": os.getpid(), "at": self._facts(), "waits": [asdict(wait) for wait in waits]}
        told |= self.more()
        # Not forced to the disk: a disk that hangs must not hold the watchdog up.
        aside = self._path.with_name(f".{self._path.name}.aside")
        aside.write_text(json.dumps(told, indent=1), encoding="utf-8")
        aside.rename(self._path)

    def _end(self, overdue: Wait, waits: Sequence[Wait]) -> None:
        """Say who waits for whom and where every thread is, then end the process, however stuck it is."""
        lines = [f"the run stalled: {overdue}", *(f"  {wait}" for wait in waits if wait is not overdue)]
        text = "\n".join(lines)
        stacks = "\n".join([text, "", *_stacks()])
        # Whoever holds the lock that the last words need may be the one who hangs.
        words = threading.Thread(target=self._say, args=(text, stacks), daemon=True)
        words.start()
        words.join(LAST_WORDS_S)
        os._exit(STALLED)

    def _say(self, text: str, stacks: str) -> None:
        sys.stderr.write(f"error: {text}\ncontinue with: millrace resume {self._path.parent}\n")
        sys.stderr.flush()
        with suppress(OSError):
            (self._path.parent / "stall.txt").write_text(stacks, encoding="utf-8")
        self._stalled(text)


def _stacks() -> Iterator[str]:
    """Where every thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, ident)}"
        yield "".join(traceback.format_stack(frame))
