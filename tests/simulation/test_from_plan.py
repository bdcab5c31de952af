"""From a recipe to its runs on machines: planned ones, and those of a measured run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.config.settings import RunConfig, num_answers
from millrace.errors import PlanError
from millrace.planner.fit import choose
from millrace.planner.hardware import GPUS
from millrace.planner.memory import Workload, cache_bytes_per_token
from millrace.planner.model_shape import ModelShape
from millrace.planner.step_time import step_time
from millrace.rollout.staleness import StalenessPolicy
from millrace.simulation.calibrate import read_measured
from millrace.simulation.from_plan import (
    check_simulated,
    given_lengths,
    mean_tokens,
    measured_machines,
    planned_machines,
    rules,
)
from tests.close import close_fp64
from tests.planner.shapes import LLAMA_8B
from tests.rollout.written import write_run

SHAPE = ModelShape.of(LLAMA_8B)
WORK = Workload(512, 1024, 64, 8, 4096, 2, 2, 2, checkpointing="full", max_requests=32)


def recipe(**changes):
    tree = {
        "steps": 3,
        "data": {"train": "none.jsonl", "max_prompt_tokens": 512},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 8, "max_tokens": 1024},
        "rewards": [{"kind": "exact"}],
    }
    return RunConfig.model_validate(tree | changes)


def planned(gpus, config=None, lengths=None, refuse=lambda layout: None):
    config = config or recipe()
    options = {"num_samples": num_answers(config), "shape": SHAPE, "work": WORK, "refuse": refuse}
    return planned_machines(config.rollout, gpus, lengths, mfu=0.4, **options)


def test_a_recipes_flow_at_another_bound_keeps_what_has_a_meaning_there():
    size = {"prompts_per_step": 8}
    ahead = {"max_staleness": 3, "batch_order": "completion", "stale_policy": "drop"}
    config = recipe(rollout=size | ahead)
    assert rules(config.rollout, 3) == StalenessPolicy(8, 3, "completion", "drop")
    assert rules(config.rollout, 0) == StalenessPolicy(8, 0)
    config = recipe(rollout=size | {"batch_order": "completion", "oversample_groups": 2})
    assert rules(config.rollout, 0) == StalenessPolicy(8, 0, "completion", oversample_groups=2)
    assert rules(config.rollout, 1) == StalenessPolicy(8, 1, "completion")


def test_greedy_baselines_are_answers_too():
    assert num_answers(recipe()) == 8
    assert num_answers(recipe(advantage={"kind": "greedy_baseline"})) == 9


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"rollout": {"max_staleness": 1, "partial_rollout": False}},
            "rollout.partial_rollout false cannot be simulated",
        ),
        (
            {"rollout": {"dynamic_sampling_rounds": 2}},
            "rollout.dynamic_sampling_rounds 2 cannot be simulated",
        ),
    ],
)
def test_what_is_not_simulated_is_refused(section, said):
    check_simulated(recipe().rollout)
    with pytest.raises(PlanError, match=said):
        check_simulated(recipe(**section).rollout)


def test_lengths_are_cut_at_the_longest():
    half = given_lengths("1024,0.7", max_tokens=1024)
    close_fp64(half(0.5), 1024.0)
    # Half of them are 1024; below its median m lies m exp(s^2 / 2) (1 - F(s)) of a lognormal's mean.
    close_fp64(mean_tokens(half, max_tokens=1024), 512 + 1024 * 1.27762131 * 0.24196365, rtol=1e-3)
    close_fp64(given_lengths(None, max_tokens=1024)(0.5), 256.0)
    for wrong in ("300", "a,b", "300,-1", "1,2,3"):
        with pytest.raises(PlanError, match="write the median and the deviation"):
            given_lengths(wrong, max_tokens=1024)


def test_planned_durations_are_those_of_a_plan():
    machines = planned("8xH200", lengths="200,0")
    run = machines.work(2, 3, 5)
    gpu = GPUS["H200"]
    turns = replace(WORK, colocated=True)
    fit = choose(SHAPE, turns, 5, gpu.memory_bytes, refuse=lambda layout: None)
    times = step_time(SHAPE, fit.layout, replace(turns, completion_tokens=200), fit.memory, gpu, mfu=0.4)
    close_fp64(run.train_s(64 * 200, 0.5), times.training)
    close_fp64(run.train_s(32 * 200, 0.5), times.training / 2)
    assert (run.num_engines, run.num_samples, run.prompt_tokens, run.max_tokens) == (3, 8, 512, 1024)
    assert run.rules == StalenessPolicy(8, 2)
    kept = recipe(rollout={"kv_on_update": "keep", "max_staleness": 2})
    assert run.costs.recompute and not planned("8xH200", kept).work(2, 3, 5).costs.recompute
    assert machines.num_gpus == 8
    assert machines.source.startswith("8 x H200, as millrace plan counts at 40% of the peak; 200 tokens an")


def test_an_engine_draws_what_its_cache_has_room_for():
    each = cache_bytes_per_token(SHAPE, 2)
    for wanted, room in ((32, 32), (1000, None)):
        machines = planned_machines(
            recipe().rollout,
            "8xH100",
            "200,0",
            num_samples=8,
            shape=SHAPE,
            work=replace(WORK, max_requests=wanted),
            refuse=lambda layout: None,
            mfu=0.4,
        )
        memory = choose(
            SHAPE,
            replace(WORK, max_requests=wanted, colocated=True),
            4,
            GPUS["H100"].memory_bytes,
            refuse=lambda layout: None,
        ).memory
        assert machines.work(0, 4, 4).costs.slots == (room or memory.cache // each // 712)


def test_a_split_that_leaves_too_little_to_train_on_is_none():
    machines = planned("8xL40S")
    assert machines.work(0, 7, 1) is None
    assert machines.work(0, 4, 4) is not None


def test_a_layout_that_is_refused_is_none():
    machines = planned("8xH200", refuse=lambda layout: "no" if layout.num_ranks == 1 else None)
    assert machines.work(0, 7, 1) is None
    assert machines.work(0, 6, 2) is not None


def test_measured_durations_are_shared_by_more_machines(tmp_path, monkeypatch):
    write_run(tmp_path / "run", monkeypatch)
    found = read_measured(tmp_path / "run")
    machines = measured_machines(found.rollout, found, "16", None, num_samples=found.num_samples)
    one, many = machines.work(0, 8, 1), machines.work(4, 8, 8)
    close_fp64(one.train_s(100, 0.5) - many.train_s(100, 0.5), 0.1 * 100 * 7 / 8)
    assert many.costs == found.costs and many.rules == StalenessPolicy(4, 4)
    longer = measured_machines(found.rollout, found, "16", "40,0", num_samples=2).work(0, 8, 8)
    close_fp64(longer.costs.num_tokens(0.1), 40.0)
    for wrong in ("16xH100", "0", "-3"):
        with pytest.raises(PlanError, match="with --from the machines are those of the run"):
            measured_machines(found.rollout, found, wrong, None, num_samples=2)
