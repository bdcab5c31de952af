"""By simulation: collocated engines, all divisions of them, and placement by the cost model.

    python benchmarks/serving_policies.py
    python benchmarks/serving_policies.py --engines 4 16 --per-engine 25
    python benchmarks/serving_policies.py --quick   # few requests of one trace; nothing is written

The engines run the real scheduler on a virtual clock; a step takes what a made-up cost model of a GPU
predicts (8 ms, and 40 us for each token). Each trace is served at two rates; what counts is the part of the
requests that meet the objective, without the first tenth. `changing` alternates between long prompts with
short answers and the opposite, a quarter of the requests each. In a batch of a training run all requests come
at once, and what counts are the seconds to the end of the last one, for which `makespan` places requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from common.record import heading, processor, write

from millrace.inference.engine_sizes import EngineSizes
from millrace.planner.durations import lognormal
from millrace.planner.engine_cost import EngineCost
from millrace.planner.placement import Link, Objective
from millrace.simulation.arrivals import ServingRequest, random_requests
from millrace.simulation.serving import BY_COST, Serving, attainment

COST = EngineCost(step_s=8e-3, token_s=4e-5, pair_s=2e-9, row_s=2e-5, context_s=4e-8)
OBJECTIVE = Objective(ttft_s=1.0, tpot_s=0.02)
# 128 KiB a token, as of a model of 8 G parameters.
SIZES = EngineSizes(
    num_blocks=8000,
    block_size=16,
    max_batch_tokens=512,
    max_requests=256,
    max_length=65_536,
    block_bytes=16 * 131_072,
)
LINK = Link(latency_s=1e-3, bytes_per_s=50e9)
# Median and spread of prompts and of answers, burstiness, and requests a second of each engine.
KINDS = {
    "long prompts": ((4000, 0.5), (30, 0.5), 1.0, (1.5, 2.25)),
    "long answers": ((200, 0.6), (250, 0.6), 1.0, (10.0, 20.0)),
    "mixed": ((1200, 1.0), (120, 0.8), 1.0, (3.0, 5.0)),
    "bursty": ((1200, 1.0), (120, 0.8), 3.0, (2.5, 4.0)),
}
CHANGING = (("long prompts", "long answers"), ((1.5, 10.0), (2.25, 20.0)))
# Median and spread of prompts and of answers in a batch of a run.
BATCHES = {"short prompts": ((200, 0.6), (250, 0.6)), "long prompts": ((4000, 0.5), (250, 0.6))}
LINKS = {"NVLink, 200 GB/s": 200e9, "50 GB/s": 50e9, "10 GbE, 1 GB/s": 1e9}
CHUNKS = (256, 512, 2048)

Measure = Callable[[Serving, Sequence[str], Sequence[ServingRequest]], dict[str, Any]]


def made(kind: str, num: int, rate: float, seed: int) -> list[ServingRequest]:
    """Requests of one kind."""
    prompt, output, burstiness, _ = KINDS[kind]
    return random_requests(
        num, rate=rate, burstiness=burstiness, prompt=lognormal(*prompt), output=lognormal(*output), seed=seed
    )


def changing(num: int, rates: Sequence[float], seed: int) -> list[ServingRequest]:
    """Four phases of two kinds in turn."""
    found: list[ServingRequest] = []
    for phase in range(4):
        begin_s = found[-1].arrival_s if found else 0.0
        kind = CHANGING[0][phase % 2]
        for one in made(kind, num // 4, rates[phase % 2], seed + phase):
            number = len(found)
            prompt = (number, *one.prompt[1:])
            found.append(replace(one, number=number, arrival_s=begin_s + one.arrival_s, prompt=prompt))
    return found


def traces(num_engines: int, num: int, seed: int) -> dict[str, list[ServingRequest]]:
    """All traces for so many engines, by kind and load."""
    found = {}
    for load in (0, 1):
        name = ("medium", "high")[load]
        for kind, (*_, rates) in KINDS.items():
            found[f"{kind}, {name}"] = made(kind, num, rates[load] * num_engines, seed)
        rates = [rate * num_engines for rate in CHANGING[1][load]]
        found[f"changing, {name}"] = changing(num, rates, seed)
    return found


def batch(kind: str, num: int, seed: int) -> list[ServingRequest]:
    """Requests of a batch of a run, which all come at once."""
    prompt, output = BATCHES[kind]
    found = random_requests(
        num, rate=1.0, burstiness=1.0, prompt=lognormal(*prompt), output=lognormal(*output), seed=seed
    )
    return [replace(one, arrival_s=0.0) for one in found]


def policies(num_engines: int) -> list[str]:
    """Collocated, quarters of the engines for prompts, and adaptive."""
    quarters = [num_engines * part // 4 for part in (1, 2, 3)]
    return ["collocated", *(f"{one}:{num_engines - one}" for one in quarters), "adaptive"]


def served(serving: Serving, names: Sequence[str], wanted: Sequence[ServingRequest]) -> dict[str, Any]:
    """What meets the objective under each policy, and how often the adaptive one did not split."""
    found: dict[str, Any] = {}
    for name in names:
        times, here = serving.run_counted(name, wanted)
        found[name] = attainment(times, serving.objective)
        if name == "adaptive":
            found["whole"] = here
    static = [found[name] for name in names if name != "adaptive"]
    found["over_best_static"] = found["adaptive"] / max(max(static), 1e-9)
    return found


def batch_seconds(
    serving: Serving, names: Sequence[str], wanted: Sequence[ServingRequest]
) -> dict[str, float]:
    """Seconds to the end of the last request under each policy, and the best static ones over makespan's."""
    names = [*names, "makespan"]
    found = {name: max(one.last_s for one in serving.run(name, wanted)) for name in names}
    best = min(seconds for name, seconds in found.items() if name not in BY_COST)
    return {**found, "over_best_static": best / found["makespan"]}


def line(name: str, found: dict[str, Any]) -> str:
    """A trace of the table."""
    unit = ".1f" if "batch" in name else ".1%"
    cells = [f"{policy} {value:6{unit}}" for policy, value in found.items() if policy != "over_best_static"]
    return f"{name:32}  " + "  ".join(cells) + f"  over the best {found['over_best_static']:.3f}"


def main() -> None:
    """Simulate, print and write after each trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 16, 64], help="multiples of four")
    parser.add_argument("--per-engine", type=int, default=50, help="requests for each engine")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--quick", action="store_true", help="few requests of one trace; nothing is written")
    given = parser.parse_args()
    if given.quick:
        serving = Serving(4, SIZES, COST, LINK, OBJECTIVE)
        print(line("mixed", served(serving, ["collocated", "3:1", "adaptive"], made("mixed", 20, 12.0, 0))))
        return
    cells: dict[str, Any] = {}

    def add(name: str, serving: Serving, wanted: Sequence[ServingRequest], measure: Measure = served) -> None:
        cells[name] = measure(serving, policies(serving.num_engines), wanted)
        print(line(name, cells[name]), flush=True)
        write(
            "serving_policies",
            {
                **heading("serving_policies", f"{processor()}; simulated, no engine ran", "millrace-rl"),
                "cost": asdict(COST),
                "objective": asdict(OBJECTIVE),
                "settings": vars(given),
                "cells": cells,
            },
        )

    for number, num in enumerate(given.engines):
        serving = Serving(num, SIZES, COST, LINK, OBJECTIVE)
        all_of_them = traces(num, num * given.per_engine, given.seed)
        for name, wanted in all_of_them.items():
            add(f"{num} engines, {name}", serving, wanted)
        for name in BATCHES:
            wanted = batch(name, num * given.per_engine, given.seed)
            add(f"{num} engines, batch with {name}", serving, wanted, batch_seconds)
        if number:
            continue
        wanted = all_of_them["mixed, high"]
        for name, bytes_per_s in LINKS.items():
            add(f"{num} engines, {name}", replace(serving, link=Link(1e-3, bytes_per_s)), wanted)
        for chunk in CHUNKS:
            sizes = replace(SIZES, max_batch_tokens=chunk)
            add(f"{num} engines, chunks of {chunk}", replace(serving, sizes=sizes), wanted)


if __name__ == "__main__":
    main()
