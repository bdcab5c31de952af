"""Probes are steps of the engine itself, with the load that was asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from millrace.errors import PlanError
from millrace.inference.engine_sizes import EngineSizes
from millrace.inference.step_probes import (
    ProbeRunner,
    StepProbe,
    engine_identity,
    measure_engine,
    probes,
)
from millrace.planner.engine_cost import step_load
from millrace.types import SamplingParams
from tests.inference.fresh import paged
from tests.models.tiny import tiny_model

SIZES = EngineSizes(num_blocks=128, block_size=4, max_batch_tokens=24, max_requests=8, max_length=128)


def test_a_probe_is_one_step_of_the_engine_with_imported_contexts():
    engine = paged(tiny_model("qwen3"))
    probe = StepProbe(chunks=((6, 0), (5, 16)), rows=(4, 12, 12))
    load, seconds = ProbeRunner(engine, seed=0).run(probe)
    # The step before computed one token of each request that decodes.
    assert load == (14, 6 * 3 + 5 * 18.5 + 5.5 + 2 * 13.5, 5, 16 + 5 + 13 + 13)
    assert seconds > 0
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_refused) == (0, 0, 0)
    assert stats.prompt_tokens_computed == 3 + 6 + 5 and stats.prompt_tokens_imported == 4 + 12 + 12 + 16


def test_probes_fit_the_engine_and_some_are_held_out():
    found = probes(SIZES, seed=0)
    assert found == probes(SIZES, seed=0) != probes(SIZES, seed=1)
    assert all(probe.fits(SIZES) for probe in found)
    assert sum(probe.held_out for probe in found) == sum(not probe.held_out for probe in found) // 3
    assert {len(probe.rows) for probe in found} >= {0, 1, 4}
    with pytest.raises(PlanError, match="the engine is too small for a probe"):
        probes(replace(SIZES, max_length=4), seed=0)


def test_a_busy_engine_is_not_measured():
    engine = paged(tiny_model("qwen3"))
    engine.add((1, 2, 3), [SamplingParams(max_tokens=9)])
    with pytest.raises(
        RuntimeError, match="the engine computed 7 tokens of 2 requests.* has 4 of 1; it must"
    ):
        ProbeRunner(engine, seed=0).run(StepProbe(((4, 0),), ()))


def test_a_cost_model_is_fitted_to_steps_of_an_engine():
    """A clock that does not move lets every probe run; what they take depends on the machine."""
    model = tiny_model("qwen3")
    engine = paged(model)
    identity = engine_identity(model, engine)
    sizes = replace(SIZES, max_length=32, max_requests=4)
    found = measure_engine(engine, identity, sizes, seconds=1e9, clock=lambda: 0.0)
    assert found.engine.pools == ((2, 16, 16),) * 2 and found.engine.dtype == "float32"
    assert found.num_skipped == 0 and len(found.steps) == len(probes(sizes, 0))
    assert found.fit_error.num_steps + found.held_out_error.num_steps == len(found.steps)
    assert found.cost.seconds(step_load(np.array([4]), np.array([4]))) > 0
    assert not engine.has_work


def test_too_few_seconds_are_an_error():
    model = tiny_model("qwen3")
    engine = paged(model)
    times = iter(range(0, 10**6, 100))
    with pytest.raises(PlanError, match="and 0 to test the model; 10 and 3 are needed: allow more seconds"):
        measure_engine(
            engine,
            engine_identity(model, engine),
            SIZES,
            seconds=1.0,
            clock=lambda: float(next(times)),
        )
