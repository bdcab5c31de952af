"""Runs on a virtual clock: where durations are constant, every number follows from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from millrace.eventlog.log import check_log
from millrace.planner.durations import StepCost, constant, lognormal
from millrace.rollout.staleness import StalenessPolicy
from millrace.simulation.simulate import Simulated, SimulatedStep, Stretch, Work, best_split, simulate
from millrace.simulation.simulated_engine import Costs
from tests.close import close_fp64

# Ten tokens of 2 + 4 x 0.25 s each for the four answers of a batch, after 5 tokens of each prompt at 0.1 s.
COSTS = Costs(
    service=StepCost(step_s=2.0, row_s=0.25, prompt_token_s=0.1),
    num_tokens=constant(10),
    score_s=constant(0.5),
    load_s=constant(1.5),
    message_s=constant(0.0),
)
WORK = Work(
    rules=StalenessPolicy(2, 0),
    num_engines=1,
    num_samples=2,
    prompt_tokens=5,
    max_tokens=10,
    costs=COSTS,
    train_s=lambda num_tokens, share: 0.5 * num_tokens,
)
SAMPLE_S = 2 * 5 * 0.1 + 10 * (2.0 + 4 * 0.25) + 0.5


def at_once(staleness, train_s):
    """An engine that takes a second for each group, one after the other, whatever the number of requests."""
    costs = Costs(StepCost(0.0, 0.0, 0.0, product_s=1.0), constant(1), constant(0.0), constant(0.0), slots=1)
    costs = replace(costs, message_s=constant(0.0))
    return Work(StalenessPolicy(4, staleness), 1, 1, 1, 1, costs, lambda num_tokens, share: train_s)


def test_a_synchronous_step_is_sampling_then_training_then_publishing():
    run = simulate(WORK, num_batches=4, num_first=1)
    assert [step.num_tokens for step in run.steps] == [40] * 3
    close_fp64([run.wait_s, run.train_s, run.weight_sync_s], [SAMPLE_S, 20.0, 1.5])
    close_fp64(run.step_s, SAMPLE_S + 20.0 + 1.5)
    close_fp64(run.tokens_per_s, 40 / run.step_s)
    # The engine draws, or takes weights; the reward's half second it waits.
    close_fp64(run.engines_busy, (SAMPLE_S - 0.5 + 1.5) / run.step_s)
    close_fp64(run.trainer_busy, 20.0 / run.step_s)
    assert run.staleness == (0, 0)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("train_s", [1.0, 3.5, 6.0])
@pytest.mark.parametrize("staleness", [1, 3])
def test_ahead_of_training_a_step_is_the_longer_of_both(train_s, staleness):
    run = simulate(at_once(staleness, train_s), num_batches=24, num_first=12)
    close_fp64(run.step_s, max(4.0, train_s))
    close_fp64(run.engines_busy, min(1.0, 4.0 / train_s))
    close_fp64(simulate(at_once(0, train_s), num_batches=6, num_first=2).step_s, 4.0 + train_s)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_bound_holds_and_is_reached_where_sampling_is_quick(staleness):
    costs = replace(COSTS, num_tokens=lognormal(8, 0.8))
    work = replace(WORK, rules=StalenessPolicy(2, staleness), num_engines=3, max_tokens=40, costs=costs)
    run = simulate(replace(work, train_s=lambda *_: 500.0), num_batches=20)
    assert run.staleness[1] == staleness
    assert run.trainer_busy > 0.9
    assert simulate(work, num_batches=20).staleness[1] <= staleness


def test_it_is_the_controller_of_every_run():
    """Its log proves what that of a real run must."""
    log = [{"kind": "begin", "rules": {}, "num_batches": 6}]
    rules = StalenessPolicy(3, 2, "completion", "drop")
    log[0]["rules"] = {"groups_per_step": 3, "staleness": 2, "order": "completion", "stale": "drop"} | {
        "dynamic_sampling_rounds": 0
    }
    costs = replace(COSTS, num_tokens=lognormal(8, 1.0))
    work = replace(WORK, rules=rules, num_engines=2, max_tokens=100, costs=costs)
    simulate(
        work, num_batches=6, ends=True, log_event=lambda kind, /, **facts: log.append({"kind": kind, **facts})
    )
    assert check_log(log) == []
    assert sum(event["kind"] == "take" for event in log) == 6


def test_a_run_that_ends_starts_nothing_in_vain():
    begun = []

    def log_event(kind, /, **facts):
        begun.append(kind)

    work = replace(WORK, rules=StalenessPolicy(2, 3))
    simulate(work, num_batches=5, ends=True, log_event=log_event)
    assert begun.count("start") == 5 * 2
    begun.clear()
    simulate(work, num_batches=5, log_event=log_event)
    # The last publish is not in force yet, so a batch of tickets is still held.
    assert begun.count("start") == (5 + 3) * 2


def test_long_answers_in_units_take_as_long():
    """Of 2,560 tokens a unit has ten: the same run as with a tenth of the tokens, each ten times as slow."""
    long = replace(WORK, prompt_tokens=50, max_tokens=2560, costs=replace(COSTS, num_tokens=constant(100)))
    service = StepCost(step_s=20.0, row_s=2.5, prompt_token_s=1.0)
    short = replace(WORK, costs=replace(COSTS, service=service))
    one, other = (simulate(work, num_batches=3) for work in (long, replace(short, max_tokens=256)))
    assert [step.num_tokens for step in one.steps] == [400] * 3
    close_fp64([one.wait_s, one.weight_sync_s], [other.wait_s, other.weight_sync_s])
    close_fp64(one.wait_s, 2 * 50 * 0.1 + 100 * 3.0 + 0.5 + 1.5 / 3)


def test_a_simulation_is_a_function_of_its_seed():
    work = replace(WORK, costs=replace(COSTS, num_tokens=lognormal(5, 0.5)), train_s=lambda n, share: share)
    first, again, other = (simulate(work, num_batches=4, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.steps != other.steps
    assert len({round(step.trained_s - step.taken_s, 9) for step in first.steps}) == 4


@pytest.mark.slow
def test_a_thousand_engines_share_the_groups():
    costs = replace(COSTS, num_tokens=lognormal(300, 0.7))
    work = Work(StalenessPolicy(500, 1), 1000, 8, 100, 1000, costs, lambda num_tokens, share: 100.0)
    run = simulate(work, num_batches=3, num_first=1)
    assert run.staleness[1] == 1
    assert len({stretch.engine for stretch in run.stretches if stretch.num_running}) == 1000


def test_engines_that_never_rest_are_busy_all_the_time():
    """Whatever they do: they draw, compute prompts and what runs again, and take weights."""
    costs = replace(COSTS, num_tokens=lognormal(30, 0.7), recompute=True, slots=3)
    work = Work(StalenessPolicy(6, 4), 2, 4, 5, 100, costs, lambda num_tokens, share: 30.0)
    close_fp64(simulate(work, num_batches=20, num_first=5).engines_busy, 1.0)


def test_busy_time_counts_within_the_steps_alone():
    steps = (SimulatedStep(10.0, 12.0, 18.0, 20.0, 5, (0,)), SimulatedStep(20.0, 21.0, 29.0, 30.0, 5, (2,)))
    stretches = (Stretch("engine-0", 0.0, 14.0, 3), Stretch("engine-1", 28.0, 40.0, 1))
    run = Simulated(2, steps, stretches)
    assert [stretch[1:3] for stretch in run.within()] == [(10.0, 14.0), (28.0, 30.0)]
    close_fp64(run.engines_busy, 6.0 / 40.0)
    assert run.staleness == (1, 2)
    close_fp64([run.step_s, run.wait_s, run.train_s, run.weight_sync_s], [10.0, 1.5, 7.0, 1.5])


def test_some_batch_must_count():
    with pytest.raises(ValueError, match="3 of 3 batches do not count"):
        simulate(WORK, num_batches=3, num_first=3)


@pytest.mark.parametrize("best", range(1, 32))
def test_the_best_split_is_found_without_trying_all(best):
    tried = best_split(range(1, 32), lambda split: abs(split - best) + 3.0)
    assert min(tried, key=tried.get) == best
    assert len(tried) <= 10
    assert best_split([7], partial(max, 2)) == {7: 7}
