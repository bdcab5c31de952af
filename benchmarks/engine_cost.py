"""How well the cost model of an engine's step predicts a workload that it was not fitted to.

    python benchmarks/engine_cost.py
    python benchmarks/engine_cost.py --quick   # a tiny model and few requests; nothing is written

Qwen3's shape with 32.5 M parameters, float32 and bfloat16, one thread. The model is measured as by `millrace
measure engine`. Then requests with Poisson arrivals are served by the engine, on a virtual clock on which a
step takes what it took, and by the simulation: once with the recorded seconds, where every plan must be the
engine's, and once with the model's. `corrected` is the model's error where each prediction is multiplied by
the drift of the steps before it.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from common.record import heading, processor, write
from common.validate_serving import ServingValidity, validate_serving
from peers.workloads import SHAPES

from millrace.inference.engine import PagedEngine
from millrace.inference.step_probes import engine_identity, measure_engine
from millrace.models.decoding import prepare
from millrace.models.load import Model, fresh_config, fresh_model
from millrace.planner.durations import lognormal
from millrace.simulation.arrivals import ServingRequest, random_requests

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY["num_key_value_heads"] = 2
LENGTH, SLOTS, BATCH_TOKENS, ROWS = 1024, 40_000, 256, 64


def model(dtype: str, *, quick: bool) -> Model:
    """The small Qwen3 of `rollout.py`, or a tiny one, with random weights."""
    shape = {**(TINY if quick else SHAPES["rollout"]), "max_position_embeddings": LENGTH}
    config = fresh_config("qwen3", shape, vocab_size=shape.pop("vocab_size", 500), eos_token_id=0)
    found = fresh_model(config, seed=0, dtype=getattr(torch, dtype)).requires_grad_(False)
    prepare(found)
    return found


def engine(weights: Model) -> PagedEngine:
    """An engine whose steps are short enough for a CPU."""
    return PagedEngine(
        weights,
        lambda tokens: "",
        max_cache_tokens=SLOTS,
        max_batch_tokens=BATCH_TOKENS,
        max_requests=ROWS,
    )


def workload(num: int, rate: float, vocab_size: int) -> list[ServingRequest]:
    """Poisson arrivals, prompts of 100 tokens and answers of 20 in the median."""
    lengths = lognormal(100, 0.8), lognormal(20, 0.6)
    found = random_requests(num, rate=rate, burstiness=1, prompt=lengths[0], output=lengths[1], seed=0)
    numbers = np.random.default_rng(0)
    return [
        ServingRequest(
            one.number,
            one.arrival_s,
            tuple(numbers.integers(1, vocab_size, min(LENGTH // 2, len(one.prompt))).tolist()),
            min(LENGTH // 4, one.num_output),
        )
        for one in found
    ]


def case(dtype: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure a model, serve the workload, and print both."""
    weights = model(dtype, quick=given.quick)
    measured_engine, vocab_size = engine(weights), weights.config.get_text_config().vocab_size
    sizes = measured_engine.sizes
    limits = replace(sizes, max_length=128) if given.quick else sizes
    identity = engine_identity(weights, measured_engine)
    measured = measure_engine(measured_engine, identity, limits, seconds=given.seconds)
    num, rate = (15, 50.0) if given.quick else (given.requests, given.rate)
    found = validate_serving(engine(weights), sizes, workload(num, rate, vocab_size), measured.cost)
    errors = {
        "fitted": measured.fit_error,
        "held out": measured.held_out_error,
        "workload": found.step_error,
        "corrected": found.corrected_error,
    }
    for name, error in errors.items():
        print(f"{dtype:9s} {name:9s} median {error.median:.1%}  p90 {error.p90:.1%}  of {error.num_steps}")
    print(f"{dtype:9s} plans that differ: {found.num_unlike} of {found.num_steps}; {ends(found)}")
    print(f"{dtype:9s} drift at the end {found.drift:.2f}")
    return {
        "cost": asdict(measured.cost),
        **{f"error_{name.replace(' ', '_')}": error._asdict() for name, error in errors.items()},
        "drift": found.drift,
        "plans_unlike": found.num_unlike,
        "makespan_s": found.makespan,
        "ttft_s": found.ttft,
    }


def ends(found: ServingValidity) -> str:
    """Makespan and mean time to the first token, simulated over real."""
    return (
        f"simulated over real: makespan {found.makespan[1] / found.makespan[0]:.3f}, "
        f"time to first token {found.ttft[1] / found.ttft[0]:.3f}"
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="of the measurement of each dtype")
    parser.add_argument("--requests", type=int, default=40, help="of the workload")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--quick", action="store_true", help="a tiny model; nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = {
        dtype: case(dtype, given) for dtype in (("float32",) if given.quick else ("float32", "bfloat16"))
    }
    if not given.quick:
        machine = f"{processor()}, one thread, load average {os.getloadavg()[1]:.1f}"
        write("engine_cost", {**heading("engine_cost", machine, "torch", "millrace-rl"), "cases": cases})


if __name__ == "__main__":
    main()
