"""Distributions and what a step costs."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from millrace.planner.durations import (
    StepCost,
    constant,
    exponential,
    lognormal,
    measured,
    planned_service,
    share_of,
)
from millrace.planner.hardware import GPUS
from millrace.planner.layout import Layout
from millrace.planner.memory import Workload, memory_per_rank
from millrace.planner.model_shape import ModelShape
from millrace.planner.step_time import step_time
from tests.close import close_fp64
from tests.planner.shapes import LLAMA_8B, MIXTRAL

SHARES = [(i + 0.5) / 20_000 for i in range(20_000)]


def test_quantiles_are_those_of_their_distribution():
    assert {constant(3.0)(share) for share in SHARES} == {3.0}
    assert constant(0.0)(0.7) == 0.0
    long_tail = lognormal(100.0, 0.8)
    close_fp64(long_tail(0.5), 100.0)
    # The share of the normal distribution below one standard deviation.
    close_fp64(long_tail(statistics.NormalDist().cdf(1.0)), 100.0 * math.exp(0.8))
    close_fp64(statistics.mean(map(long_tail, SHARES)), 100.0 * math.exp(0.8**2 / 2), rtol=0.01)
    waiting = exponential(7.0)
    close_fp64(waiting(0.5), 7.0 * math.log(2))
    close_fp64(statistics.mean(map(waiting, SHARES)), 7.0, rtol=0.01)


def test_measured_values_come_as_often_as_they_were_measured():
    again = measured([4.0, 1.0, 1.0, 9.0])
    assert [again(share) for share in (0.0, 0.3, 0.49, 0.5, 0.74, 0.75, 1.0)] == [1, 1, 1, 4, 4, 9, 9]


@pytest.mark.parametrize("make", [lognormal(2.0, 1.0), exponential(2.0), measured([1.0, 2.0]), constant(1.0)])
def test_the_ends_are_finite_and_shares_keep_their_order(make):
    values = [make(share) for share in (0.0, 1e-12, 0.2, 0.8, 1 - 1e-12, 1.0)]
    assert values == sorted(values)
    assert values[0] >= 0
    assert values[-1] < math.inf


@pytest.mark.parametrize(
    "make",
    [
        lambda: constant(-1.0),
        lambda: lognormal(math.nan, 1.0),
        lambda: lognormal(1.0, -1.0),
        lambda: exponential(math.inf),
        lambda: measured([1.0, -2.0]),
        lambda: measured([math.inf, 1.0, 2.0]),
        lambda: measured([]),
    ],
)
def test_what_is_no_duration_is_refused(make):
    with pytest.raises(ValueError, match=r"it must be 0 or more and finite|needs at least one"):
        make()


def test_a_step_costs_more_the_more_run():
    service = StepCost(step_s=0.5, row_s=0.25, prompt_token_s=0.0)
    close_fp64([service.token_s(1), service.token_s(6)], [0.75, 2.0])


def test_a_step_is_bound_by_products_where_those_take_longer():
    service = StepCost(step_s=0.5, row_s=0.25, prompt_token_s=0.0, product_s=0.5)
    close_fp64([service.token_s(1), service.token_s(2), service.token_s(8)], [0.75, 1.0, 4.0])


@pytest.mark.parametrize("gpu", ["H200", "4090"])
@pytest.mark.parametrize("num_sequences", [1, 64, 512])
@pytest.mark.parametrize("described", [LLAMA_8B, MIXTRAL])
def test_engines_cost_what_a_plan_says(described, num_sequences, gpu):
    """Where every answer is as long as it may be, a simulation and `step_time` count the same."""
    shape, gpu, layout = ModelShape.of(described), GPUS[gpu], Layout()
    work = Workload(512, 1024, num_sequences, 8, 4096, 2, 2, 2, cache_tokens=10**7)
    memory = memory_per_rank(shape, layout, work, gpu.memory_bytes)
    times = step_time(shape, layout, work, memory, gpu, mfu=0.3)
    service = planned_service(shape, work, memory, gpu, mfu=0.3, num_running=num_sequences)
    close_fp64(service.token_s(num_sequences) * 1024, times.decode)
    close_fp64(service.prompt_token_s * 512 * math.ceil(num_sequences / 8), times.prefill)


def test_neighbouring_seeds_share_nothing():
    shares = [share_of(seed) for seed in range(20_000)]
    assert all(0 <= share < 1 for share in shares)
    close_fp64(statistics.mean(shares), 0.5, rtol=0.02)
    close_fp64(statistics.mean(abs(a - b) for a, b in itertools.pairwise(shares)), 1 / 3, rtol=0.02)
