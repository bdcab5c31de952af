"""The simulation of serving makes the plans of the engine; no seconds are compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from common.validate_serving import validate_serving

from millrace.simulation.arrivals import ServingRequest
from tests.inference.fresh import paged
from tests.models.tiny import VOCABULARY, tiny_model
from tests.planner.costs import COST


def small_workload(seed: int) -> list[ServingRequest]:
    """Requests for the tiny engine: some prompts are equal or share a beginning, and many arrive at once."""
    numbers = np.random.default_rng(seed)
    found = []
    for number in range(30):
        prompt = tuple(numbers.integers(1, VOCABULARY, numbers.integers(1, 60)).tolist())
        if number % 3 == 1:
            prompt = found[-1].prompt + prompt[:3]
        elif number % 3 == 2:
            prompt = found[-1].prompt
        arrival_s = 0.001 * number if number % 4 else 0.0
        found.append(ServingRequest(number, arrival_s, prompt, int(numbers.integers(1, 20))))
    return found


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("seed", range(2))
def test_the_simulation_makes_the_plans_of_the_engine(seed):
    """With what the steps took on the engine, every plan is the engine's, so the scheduler adds no error."""
    engine = paged(tiny_model("qwen3"))
    found = validate_serving(engine, engine.sizes, small_workload(seed), COST)
    assert found.num_steps > 50 and found.num_unlike == 0
    assert found.makespan[1] > 0 and found.step_error.num_steps == found.num_steps


def test_another_scheduler_is_noticed():
    engine = paged(tiny_model("qwen3"))
    sizes = replace(engine.sizes, max_batch_tokens=engine.sizes.max_batch_tokens - 1)
    assert validate_serving(engine, sizes, small_workload(0), COST).num_unlike > 0
