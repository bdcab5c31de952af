"""A run whose processes are killed after random batches; scripts that do so share it.

Some victims are survivable: the run must go on by itself after their death. After that of any other it must
end with an error, and `millrace resume` must continue it. Nothing may be left of a process that has ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.eventlog.log import check_log, read_events

MILLRACE = [sys.executable, "-m", "millrace.cli.main"]
# Until a run has a new batch (two slow cores with a load of 6 took 234 s), until one that must end has ended,
# and until all its processes have: Ray's agents look for their parent once in a while.
BATCH_S, END_S, GONE_S = 900.0, 60.0, 180.0
# Victims by name, given the command's process and the one that wrote `status.json` last, if any.
FindVictims = Callable[[int, int | None], Mapping[str, int]]


class Failed(Exception):
    """The run did what it must not."""


@dataclass
class Death:
    """A victim, when it died (seconds since 1970), after how many batches, and how long the next one took."""

    victim: str
    at_s: float
    num_batches: int
    seconds: float = 0.0


@dataclass
class KilledRun:
    """A run, and the processes of it that are killed.

    Attributes:
        run: its folder.
        rng: decides when.
        apart: at most so many batches from one to the next death.
        victims: those still to die, the next one last.
        find: finds them.
        survivable: those after whose death the run goes on by itself.
        deaths: those that died.
        below: processes of runs that have ended, with the time each started (`started`).
    """

    run: Path
    rng: random.Random
    apart: int
    victims: list[str]
    find: FindVictims
    survivable: Collection[str]
    deaths: list[Death] = field(default_factory=list)
    below: dict[int, int] = field(default_factory=dict)

    def finish(self, command: Sequence[str]) -> None:
        """Train, kill and resume until the run has ended and all victims have died.

        Raises:
            Failed: see `work_through`; or it ended before all died, or processes are left.
        """
        while not self.work_through(command):
            command = [*MILLRACE, "resume", str(self.run)]
        if self.victims:
            raise Failed(f"it ended before {len(self.victims)} deaths; allow fewer batches between them")
        self.check_gone()

    def work_through(self, command: Sequence[str]) -> bool:
        """Start the run or resume it, and kill; return whether it has ended well.

        Raises:
            Failed: it did not go on after a survivable death, did not end after another, or failed.
        """
        since_s, before = time.time(), self._first()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            try:
                # A process that lost the command may still be writing.
                until(lambda: self._first() != before or process.poll() is not None, BATCH_S)
                self._await_batch(process, max(since_s, self._began_s()))
                while self.victims and self._await_batches(process, self.rng.randint(1, self.apart)):
                    if not self._kill(process):
                        return False
                process.wait()
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            if process.returncode:
                raise Failed(f"exit code {process.returncode}: {output.read()[-3000:]}")
        return True

    def _kill(self, process: subprocess.Popen[bytes]) -> bool:
        """Kill the next victim, if it is there; return whether the run goes on by itself."""
        found = self.find(process.pid, self._first())
        below = {pid: started(pid) for pid in processes_below(process.pid)}
        victim = self.victims[-1]
        if victim not in found:
            return True
        self.victims.pop()
        self.deaths.append(Death(victim, time.time(), len(self._batches())))
        os.kill(found[victim], signal.SIGKILL)
        if victim in self.survivable:
            self._await_batch(process, self.deaths[-1].at_s)
            return True
        if not until(lambda: process.poll() is not None, END_S):
            raise Failed(f"the run went on for {END_S:.0f} s after {self.deaths[-1]}")
        if not process.returncode:
            raise Failed(f"exit code 0 after {self.deaths[-1]}")
        # One that ended while it was listed has no start, and is gone.
        self.below |= {pid: began for pid, began in below.items() if began is not None}
        return False

    def check_gone(self) -> None:
        """Check that nothing is left of runs that have ended.

        Raises:
            Failed: some processes live on.
        """
        if not until(lambda: not self.left(), GONE_S):
            left = [f"{pid} {command_line(pid)[:60]!r}" for pid in self.left()]
            raise Failed(f"these live on: {', '.join(left)}")

    def left(self) -> list[int]:
        """Return the processes of ended runs that live on."""
        return [pid for pid, began in self.below.items() if started(pid) == began]

    def _first(self) -> int | None:
        """Return the process that wrote the status last."""
        with suppress(OSError, ValueError):
            pid: int = json.loads(self._status.read_text(encoding="utf-8"))["pid"]
            return pid
        return None

    def _began_s(self) -> float:
        """Return when it did."""
        with suppress(OSError):
            return self._status.stat().st_mtime
        return 0.0

    @property
    def _status(self) -> Path:
        return self.run / "status.json"

    def _batches(self) -> list[Path]:
        return [*self.run.glob("rollouts/step-*.parquet")]

    def _await_batches(self, process: subprocess.Popen[bytes], count: int) -> bool:
        """Let a run make so many new batches and a part of the next; return whether it goes on.

        Raises:
            Failed: a batch takes too long.
        """
        since_s = time.time()

        def ready() -> bool:
            new = sum(path.stat().st_mtime > since_s for path in self._batches())
            return new >= count or process.poll() is not None

        if not until(ready, count * BATCH_S):
            raise Failed(f"{count} batches did not come within {count * BATCH_S:.0f} s")
        return not until(lambda: process.poll() is not None, self.rng.random())

    def _await_batch(self, process: subprocess.Popen[bytes], since_s: float) -> None:
        """Wait for a new batch, and note how long that took since the last death."""

        def ready() -> bool:
            new = any(path.stat().st_mtime > since_s for path in self._batches())
            return new or process.poll() is not None

        if not until(ready, BATCH_S):
            raise Failed(f"no batch came for {BATCH_S:.0f} s")
        if self.deaths and not self.deaths[-1].seconds:
            last = self.deaths[-1]
            last.seconds = time.time() - last.at_s
            print(
                f"{len(self.deaths):3d}  {last.victim:<18} after batch {last.num_batches:<4} the next one "
                f"{last.seconds:5.1f} s later",
                flush=True,
            )


def until(ready: Callable[[], bool], limit_s: float) -> bool:
    """Wait until something is so, at most so long; return whether it is."""
    ends_s = time.monotonic() + limit_s
    while not (found := ready()) and time.monotonic() < ends_s:
        time.sleep(0.05)
    return found


def command_line(process: int) -> bytes:
    """Return the command line of a process; nothing where it is dead."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def started(process: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None where it has ended."""
    state, *rest = _stat(process) or ["X"]
    return None if state in ("Z", "X") else int(rest[18])


def parent_of(process: int) -> int | None:
    """Return the process that started a process, or adopted it; None where it has ended."""
    return int(fields[1]) if (fields := _stat(process)) else None


def _stat(process: int) -> list[str]:
    """Return the fields from 3 on of proc(5); the name before them may have spaces and brackets."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def processes_below(process: int) -> Iterator[int]:
    """Yield all that a process has started, and what those have."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text(encoding="ascii").split()):
                yield child
                yield from processes_below(child)


def check_finished(run: Path) -> dict[str, Any]:
    """Check that a run has finished and lost nothing; return its summary.

    Raises:
        Failed: it has not, or some groups have no end.
    """
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    if summary["status"] != "finished":
        raise Failed(f"the run is {summary['status']}")
    if left := check_log(read_events(run / "events.log")):
        raise Failed(f"the groups {left} have no end")
    return summary
