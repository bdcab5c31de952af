"""Run a command whose child processes are stopped for 0.1 to 0.5 s at random, as on a busy machine.

    python scripts/stutter.py -- .venv/bin/python -m pytest -m "world and not slow"

Every process below the command, but not the command itself, may be stopped (SIGSTOP) and goes on a moment
later (SIGCONT). Tests that are right do not notice. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHORTEST_S, LONGEST_S = 0.1, 0.5
LOOK_S = 0.05


def below(process: int) -> Iterator[int]:
    """All processes that a process has started, and those that they have."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text(encoding="ascii").split()):
                yield child
                yield from below(child)


def stutter(command: subprocess.Popen[bytes], rng: random.Random, pause_s: float) -> int:
    """Stop random processes below a command until it ends; how often.

    Args:
        command: it runs.
        rng: chooses processes, and how long each is stopped.
        pause_s: mean time from one stop to the next, in seconds.
    """
    num_stops, stopped = 0, dict[int, float]()
    next_s = time.monotonic()
    try:
        while command.poll() is None:
            now_s = time.monotonic()
            for process, until_s in list(stopped.items()):
                if now_s >= until_s:
                    _signal(process, signal.SIGCONT)
                    del stopped[process]
            found = [process for process in below(command.pid) if _runs(process)]
            if found and now_s >= next_s:
                process = rng.choice(found)
                stopped[process] = now_s + rng.uniform(SHORTEST_S, LONGEST_S)
                _signal(process, signal.SIGSTOP)
                next_s, num_stops = now_s + rng.expovariate(1 / pause_s), num_stops + 1
            time.sleep(LOOK_S)
    finally:
        for process in stopped:
            _signal(process, signal.SIGCONT)
    return num_stops


def _runs(process: int) -> bool:
    """Whether a process is there and not stopped, by us or by whoever tries what becomes of that."""
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        return state.rpartition(")")[2].split()[0] not in "TtZX"
    return False


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


def main() -> int:
    """Run the command, stop its processes, say how often; its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.2, help="mean seconds from one stop to the next")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    given = parser.parse_args()
    command = subprocess.Popen(given.command)
    try:
        num_stops = stutter(command, random.Random(given.seed), given.pause)
    except KeyboardInterrupt:
        command.wait()
        raise
    print(f"{num_stops} stops of {SHORTEST_S} to {LONGEST_S} s")
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())
