"""The process of one engine: it takes jobs as lines of JSON and answers each with a line."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

from workloads import Workload

MARK = "RESULT "  # libraries print to the same stream
# OpenMP's threads of the engine whose turn has just ended spin on for 0.2 s, on the cores of this one.
REST_S = 0.4


class Engine(Protocol):
    """What a peer must do."""

    def generate(self, one: Workload, *, logprobs: bool) -> list[list[int]]:
        """Draw the tokens of every request, in order, exactly as many as it asks for."""
        ...

    def device_bytes(self) -> int:
        """The most memory held on a GPU so far; asked for only where there is one."""
        ...


def serve(make: Callable[..., Engine], packages: tuple[str, ...]) -> None:
    """Answer jobs until the stream ends.

    The arguments are a model's folder, its dtype, the number of threads and the device. A job names the file
    of a workload; the answer holds the seconds it took, its tokens, and the most memory held so far.

    Args:
        make: builds the engine of (folder, dtype, threads, device).
        packages: whose versions are told first.
    """
    folder, dtype, threads, device = sys.argv[1:5]
    engine = make(folder, dtype, int(threads), device)
    answer({name: metadata.version(name) for name in packages})
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        if "call" in job:  # something that only this engine can tell
            answer(getattr(engine, job["call"])(Workload.load(job["workload"])))
            continue
        one = Workload.load(job["workload"])
        time.sleep(REST_S)
        gc.collect()  # or a collection of everything, which takes 0.2 s, falls into some short turn
        start = time.perf_counter()
        tokens = engine.generate(one, logprobs=job["logprobs"])
        took = time.perf_counter() - start
        drawn = [len(one_request) for one_request in tokens]
        if drawn != one.lengths:
            raise SystemExit(f"{sum(drawn)} tokens were drawn for {one.name}; {one.num_drawn} were asked for")
        peak = peak_bytes() if device == "cpu" else engine.device_bytes()
        answer({"seconds": took, "tokens": tokens if job["tokens"] else None, "peak_bytes": peak})


def answer(told: dict[str, Any]) -> None:
    """Send one line to the benchmark."""
    sys.stdout.write(f"\n{MARK}{json.dumps(told)}\n")
    sys.stdout.flush()


def peak_bytes() -> int:
    """The most resident memory of this process and of those it started that still run, added up."""
    if not os.path.isdir("/proc/self/task"):  # macOS counts in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not getrusage: there a process begins with the peak of the one that started it.
    found = ["self"]
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", encoding="utf-8") as children:
            found += children.read().split()
    peak = 0
    for process in found:
        with open(f"/proc/{process}/status", encoding="utf-8") as status:
            peak += sum(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return peak * 1024
