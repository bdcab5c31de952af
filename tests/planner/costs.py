"""A cost model of made-up numbers, and loads for it."""

from __future__ import annotations

import numpy as np

from millrace.planner.engine_cost import EngineCost, StepLoad, error_summary, step_load
from millrace.planner.engine_cost_file import CostMeasurement, MeasuredEngine, MeasuredStep

COST = EngineCost(step_s=2e-3, token_s=4e-5, pair_s=2e-7, row_s=1e-5, context_s=9e-7)
ENGINE = MeasuredEngine(
    machine="AMD EPYC",
    device="cpu",
    num_threads=2,
    dtype="float32",
    model_type="qwen3",
    num_parameters=1000,
    pools=((2, 16, 16),),
    block_size=16,
    block_bytes=16 * 2 * 32 * 4,
    max_batch_tokens=8192,
    deterministic=False,
)


def random_loads(seed: int, num: int) -> list[StepLoad]:
    numbers = np.random.default_rng(seed)
    return [
        step_load(numbers.integers(1, 400, rows), numbers.integers(0, 4000, rows))
        for rows in numbers.integers(1, 60, num)
    ]


def measurement() -> CostMeasurement:
    loads = random_loads(0, 12)
    return CostMeasurement(
        engine=ENGINE,
        cost=COST,
        fit_error=error_summary([0.1, -0.2]),
        held_out_error=error_summary([-0.3]),
        steps=tuple(MeasuredStep(load, COST.seconds(load) * 1.1, i == 0) for i, load in enumerate(loads)),
        seed=3,
        seconds=5.0,
        num_skipped=2,
    )
