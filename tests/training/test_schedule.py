"""The learning rate and a line, by hand."""

from __future__ import annotations

import pytest

from millrace.training.schedule import learning_rate, linear
from tests.close import close_fp64


def rates(shape, steps, **more):
    options = {"peak": 2.0, "shape": shape, "warmup_steps": 4, "total_steps": 14} | more
    return [learning_rate(step, **options) for step in steps]


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_the_ramp_rises_in_equal_parts_and_reaches_the_peak_at_its_last_step(shape):
    close_fp64(rates(shape, range(5)), [0.5, 1.0, 1.5, 2.0, 2.0])


def test_a_constant_schedule_stays():
    assert rates("constant", [5, 13, 14, 1000]) == [2.0] * 4


def test_a_linear_schedule_falls_to_a_tenth_at_the_last_step_and_stays_there():
    # 10 steps after the ramp; half of them done is 0.1 + 0.9 / 2 of the peak.
    close_fp64(rates("linear", [5, 9, 14, 30]), [1.82, 1.1, 0.2, 0.2])


def test_a_cosine_schedule_falls_to_a_tenth_at_the_last_step_and_stays_there():
    # 0.5 (1 + cos(pi / 5)) = 0.9045084971874737 after two of ten steps.
    close_fp64(rates("cosine", [6, 9, 14, 30]), [2 * (0.1 + 0.9 * 0.9045084971874737), 1.1, 0.2, 0.2])


def test_without_a_ramp_the_first_step_has_the_peak():
    assert rates("linear", [0], warmup_steps=0) == [2.0]


def test_a_ramp_longer_than_the_run_never_divides_by_zero():
    assert rates("linear", [2, 4], warmup_steps=4, total_steps=3) == [1.5, 2.0]


def test_a_line_ends_at_the_last_step_and_stays_there():
    found = [linear(step, first=2.0, last=-1.0, total_steps=6) for step in (0, 2, 5, 6, 60)]
    close_fp64(found, [2.0, 1.0, -0.5, -1.0, -1.0])
