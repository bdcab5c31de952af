"""The cost model of a step is fitted to measured steps, and its file is for one engine alone."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import numpy as np
import pytest

from millrace.errors import PlanError
from millrace.planner.engine_cost import (
    StepLoad,
    error_summary,
    fit_engine_cost,
    relative_errors,
    step_load,
)
from millrace.planner.engine_cost_file import read_cost, write_cost
from millrace.planner.step_drift import StepDrift
from tests.close import close_fp64
from tests.planner.costs import COST, ENGINE, measurement, random_loads


def test_the_load_of_a_plan_is_its_sums():
    """A chunk of 6 tokens behind 10, and a request that decodes behind 20."""
    load = step_load(np.array([6, 1]), np.array([10, 20]))
    assert load == (7, 6 * 13 + 20.5, 2, 30)
    close_fp64(COST.seconds(load), 2e-3 + 7 * 4e-5 + 98.5 * 2e-7 + 2e-5 + 30 * 9e-7)


def test_the_coefficients_of_exact_steps_are_found():
    loads = random_loads(0, 40)
    found = fit_engine_cost(loads, [COST.seconds(load) for load in loads])
    close_fp64(np.array(astuple(found)) / np.array(astuple(COST)), np.ones(5), rtol=1e-6)


def test_no_coefficient_is_negative_and_the_relative_error_counts():
    """Seconds that fall with the context would need a negative coefficient; a slow step weighs no more."""
    loads = random_loads(1, 40)
    actual = [COST.seconds(load) - 5e-7 * load.context for load in loads]
    found = fit_engine_cost([*loads], [max(seconds, 1e-4) for seconds in actual])
    assert min(astuple(found)) >= 0
    twice = [(StepLoad(1, 0, 1, 0), 1.0)] * 9 + [(StepLoad(1000, 0, 1, 0), 1000.0)] * 9
    cost = fit_engine_cost(*zip(*twice, strict=True))
    assert error_summary(relative_errors(cost, *zip(*twice, strict=True))).p90 < 1e-6


def test_too_few_steps_are_refused():
    with pytest.raises(PlanError, match="9 measured steps were given; a cost model needs 10, each above 0 s"):
        fit_engine_cost(random_loads(0, 9), [1.0] * 9)


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "cost.json"
    write_cost(measurement(), path)
    assert read_cost(path, ENGINE) == measurement() == read_cost(path)
    close_fp64(json.loads(path.read_text())["steps"][1]["residual"], 1 / 1.1 - 1)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (replace(ENGINE, machine="Intel"), "its machine is AMD EPYC and not Intel"),
        (replace(ENGINE, dtype="bfloat16"), "its dtype is float32 and not bfloat16"),
        (replace(ENGINE, pools=((1, 16, 16),)), "its pools is ((2, 16, 16),) and not ((1, 16, 16),)"),
    ],
)
def test_a_file_of_another_engine_is_refused(tmp_path, own, words):
    path = tmp_path / "cost.json"
    write_cost(measurement(), path)
    with pytest.raises(PlanError) as refused:
        read_cost(path, own)
    assert str(refused.value) == f"{path} was measured on another engine: {words}; measure this one"


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: {},
        lambda tree: [1],
        lambda tree: {**tree, "format": 9},
        lambda tree: {**tree, "cost": {**tree["cost"], "row_s": -1.0}},
        lambda tree: {**tree, "cost": {**tree["cost"], "row_s": float("nan")}},
        lambda tree: {**tree, "cost": dict.fromkeys(tree["cost"], 0.0)},
        lambda tree: {**tree, "engine": {**tree["engine"], "owner": "x"}},
        lambda tree: {**tree, "engine": {**tree["engine"], "block_size": 0}},
        lambda tree: {**tree, "engine": {**tree["engine"], "machine": None}},
        lambda tree: {**tree, "seed": float("inf")},
        lambda tree: {**tree, "steps": 3},
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, damage):
    path = tmp_path / "cost.json"
    write_cost(measurement(), path)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(PlanError, match=r"holds no cost model of this version \(.*measure"):
        read_cost(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match="No such file or directory; write it with millrace measure engine"):
        read_cost(tmp_path / "none.json")


def test_drift_is_the_mean_factor_and_alarms_once_outside_its_bounds():
    drift = StepDrift(memory=10)
    assert drift.factor == 1.0
    assert [drift.add(1.0, 1.0) for _ in range(20)] == [""] * 20
    warnings = [drift.add(2.0, 1.0) for _ in range(20)]
    first = next(i for i, warning in enumerate(warnings) if warning)
    # (1 - 0.9^n) log 2 passes log 1.25 with the fourth step.
    assert first == 3 and warnings[3].startswith("steps take 1.27 times as long as the cost model predicts")
    assert drift.alarmed and sum(map(bool, warnings)) == 1
    back = [drift.add(1.0, 1.0) for _ in range(20)]
    assert back == [""] * 20 and not drift.alarmed
    assert any(drift.add(0.5, 1.0) for _ in range(20))


def test_drift_needs_some_steps_and_positive_seconds():
    drift = StepDrift(memory=10)
    assert [drift.add(2.0, 1.0) for _ in range(9)] == [""] * 9 and not drift.alarmed
    assert drift.add(2.0, 1.0)
    with pytest.raises(ValueError, match="give both > 0"):
        drift.add(0.0, 1.0)
    with pytest.raises(ValueError, match="memory is 0"):
        StepDrift(0)
