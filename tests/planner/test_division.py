"""How workers are divided: what the cost model predicts for the last requests, and no flapping."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.planner.division import RecentRequests, choose_division, predicted_violations
from millrace.planner.engine_cost import EngineCost
from millrace.planner.placement import Link, Objective, ServingModel
from tests.close import close_fp64

COST = EngineCost(step_s=8e-3, token_s=4e-5, pair_s=2e-9, row_s=2e-5, context_s=4e-8)
TARGETS = Objective(1.0, 0.02)
MODEL = ServingModel(COST, 512, 16, 16 * 131_072, Link(1e-3, 50e9), TARGETS)


def workload(rate: float, prompt: float, output: float, variation: float = 1.0) -> RecentRequests:
    numbers = np.random.default_rng(0)
    prompt_N, output_N = prompt * numbers.lognormal(0, 0.5, 64), output * numbers.lognormal(0, 0.5, 64)
    return RecentRequests(rate, variation, prompt_N, np.stack([output_N * 0.7, output_N, output_N * 1.4], 1))


def test_long_prompts_beside_a_tight_target_are_computed_apart():
    long = workload(6.0, 4000.0, 30.0)
    assert choose_division(long, 4, MODEL, TARGETS) == 3
    assert choose_division(long, 4, MODEL, Objective(1.0, 0.05)) == 0
    assert choose_division(workload(60.0, 100.0, 200.0), 4, MODEL, TARGETS) == 0


def test_the_load_decides_how_many_workers_compute_prompts():
    chosen = [choose_division(workload(rate, 4000.0, 30.0), 16, MODEL, TARGETS) for rate in (8.0, 24.0)]
    assert 0 < chosen[0] <= chosen[1] < 16


def test_a_division_is_kept_unless_another_one_is_better_by_the_stated_gain():
    some = workload(6.0, 4000.0, 30.0)
    score = [predicted_violations(some, 4, number, MODEL, TARGETS) for number in range(4)]
    assert score[3] + 0.01 < score[0] < score[2]
    assert choose_division(some, 4, MODEL, TARGETS, previous=0) == 3
    slow = workload(1.0, 4000.0, 30.0)
    kept = [choose_division(slow, 4, MODEL, TARGETS, previous=number) for number in (0, 3)]
    assert kept == [0, 3], "a gain of less than 1 % of the requests"


def test_a_load_that_no_division_carries_misses_every_target():
    flood = workload(1000.0, 4000.0, 30.0)
    assert all(predicted_violations(flood, 4, number, MODEL, TARGETS) >= 1 for number in range(4))


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_without_load_a_request_takes_what_its_steps_take(rate):
    """A first token of 0.28 s on average and a step of 8 ms are within the targets."""
    close_fp64(predicted_violations(workload(rate, 4000.0, 30.0), 4, 0, MODEL, TARGETS), 0.0, atol=2e-3)
