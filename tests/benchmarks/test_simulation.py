"""What the benchmark of simulations is made of; nothing here looks at a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simulation

from millrace.planner.hardware import GPUS
from millrace.planner.model_shape import ModelShape
from tests.close import close_fp64

SMALL = simulation.Conditions(ModelShape.of(simulation.QWEN_1_5B), GPUS["H100"], 4096, 300.0)


def test_halving_finds_where_a_rising_function_takes_a_value():
    close_fp64(simulation.halved(lambda x: x**2, 9.0, 0.1, 100.0), 3.0, rtol=0.02)


def test_training_is_shared_and_an_engines_step_can_be_given():
    close_fp64(SMALL.train_s(8), 2 * SMALL.train_s(16))
    longer = replace(SMALL, mean_tokens=600.0)
    assert 1.9 * SMALL.train_s(8) < longer.train_s(8) + 200 / 500 * SMALL.train_s(8)
    assert SMALL.work(1, 4, 0.125).costs.service.step_s == 0.125
    assert SMALL.work(1, 4).costs.service.step_s < 0.01


def test_lengths_have_the_mean_that_is_asked_for():
    lengths = SMALL.work(0, 4).costs.num_tokens
    close_fp64(sum(lengths((n + 0.5) / 50_000) for n in range(50_000)) / 50_000, 300.0, rtol=0.01)


@pytest.mark.parametrize("case", simulation.VERL, ids=lambda case: case.name)
def test_published_seconds_are_parts_of_their_steps(case):
    assert case.sample_s + case.update_s < case.sync_s
    assert case.wait_s < case.async_s < case.sync_s
    assert 0 < case.split < case.num_gpus
