"""What a run in a sandbox costs: programs one after another, in each kind, and a start of Python for each.

    python benchmarks/sandbox.py            # writes results/sandbox.json
    python benchmarks/sandbox.py --quick    # a twentieth of it, writes nothing

The program prints a product; between two runs the work folder is emptied. `process` is what a run costs
without a fork server: bubblewrap and Python are started for each. Kinds that this machine does not have are
left out, and without bubblewrap the script ends with status 2.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from statistics import median, quantiles
from typing import Any

from common.record import heading, processor, write

from millrace.environments.sandbox.execution import RunLimits, SandboxError
from millrace.environments.sandbox.open_sandbox import SandboxKind, open_sandbox
from millrace.processes.bubblewrap import ISOLATION, PROC, find_bubblewrap

PROGRAM, ANSWER = "print(47 * 36)", "1692\n"
KINDS: tuple[SandboxKind, ...] = ("bubblewrap", "monty", "wasm", "none")
LACKING = 2


def timed(once: Callable[[], str], num_runs: int) -> dict[str, Any]:
    """Milliseconds of a run, and runs per second of all of them."""
    seconds = []
    for _ in range(num_runs):
        begun_s = time.perf_counter()
        if once() != ANSWER:
            raise RuntimeError(f"{PROGRAM} printed something else")
        seconds.append(time.perf_counter() - begun_s)
    return {
        "runs": num_runs,
        "median_ms": 1000 * median(seconds),
        "p99_ms": 1000 * quantiles(seconds, n=100)[98],
        "runs_per_s": num_runs / sum(seconds),
    }


def measure(kind: SandboxKind, num_runs: int) -> dict[str, Any]:
    """One sandbox: its start, then runs with an empty work folder each."""
    begun_s = time.perf_counter()
    sandbox = open_sandbox(kind, RunLimits(wall_s=60.0))
    start_ms = 1000 * (time.perf_counter() - begun_s)

    def once() -> str:
        done = sandbox.run(PROGRAM)
        sandbox.clear()
        return done.stdout

    try:
        return {"start_ms": start_ms, **timed(once, num_runs)}
    finally:
        sandbox.close()


def in_a_process(bubblewrap: str) -> str:
    """The program in a bubblewrap and a Python of its own."""
    mounts = ["--ro-bind", "/", "/", *PROC, "--dev", "/dev", "--tmpfs", "/tmp"]
    command = [bubblewrap, *ISOLATION, *mounts, sys.executable, "-I", "-S", "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Measure and write; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a twentieth of it; nothing is written")
    given = parser.parse_args()
    bubblewrap = find_bubblewrap()
    if bubblewrap is None:
        print("bubblewrap is not installed, or does not work here")
        return LACKING
    num_runs = 100 if given.quick else 2000
    found: dict[str, Any] = {}
    for kind in KINDS:
        try:
            found[kind] = measure(kind, num_runs // 10 if kind == "wasm" else num_runs)
        except SandboxError as error:
            print(f"{kind}: {error}")
    found["process"] = timed(lambda: in_a_process(bubblewrap), num_runs // 10)
    for kind, numbers in found.items():
        print(f"{kind:12}", *(f"{name} {number:.2f}" for name, number in numbers.items()))
    if not given.quick:
        load = f", load {os.getloadavg()[0]:.0f}"
        versions = {"python": platform.python_version(), "millrace": metadata.version("millrace-rl")}
        about = heading("sandbox", f"{processor()}, {os.cpu_count()} cores{load}")
        write("sandbox", {**about, "versions": versions, "bubblewrap": version(bubblewrap), **found})
    return 0


def version(bubblewrap: str) -> str:
    """The version of bubblewrap."""
    return subprocess.run(
        [bubblewrap, "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[1]


if __name__ == "__main__":
    sys.exit(main())
