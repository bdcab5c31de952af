"""Distributions and what a step costs."""

from __future__ import annotations

import math
import statistics

import pytest

from millrace.planner.simulate import Service, constant, exponential, lognormal, measured
from tests.close import close_fp64

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
    service = Service(step_s=0.5, row_s=0.25, prompt_token_s=0.0)
    close_fp64([service.token_s(1), service.token_s(6)], [0.75, 2.0])
