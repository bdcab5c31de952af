"""Processes of a Ray run killed after random batches: it must end well, with nothing lost or doubled.

    python scripts/kills.py             # 30 kills in the quickstart, some twenty minutes on two cores
    python scripts/kills.py --kills 4 --apart 1 --accuracy 0 steps=20 checkpoint.every=2   # some minutes

The run is `millrace train RECIPE` with two trainer ranks and an engine as Ray actors, sampling two batches
ahead. Victims are the engine, the second trainer rank, the first one (which has the controller), and the
command itself (with Ray's head). After the engine's death the run must go on by itself; after any other it
must end with an error, and `millrace resume` must go on. At the end it must have finished with the accuracy,
its event log must prove that every group that started was trained on once or dropped for a reason, within the
staleness bound, and no process may be left of any of its lives. Exit code 1 says that one of these is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from millrace.eventlog.log import check_log, read_events

MILLRACE = [sys.executable, "-m", "millrace.cli.main"]
SETTINGS = [
    "mesh.launcher=ray",
    "mesh.dp_shard=2",
    "rollout.max_staleness=2",
    "engine.num_engines=1",
    "loggers=[]",
]
ENGINE, SECOND, FIRST, COMMAND = VICTIMS = ("engine", "second rank", "first rank", "command")
# Until a run has a new batch (two slow cores with a load of 6 took 234 s), until one that must end has ended,
# and until all its processes have: Ray's agents look for their parent once in a while.
BATCH_S, END_S, GONE_S = 900.0, 60.0, 180.0


class Failed(Exception):
    """The run did what it must not."""


@dataclass
class Death:
    """Who died, when (seconds since 1970), after how many batches, and how long the next one took."""

    victim: str
    at_s: float
    num_batches: int
    seconds: float = 0.0


@dataclass
class Kills:
    """A run, and those who die in it.

    Attributes:
        run: its folder.
        rng: says when.
        apart: at most so many batches from one to the next death.
        victims: who is still to die, the next one last.
        deaths: who died.
        below: processes of runs that have ended, with the time each started (`_started`).
    """

    run: Path
    rng: random.Random
    apart: int
    victims: list[str]
    deaths: list[Death] = field(default_factory=list)
    below: dict[int, int] = field(default_factory=dict)

    def work_through(self, command: Sequence[str]) -> bool:
        """Start the run or take it up, and kill; whether it has ended well.

        Raises:
            Failed: it did not go on after the death of its engine, did not end after another, or failed.
        """
        since_s, before = time.time(), self._first()
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said)
            try:
                # Who lost the command may still be writing.
                _until(lambda: self._first() != before or process.poll() is not None, BATCH_S)
                self._await_batch(process, max(since_s, self._began_s()))
                while self.victims and self._await_batches(process, self.rng.randint(1, self.apart)):
                    if not self._kill(process):
                        return False
                process.wait()
            finally:
                process.kill()
                process.wait()
            said.seek(0)
            if process.returncode:
                raise Failed(f"exit code {process.returncode}: {said.read()[-3000:]}")
        return True

    def _kill(self, process: subprocess.Popen[bytes]) -> bool:
        """Kill who is next, if it is there; whether the run goes on by itself."""
        found, below = self._alive(process.pid), {pid: _started(pid) for pid in _below(process.pid)}
        victim = self.victims[-1]
        if victim not in found:
            return True
        self.victims.pop()
        self.deaths.append(Death(victim, time.time(), len(self._batches())))
        os.kill(found[victim], signal.SIGKILL)
        if victim == ENGINE:
            self._await_batch(process, self.deaths[-1].at_s)
            return True
        if not _until(lambda: process.poll() is not None, END_S):
            raise Failed(f"the run went on for {END_S:.0f} s after {self.deaths[-1]}")
        if not process.returncode:
            raise Failed(f"exit code 0 after {self.deaths[-1]}")
        # One that ended while it was listed has no start, and has gone.
        self.below |= {pid: started for pid, started in below.items() if started is not None}
        return False

    def check_gone(self) -> None:
        """Prove that nothing is left of runs that have ended.

        Raises:
            Failed: some processes live on.
        """
        if not _until(lambda: not self._left(), GONE_S):
            left = [f"{pid} {_line(pid)[:60]!r}" for pid in self._left()]
            raise Failed(f"these live on: {', '.join(left)}")

    def _left(self) -> list[int]:
        """Processes of ended runs that live on."""
        return [pid for pid, started in self.below.items() if _started(pid) == started]

    def _alive(self, command: int) -> dict[str, int]:
        """Who is there."""
        found = {COMMAND: command}
        first = self._first()
        for process in _below(command):
            if _line(process).startswith(b"ray::EngineActor."):
                found[ENGINE] = process
            elif _line(process).startswith(b"ray::Rank.") and first is not None:
                found[FIRST if process == first else SECOND] = process
        return found

    def _first(self) -> int | None:
        """The process that said last what the run does."""
        with suppress(OSError, ValueError):
            told: int = json.loads(self._status.read_text(encoding="utf-8"))["pid"]
            return told
        return None

    def _began_s(self) -> float:
        """When it said so."""
        with suppress(OSError):
            return self._status.stat().st_mtime
        return 0.0

    @property
    def _status(self) -> Path:
        return self.run / "status.json"

    def _batches(self) -> list[Path]:
        return [*self.run.glob("rollouts/step-*.parquet")]

    def _await_batches(self, process: subprocess.Popen[bytes], count: int) -> bool:
        """Let a run make so many new batches and a part of the next; whether it goes on.

        Raises:
            Failed: a batch takes too long.
        """
        since_s = time.time()

        def ready() -> bool:
            new = sum(path.stat().st_mtime > since_s for path in self._batches())
            return new >= count or process.poll() is not None

        if not _until(ready, count * BATCH_S):
            raise Failed(f"{count} batches did not come within {count * BATCH_S:.0f} s")
        return not _until(lambda: process.poll() is not None, self.rng.random())

    def _await_batch(self, process: subprocess.Popen[bytes], since_s: float) -> None:
        """Wait for a new batch, and note how long that took since the last death."""

        def ready() -> bool:
            new = any(path.stat().st_mtime > since_s for path in self._batches())
            return new or process.poll() is not None

        if not _until(ready, BATCH_S):
            raise Failed(f"no batch came for {BATCH_S:.0f} s")
        if self.deaths and not self.deaths[-1].seconds:
            last = self.deaths[-1]
            last.seconds = time.time() - last.at_s
            print(
                f"{len(self.deaths):3d}  {last.victim:<12} after batch {last.num_batches:<4} the next one "
                f"{last.seconds:5.1f} s later",
                flush=True,
            )


def _until(ready: Callable[[], bool], limit_s: float) -> bool:
    ends_s = time.monotonic() + limit_s
    while not (found := ready()) and time.monotonic() < ends_s:
        time.sleep(0.05)
    return found


def _line(process: int) -> bytes:
    """The command line of a process; nothing where it is dead."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _started(process: int) -> int | None:
    """When a process started, in clock ticks since the boot; None where it has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # Fields 3 and 22 of proc(5); the name before them may have spaces and brackets.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _below(process: int) -> Iterator[int]:
    """All that a process has started, and what those have."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text(encoding="ascii").split()):
                yield child
                yield from _below(child)


def check(run: Path, accuracy: float) -> str:
    """Prove that a finished run lost nothing; its accuracy in words.

    Raises:
        Failed: it has not finished, or not with this accuracy, or some groups have no end.
    """
    told = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    if told["status"] != "finished":
        raise Failed(f"the run is {told['status']}")
    if left := check_log(read_events(run / "events.log")):
        raise Failed(f"the groups {left} have no end")
    if told["eval_after"] < accuracy:
        raise Failed(f"accuracy {told['eval_after']:.3f} is below {accuracy}")
    return f"accuracy {told['eval_before']:.3f} -> {told['eval_after']:.3f}"


def recoveries_s(run: Path) -> list[float]:
    """Seconds from the loss of each engine until another one may draw, of those that no resume forgot."""
    events = read_events(run / "events.log")
    lost_s = [event["time_s"] for event in events if event["kind"] == "engine_lost"]
    loads_s = [event["time_s"] for event in events if event["kind"] == "weights_loaded"]
    return [min(s for s in loads_s if s > since_s) - since_s for since_s in lost_s]


def main() -> int:
    """Run, kill, take up, and say how it went; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--apart", type=int, default=4, help="at most so many batches between two deaths")
    parser.add_argument("--accuracy", type=float, default=0.85, help="at the end, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder of the run; a temporary one by default")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    victims = [VICTIMS[place % len(VICTIMS)] for place in range(given.kills)]
    rng.shuffle(victims)
    with tempfile.TemporaryDirectory() as aside:
        output = given.output or Path(aside)
        kills = Kills(output / "kills", rng, given.apart, victims)
        where = [f"output={output}", "name=kills"]
        command = [*MILLRACE, "train", given.recipe, *SETTINGS, *where, *given.settings]
        began_s = time.monotonic()
        try:
            while not kills.work_through(command):
                command = [*MILLRACE, "resume", str(kills.run)]
            if kills.victims:
                raise Failed(f"it ended before {len(kills.victims)} deaths; take a smaller --apart")
            kills.check_gone()
            told = check(kills.run, given.accuracy)
            restarts = recoveries_s(kills.run)
        except Failed as failed:
            print(f"failed: {failed}")
            return 1
    for victim in VICTIMS:
        seconds = sorted(death.seconds for death in kills.deaths if death.victim == victim)
        if seconds:
            print(
                f"{victim}: {len(seconds)} deaths, {statistics.median(seconds):.1f} s until the next batch, "
                f"at most {seconds[-1]:.1f} s"
            )
    if restarts:
        usual_s, most_s = statistics.median(restarts), max(restarts)
        print(f"another engine draws {usual_s:.1f} s after a loss was heard, at most {most_s:.1f} s")
    print(f"{given.kills} deaths in {time.monotonic() - began_s:.0f} s, no group lost or doubled; {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
