"""Engines on a virtual clock: what they cost, which weights draw which token, what their faults do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from millrace.planner.durations import StepCost, constant
from millrace.rollout.backend import (
    DRAINED,
    Abort,
    EngineJoined,
    EngineLost,
    GenerateRequest,
    GenerateResult,
    LoadWeights,
    Retire,
    Scale,
    ScaleRequest,
    Score,
    ScoreResult,
    StopEngine,
    Submit,
    UpdateWeights,
    WeightsLoaded,
)
from millrace.simulation.simulated_backend import EnginesGone, Faults, SimulatedBackend
from millrace.simulation.simulated_engine import Costs
from millrace.types import Prompt, SamplingParams
from tests.close import close_fp64

COSTS = Costs(
    service=StepCost(step_s=1.0, row_s=0.5, prompt_token_s=0.25),
    num_tokens=constant(10),
    score_s=constant(3.0),
    load_s=constant(2.0),
    message_s=constant(0.0),
)


def backend(num_engines=1, costs=COSTS, **faults):
    made = SimulatedBackend(num_engines, costs, Faults(**faults))
    made.execute(UpdateWeights(5))
    for name in made.engines():
        made.execute(LoadWeights(name, 5))
    return made


def requests(*ids, max_tokens=10, prompt=(1, 2, 3, 4)):
    return [
        GenerateRequest(id, prompt, SamplingParams(max_tokens=max_tokens, seed=i)) for i, id in enumerate(ids)
    ]


def waited(made, timeout_s):
    """The events of one wait."""
    made.wait(timeout_s)
    return made.poll()


def until(made, end_s=math.inf, count=None):
    """Events and when they came."""
    found = []
    while made.now() < end_s and (count is None or len(found) < count):
        events = waited(made, min(end_s - made.now(), 1000.0))
        if not events and end_s == math.inf:
            break
        found += [(made.now(), event) for event in events]
    return found


def test_requests_share_their_engine():
    """Loaded at 2; the prompt takes 4 x 0.25; 10 steps of 1 + 0.5 for one, of 1 + 2 x 0.5 for two."""
    made = backend()
    assert until(made, count=1) == [(2.0, WeightsLoaded("engine-0", 5, 0))]
    made.execute(Submit("engine-0", requests("x")))
    ((at_s, event),) = until(made, count=1)
    close_fp64(at_s, 2.0 + 1.0 + 15.0)
    assert (event.engine, event.id, event.began, event.ended) == ("engine-0", "x", 0, 10)
    made.execute(Submit("engine-0", requests("y", "z")))
    found = until(made, count=2)
    close_fp64([at_s for at_s, _ in found], [18.0 + 1.0 + 20.0] * 2)
    assert [event.id for _, event in found] == ["y", "z"]


def test_who_joins_later_slows_the_others_down():
    made = backend(
        costs=Costs(StepCost(1.0, 0.5, 0.0), constant(10), message_s=constant(0.0), load_s=constant(0.0))
    )
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x")))
    until(made, end_s=6.0)
    made.execute(Submit("engine-0", requests("y")))
    found = until(made, count=2)
    # 4 steps alone, 6 together, then y alone: 4 x 1.5 + 6 x 2 and 4 x 1.5 more.
    close_fp64([at_s for at_s, _ in found], [18.0, 24.0])


def test_each_token_is_of_the_weights_its_step_began_with():
    """Weights ordered after 4.2 steps arrive 2 s later, in which no step is done."""
    made = backend(
        costs=Costs(StepCost(1.0, 0.0, 0.0), constant(10), message_s=constant(0.0), load_s=constant(2.0))
    )
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x")))
    until(made, end_s=2.0 + 4.2)
    made.execute(UpdateWeights(6))
    made.execute(LoadWeights("engine-0", 6))
    found = until(made, count=2)
    close_fp64([at_s for at_s, _ in found], [8.2, 14.0])
    loaded, partial_output = (event for _, event in found)
    assert loaded == WeightsLoaded("engine-0", 6, 5)
    assert partial_output.completion.versions.tolist() == [5] * 5 + [6] * 5


def test_an_aborted_draw_has_what_was_drawn():
    made = backend()
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x", "y")))
    until(made, end_s=2.0 + 1.0 + 7.0)
    made.execute(Abort("engine-0", ["x", "never"]))
    made.execute(Abort("gone", ["y"]))
    found = until(made, count=2)
    # 3.5 steps of 2 s together; then y alone, 6.5 of 1.5 s.
    assert [event.completion.finish_reason for _, event in found] == ["abort", "length"]
    assert [len(event.completion.token_ids) for _, event in found] == [3, 10]
    close_fp64([at_s for at_s, _ in found], [10.0, 10.0 + 6.5 * 1.5])


def test_what_is_drawn_is_a_function_of_the_seed():
    costs = Costs(num_tokens=lambda share: 1 + 50 * share, num_answers=3)
    partial_output = []
    for seed in (0, 1):
        made = SimulatedBackend(2, costs, seed=seed)
        made.execute(UpdateWeights(0))
        for name in made.engines():
            made.execute(LoadWeights(name, 0))
        until(made, count=2)
        made.execute(Submit("engine-1" if seed else "engine-0", requests("x", "y", "z", max_tokens=100)))
        found = {event.id: event.completion for _, event in until(made, count=3)}
        partial_output.append([(found[id].token_ids, found[id].text) for id in "xyz"])
    assert partial_output[0] == partial_output[1]
    assert len({tokens for tokens, _ in partial_output[0]}) == 3


def test_an_answer_is_cut_where_it_is_too_long():
    made = backend()
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x", max_tokens=4) + requests("y", max_tokens=11)))
    partial_output = [event.completion for _, event in until(made, count=2)]
    assert [(len(d.token_ids), d.finish_reason) for d in partial_output] == [(4, "length"), (10, "stop")]
    made.execute(Submit("engine-0", [GenerateRequest("z", (1,), SamplingParams(max_tokens=1, seed=0x51234))]))
    ((_, event),) = until(made, count=1)
    assert event.completion.token_ids == (0x1234,)
    assert event.completion.logprobs.tolist() == [-1.0]


def test_an_abort_counts_from_where_the_draw_began():
    made = backend()
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x")))
    until(made, count=1)
    made.execute(Submit("engine-0", requests("y")))
    until(made, end_s=made.now() + 1.0 + 2.0 * 1.5)
    made.execute(Submit("engine-0", requests("z")))
    made.execute(Abort("engine-0", ["y", "z"]))
    partial_output = {event.id: (event.began, event.ended) for _, event in until(made, count=2)}
    assert partial_output == {"y": (10, 12), "z": (12, 12)}


def test_messages_are_under_way_for_a_while_and_come_together():
    costs = replace(COSTS, message_s=constant(0.5))
    made = SimulatedBackend(2, costs)
    made.execute(UpdateWeights(5))
    for name in made.engines():
        made.execute(LoadWeights(name, 5))
    assert waited(made, 100.0) == [WeightsLoaded("engine-0", 5, 0), WeightsLoaded("engine-1", 5, 0)]
    assert made.now() == 2.5


def test_answers_are_judged_in_their_own_time():
    made = backend()
    until(made, count=1)
    made.execute(Score("call", [Prompt("p", (1,), "")] * 2, ["2", "3"]))
    ((at_s, event),) = until(made, count=1)
    assert (at_s, event.id, [outcome.value for outcome in event.outcomes]) == (5.0, "call", [0.0, 1.0])


def test_nobody_draws_without_weights():
    made = SimulatedBackend(1, COSTS)
    made.execute(Submit("engine-0", requests("x")))
    with pytest.raises(RuntimeError, match="engine-0 got a request before it had weights"):
        until(made)


def test_time_passes_where_nothing_happens():
    made = SimulatedBackend(1, COSTS)
    assert waited(made, 7.5) == []
    assert made.now() == 7.5
    made.close()
    made.close()
    assert made.engines() == []


def test_an_engine_that_crashes_takes_its_draws_along_and_another_joins():
    made = backend(crash_every_s=8.0, restart_s=constant(4.0), restarts=1)
    made.execute(Submit("engine-0", requests("x", max_tokens=1_000_000)))
    first, lost, joined = until(made, count=3)
    assert first[1] == WeightsLoaded("engine-0", 5, 0) or first[1] == lost
    assert lost[1] == EngineLost("engine-0", "it died")
    assert joined == (lost[0] + 4.0, EngineJoined("engine-1"))
    made.execute(Submit("engine-0", requests("y")))
    with pytest.raises(EnginesGone, match="the last was engine-1: it died"):
        until(made)


def test_an_engine_that_hangs_says_nothing_until_it_is_given_up():
    made = backend(hang_every_s=1e-6)
    made.execute(Submit("engine-0", requests("x")))
    assert until(made, end_s=100.0) == []
    made.execute(Abort("engine-0", ["x"]))
    made.execute(UpdateWeights(6))
    made.execute(LoadWeights("engine-0", 6))
    assert until(made, end_s=200.0) == []
    made.execute(StopEngine("engine-0", "it hangs"))
    made.execute(StopEngine("engine-0", "it hangs"))
    found = [event for _, event in until(made, count=2)]
    assert found == [EngineLost("engine-0", "it hangs"), EngineJoined("engine-1")]


def test_a_runtime_may_notice_that_an_engine_hangs():
    made = backend(hang_every_s=1e-6, notice_s=9.0)
    at_s, event = until(made, count=1)[0]
    assert event == EngineLost("engine-0", "it hangs")
    assert round(at_s, 3) == 9.0


@pytest.mark.parametrize("fault", ["load_breaks", "load_hangs"])
def test_loads_that_fail(fault):
    made = backend(**{fault: 1.0}, restarts=0)
    found = [event for _, event in until(made, end_s=50.0)] if fault == "load_hangs" else waited(made, 50.0)
    assert found == ([] if fault == "load_hangs" else [EngineLost("engine-0", "it does not hold version 5")])


def test_messages_come_late_and_twice():
    made = backend(late=1.0, late_s=constant(30.0), twice=1.0)
    assert until(made) == [(32.0, WeightsLoaded("engine-0", 5, 0)), (62.0, WeightsLoaded("engine-0", 5, 0))]


def test_slow_engines_are_ten_times_slower():
    made = backend(slow=1.0)
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x")))
    ((at_s, event),) = until(made, count=1)
    assert isinstance(event, GenerateResult)
    close_fp64(at_s, 2.0 + 10 * 16.0)


def test_rewards_fail():
    made = backend(reward=1.0)
    until(made, count=1)
    made.execute(Score("call", [Prompt("p", (1,), "")], ["2"]))
    ((_, event),) = until(made, count=1)
    assert isinstance(event, ScoreResult)
    assert [(outcome.kind, outcome.reason) for outcome in event.outcomes] == [("failed", "the reward died")]


def test_who_finds_no_room_waits_in_order():
    """One at a time, 10 s each; the prompt takes 4 x 0.25 s when they come; y ends before it begins."""
    costs = replace(COSTS, service=StepCost(1.0, 0.0, 0.25), slots=1)
    made = backend(costs=costs)
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x", "y", "z")))
    made.execute(Abort("engine-0", ["y"]))
    found = until(made, count=3)
    assert [event.id for _, event in found] == ["y", "x", "z"]
    close_fp64([at_s for at_s, _ in found], [2.0, 13.0, 23.0])
    assert [len(event.completion.token_ids) for _, event in found] == [0, 10, 10]
    assert [(event.began, event.ended) for _, event in found] == [(0, 0), (0, 10), (10, 20)]


def test_an_aborted_request_makes_room():
    made = backend(costs=replace(COSTS, service=StepCost(1.0, 0.0, 0.0), slots=1))
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x", "y")))
    until(made, end_s=6.0)
    made.execute(Abort("engine-0", ["x"]))
    found = until(made, count=2)
    close_fp64([at_s for at_s, _ in found], [6.0, 16.0])
    assert [len(event.completion.token_ids) for _, event in found] == [4, 10]


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_have_what_runs_computed_again(recompute):
    """Loaded at 2, two requests with 4 tokens of a prompt; at 8.0 new weights, which take until 10.0."""
    costs = replace(COSTS, service=StepCost(1.0, 0.0, 0.25), recompute=recompute)
    made = backend(costs=costs)
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x", "y")))
    until(made, end_s=8.0)
    made.execute(UpdateWeights(6))
    made.execute(LoadWeights("engine-0", 6))
    found = until(made, count=3)
    # Five tokens of each were drawn from 3.0 on; the prompt they share counts once.
    again_s = (4 + 2 * 5) * 0.25 if recompute else 0.0
    close_fp64([at_s for at_s, _ in found], [10.0, 15.0 + again_s, 15.0 + again_s])


def test_a_watcher_hears_of_every_stretch_of_work():
    told = []
    made = SimulatedBackend(1, COSTS, watch=lambda *stretch: told.append(stretch))
    made.execute(UpdateWeights(5))
    made.execute(LoadWeights("engine-0", 5))
    until(made, count=1)
    made.execute(Submit("engine-0", requests("x", "y")))
    until(made, end_s=8.0)
    made.execute(Submit("engine-0", requests("z", max_tokens=1)))
    until(made, count=3)
    assert [stretch[3] for stretch in told] == [0, 2, 2, 3, 3, 2]
    # Weights; the prompt; 5 s of steps; a prompt again; a step of three, 2.5 s; the rest of two.
    spans = [(0, 2), (2, 3), (3, 8), (8, 9), (9, 11.5), (11.5, 11.5 + 2.0 * (10 - 2.5 - 1))]
    close_fp64([stretch[1:3] for stretch in told], spans)


def test_engines_come_and_go_as_they_are_wanted():
    made = SimulatedBackend(1, faults=Faults(restart_s=constant(4.0)))
    made.execute(Scale(3))
    made.execute(Scale(2))
    assert made.engines() == ["engine-0"]
    joined = [event for _ in range(4) for event in waited(made, 5.0)]
    # The third one was on its way and did not come.
    assert joined == [EngineJoined("engine-1")]
    made.execute(Retire("engine-1"))
    made.execute(Scale(1))
    assert waited(made, 1.0) == [EngineLost("engine-1", DRAINED)]
    # It was wanted still when it was retired, and not any more when the next one would have come.
    assert waited(made, 10.0) == []
    made.execute(StopEngine("engine-0", "it died"))
    assert waited(made, 1.0) == [EngineLost("engine-0", "it died")]
    assert waited(made, 10.0) == [EngineJoined("engine-2")]


def test_of_engines_that_cannot_be_had_one_hears():
    made = SimulatedBackend(2, faults=Faults(refused=1.0))
    made.execute(Scale(4))
    assert waited(made, 1.0) == [ScaleRequest(2, "there is no room")]
    assert made.engines() == ["engine-0", "engine-1"]


def test_somebody_asks_now_and_then():
    made = SimulatedBackend(1, faults=Faults(scale_every_s=10.0, scale_most=3), seed=2)
    asked = [
        event.number for _ in range(300) for event in waited(made, 10.0) if isinstance(event, ScaleRequest)
    ]
    assert set(asked) == {1, 2, 3}
    assert 50 < len(asked) < 300
