"""What the controller costs: 10,000 trajectories in flight over 1,000 simulated engines.

    python benchmarks/controller.py            # writes results/controller.json
    python benchmarks/controller.py --quick    # a tenth of it, writes nothing

The controller is the one of every run (`millrace.rollout.manager` with its flow and its event log,
which goes to a file); engines, rewards and trainer are on a virtual clock (`simulation.backend`), and the
time that the simulation itself takes is left out. A trajectory costs what the processor does for it from its
prompt to its batch.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from common.record import heading, processor, write

from millrace.data.prompts import PromptStream
from millrace.eventlog.log import EventLog, check_log, read_events
from millrace.planner.durations import exponential, lognormal
from millrace.rollout.backend import Event
from millrace.rollout.manager import RolloutManager
from millrace.rollout.recorder import RecordingBackend
from millrace.rollout.staleness import StalenessController, StalenessPolicy
from millrace.simulation.simulated_backend import SimulatedBackend
from millrace.simulation.simulated_engine import Costs
from millrace.types import Prompt, SamplingParams

NUM_SAMPLES, NUM_BATCHES, STALENESS, TRAIN_S, DEADLINE_S = 8, 8, 1, 20.0, 1e6
ORDERS = ("execute", "wait", "poll", "now")


class Watched(SimulatedBackend):
    """A virtual runtime that knows how long it took itself, and what it told."""

    seconds, num_events = 0.0, 0

    def poll(self) -> list[Event]:
        """As the virtual runtime does, and count."""
        events = super().poll()
        self.num_events += len(events)
        return events


def timed(backend: Watched, command: Callable[..., Any]) -> Callable[..., Any]:
    """An order whose time goes to the simulation."""

    def call(*given: Any) -> Any:
        begun_s = time.process_time()
        try:
            return command(*given)
        finally:
            backend.seconds += time.process_time() - begun_s

    return call


def measure(num_engines: int, num_flying: int, folder: Path) -> dict[str, Any]:
    """One run: what a trajectory cost."""
    size = num_flying // (NUM_SAMPLES * (STALENESS + 1))
    rules = StalenessPolicy(groups_per_step=size, staleness=STALENESS)
    prompts = [Prompt(f"train:{i}", (i, *range(99)), "") for i in range(5000)]
    costs = Costs(num_tokens=lognormal(300, 0.7), score_s=exponential(0.5), load_s=exponential(0.5))
    backend = Watched(num_engines, costs)
    for command in ORDERS:
        setattr(backend, command, timed(backend, getattr(backend, command)))
    log = EventLog(folder / "events.log", backend.now)
    log.add("begin", rules=asdict(rules), num_batches=NUM_BATCHES)
    controller = StalenessController(rules, num_batches=NUM_BATCHES, log_event=log.add)
    params = SamplingParams(max_tokens=1000)
    rollouts = RolloutManager(
        controller,
        RecordingBackend(backend, log.add),
        PromptStream(prompts, seed=0, shuffle=False),
        prompts={prompt.id: prompt for prompt in prompts},
        params=lambda number, sample, turn: replace(params, seed=number * NUM_SAMPLES + sample),
        num_samples=NUM_SAMPLES,
        request_s=1e5,
        load_s=1e5,
        log_event=log.add,
    )
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    begun_s, spent = time.process_time(), 0.0
    rollouts.begin(0)
    for batch in range(NUM_BATCHES):
        rollouts.next_batch(DEADLINE_S)
        end_s = backend.now() + TRAIN_S
        while backend.now() < end_s:
            rollouts.advance(end_s - backend.now())
        rollouts.update_weights(batch + 1)
    rollouts.wait_for_weights(DEADLINE_S)
    spent = time.process_time() - begun_s
    log.close()
    assert check_log(read_events(folder / "events.log")) == []
    num_trajectories = NUM_BATCHES * size * NUM_SAMPLES
    controller_s = spent - backend.seconds
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "engines": num_engines,
        "in_flight": size * NUM_SAMPLES * (STALENESS + 1),
        "trajectories": num_trajectories,
        "controller_us_per_trajectory": 1e6 * controller_s / num_trajectories,
        "events_per_s": backend.num_events / controller_s,
        "simulation_us_per_trajectory": 1e6 * backend.seconds / num_trajectories,
        "virtual_s": backend.now(),
        "memory_bytes_per_trajectory_in_flight": (peak_bytes - before_bytes) / num_flying,
        "log_bytes_per_trajectory": (folder / "events.log").stat().st_size / num_trajectories,
    }


def main() -> None:
    """Measure and write; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of it; nothing is written")
    given = parser.parse_args()
    divisor = 10 if given.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        found = measure(1000 // divisor, 10_000 // divisor, Path(folder))
    for name, number in found.items():
        print(f"{name:40s} {number:14,.1f}")
    if not given.quick:
        written = heading("controller", f"{processor()}, 1 of {os.cpu_count()} cores")
        versions = {"python": platform.python_version(), "millrace": metadata.version("millrace-rl")}
        write("controller", {**written, "versions": versions, **found})


if __name__ == "__main__":
    main()
