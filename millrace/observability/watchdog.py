"""Pending waits with their deadlines: `millrace status` shows them, and a stalled run is terminated.

A run is in a phase (a span of `Spans`); blocking operations inside it register a wait. A background thread
writes both to `status.json` each second. It ends the process when a deadline has passed, because a thread
that hangs in native code does not receive exceptions.
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
from typing import Any

# Polling interval of the waits, and the grace period in which an overdue wait may raise its own error.
LOOK_S = 1.0
GRACE_S = 5.0
# Waits of at least this duration are shown on the console.
LONG_S = 10.0
# Time limit for the final report of a stalled run.
LAST_WORDS_S = 10.0
STALLED = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait, as `status.json` shows it; `on` are the awaited components, with their current activity."""

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
    """Monitors a run while entered as a context manager.

    `path` is that of `status.json`, `limit_s` limits one phase. `phase` returns the name of the current
    phase, and the time of the monotonic `clock`, in seconds, at which it began; `facts` the progress of the
    run (`stage`, `step`, `steps`). `stalled` records the stall and leaves the run resumable.
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
        self._path = path
        self._limit_s = limit_s
        self._phase = phase
        self._clock = clock
        self._facts = facts
        self._stalled = stalled
        self._more: Callable[[], dict[str, Any]] = dict
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="millrace-watchdog", daemon=True)

    @contextmanager
    def waiting(
        self, owner: str, reason: str, *, deadline_s: float, on: Callable[[], Sequence[str]] = tuple
    ) -> Iterator[None]:
        """Register a wait for the block, which must raise its own error at the deadline.

        The reason is such as `batch 3`; `on` lists the components that the owner waits for.
        """
        held = _Held(owner, reason, self._clock(), deadline_s, on)
        with self._lock:
            self._held[id(held)] = held
        try:
            yield
        finally:
            with self._lock:
                del self._held[id(held)]

    @contextmanager
    def reporting(self, fields: Callable[[], dict[str, Any]]) -> Iterator[None]:
        """Add fields to `status.json` during the block; `fields` is called each second."""
        self._more = fields
        try:
            yield
        finally:
            self._more = dict

    def waits(self) -> list[Wait]:
        """Return all pending waits, the phase first."""
        phase, now_s = self._phase(), self._clock()
        found = [] if phase is None else [Wait("run", f"{phase[0]} to end", now_s - phase[1], self._limit_s)]
        with self._lock:
            held = list(self._held.values())
        return found + [
            Wait(each.owner, each.reason, now_s - each.since_s, each.deadline_s, tuple(each.on()))
            for each in held
        ]

    def line(self) -> str:
        """The innermost wait, not the phase, from `LONG_S` on: `waiting 12 s of 600: trainer for batch 3`."""
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
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            waits = self.waits()
            # The run itself reports a full disk.
            with suppress(OSError):
                self._write(waits)
            overdue = [wait for wait in waits if wait.waited_s > wait.deadline_s + GRACE_S]
            if overdue:
                self._end(overdue[0], waits)

    def _write(self, waits: Sequence[Wait]) -> None:
        told = {"pid": os.getpid(), "at": self._facts(), "waits": [asdict(wait) for wait in waits]}
        told |= self._more()
        # No fsync: a disk that hangs must not block the watchdog.
        aside = self._path.with_name(f".{self._path.name}.aside")
        aside.write_text(json.dumps(told, indent=1), encoding="utf-8")
        aside.rename(self._path)

    def _end(self, overdue: Wait, waits: Sequence[Wait]) -> None:
        lines = [f"the run stalled: {overdue}", *(f"  {wait}" for wait in waits if wait is not overdue)]
        text = "\n".join(lines)
        stacks = "\n".join([text, "", *_stacks()])
        # In a thread with a timeout: the hanging thread may hold a lock that the report needs.
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
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, ident)}"
        yield "".join(traceback.format_stack(frame))
