"""Groups from prompt to batch: who draws, what is drawn again, what is judged, what a checkpoint keeps."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from millrace.data.prompts import PromptStream
from millrace.environments.running_episodes import EnvironmentReply
from millrace.eventlog.log import check_log
from millrace.planner.durations import lognormal
from millrace.rollout.backend import CommandsStarted, EngineJoined, EngineLost, ScoreResult
from millrace.rollout.engine_pool import GenerationFailed
from millrace.rollout.manager import Stalled
from millrace.rollout.recorder import RecordingBackend
from millrace.simulation.simulated_backend import SimulatedBackend
from millrace.simulation.simulated_engine import Costs
from millrace.types import EpisodeTurn, Outcome
from tests.environments.rollout import rollout
from tests.rollout.manual import (
    PROMPTS,
    RULES,
    Manual,
    Notes,
    completion,
    rollouts_over,
    seeded,
    serving,
    worth,
)


class ThreeTurns:
    """Answers each completion with the turn and its first token."""

    def __init__(self, prompt):
        self.prompt, self.turn = prompt, 0

    def observe(self):
        return self.prompt.token_ids

    def step(self, generated):
        self.turn += 1
        return None if self.turn == 3 else (self.turn, generated.token_ids[0])


def three_turns(step):
    """The same as the environment of a backend."""
    turn = len(step.actions)
    if turn == 0:
        return EnvironmentReply(step.id, step.prompt.token_ids)
    return EnvironmentReply(step.id, (turn, step.actions[-1].token_ids[0]), done=turn == 3)


def draw_all(rollouts, backend, **given):
    """Let every draw that was submitted end, and everything be judged, until nothing happens."""
    while generated := [id for command in backend.taken("submit") for id in command[2]]:
        rollouts.handle([backend.generated(id, **given) for id in generated])
    rollouts.handle([backend.scored(command[1]) for command in backend.taken("score")])


def test_siblings_go_together_to_the_engine_with_least_to_do():
    backend = Manual("a", "b", "c")
    rollouts, _, _ = rollouts_over(backend, groups_per_step=4)
    assert backend.commands == [("load", "a", 0), ("load", "b", 0), ("load", "c", 0)]
    rollouts.handle(serving("b", "a"))
    commands = [(name, len(ids)) for _, name, ids in backend.taken("submit")]
    assert commands == [("a", 2), ("b", 2), ("a", 2), ("b", 2)]
    # Engine a has four draws, c none.
    rollouts.handle([*serving("c"), EngineLost("b", "it died")])
    commands = [(name, len(ids)) for _, name, ids in backend.taken("submit")]
    assert commands == [("c", 2), ("c", 2)]


@pytest.mark.parametrize("num_baselines", [0, 1])
def test_a_batch_is_what_the_synchronous_loop_samples(num_baselines):
    """Same prompts, contexts, seeds and tokens as a loop over whole batches of turns."""

    class Engine:
        def generate(self, prompts, params):
            seen.extend(zip(prompts, [p.seed for p in params], strict=True))
            return [completion(replace_draw(p)) for p in params]

    def replace_draw(params):
        return type("D", (), {"params": params})()

    seen = []
    expected = rollout(
        [PROMPTS["p0"], PROMPTS["p1"]], ThreeTurns, Engine(), seeded, num_samples=2 + num_baselines
    )
    backend = Manual("a", environment=three_turns)
    rollouts, _, _ = rollouts_over(backend, num_baselines=num_baselines)
    rollouts.handle(serving("a"))
    draw_all(rollouts, backend)
    rolled = rollouts.take()
    asked = [(request.prompt, request.params.seed) for _, request in backend.requests.values()]
    assert sorted(asked) == sorted(seen)
    assert [group.prompt.id for group in rolled.groups] == ["p0", "p1"]
    for ours, baselines, theirs in zip(rolled.groups, rolled.baselines, expected, strict=True):
        assert len(ours.trajectories) == 2
        assert len(baselines) == num_baselines
        for mine, other in zip((*ours.trajectories, *baselines), theirs.trajectories, strict=True):
            assert [t.observation for t in mine.turns] == [t.observation for t in other.turns]
            assert [t.completion.token_ids for t in mine.turns] == [
                t.completion.token_ids for t in other.turns
            ]
            assert mine.outcome == Outcome("score", worth(mine.text))


def test_a_turn_goes_where_the_one_before_was_drawn():
    backend = Manual("a", "b", environment=three_turns)
    rollouts, _, _ = rollouts_over(backend)
    rollouts.handle(serving("a", "b"))
    first = {id: engine for _, engine, ids in backend.taken("submit") for id in ids}
    assert set(first.values()) == {"a", "b"}
    rollouts.handle([backend.generated(id) for id in first])
    second = {id: engine for _, engine, ids in backend.taken("submit") for id in ids}
    assert {id.rsplit(".", 1)[0]: engine for id, engine in second.items()} == {
        id.rsplit(".", 1)[0]: engine for id, engine in first.items()
    }


def test_what_is_said_twice_is_judged_once():
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend, num_samples=3)
    rollouts.handle(serving("a"))
    ids = [id for command in backend.taken("submit") for id in command[2]]
    texts = ["yes", "no", "yes", "yes", "yes", "yes"]
    rollouts.handle([backend.generated(id, text=text) for id, text in zip(ids, texts, strict=True)])
    ((_, call, scored),) = backend.taken("score")
    assert scored == ["yes", "no", "yes"]
    assert [prompt for prompt, _ in backend.calls[call]] == ["p0", "p0", "p1"]
    rollouts.handle([backend.scored(call)])
    groups = rollouts.take().groups
    assert [[t.outcome.value for t in g.trajectories] for g in groups] == [
        [worth("yes"), worth("no"), worth("yes")],
        [worth("yes")] * 3,
    ]


def test_a_reward_that_sees_episodes_gets_every_one():
    """Equal answers are the ends of different episodes."""
    backend = Manual("a", environment=three_turns)

    def view(prompt, sample):
        return sample.view(prompt, lambda token_ids: " ".join(map(str, token_ids)))

    rollouts, _, _ = rollouts_over(backend, view_episode=view, episode_rules=replace(RULES, scored=True))
    rollouts.handle(serving("a"))
    for _ in range(3):
        ids = [id for command in backend.taken("submit") for id in command[2]]
        rollouts.handle([backend.generated(id, text="yes") for id in ids])
    ((_, call, scored),) = backend.taken("score")
    assert scored == ["yes"] * 4 and len(backend.episodes) == 4
    first, second = backend.episodes[:2]
    assert (first.end, first.score, len(first.turns)) == ("done", 0.0, 3)
    assert first.turns[1] == EpisodeTurn("1 0", "yes", 2, 2, "stop", 0.0)
    assert second.turns[1].observation == "1 10"
    values = (0.5, 0.25, 1.0, 0.0)
    rollouts.handle([ScoreResult(call, tuple(Outcome("score", value) for value in values))])
    groups = rollouts.take().groups
    assert [t.outcome.value for g in groups for t in g.trajectories] == list(values)


def test_groups_whose_rewards_are_equal_are_replaced():
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend, rules={"dynamic_sampling_rounds": 1})
    rollouts.handle(serving("a"))
    draw_all(rollouts, backend, text="same")
    assert [event["zero_std"] for event in notes.of("finish")] == [True, True]
    assert rollouts.take() is None
    draw_all(rollouts, backend)
    assert rollouts.take().taken.left_out == {0, 1}


def test_the_stream_learns_what_each_group_of_a_batch_earned_in_the_order_of_groups(monkeypatch):
    backend, told = Manual("a"), []
    rollouts, _, _ = rollouts_over(backend, num_baselines=1)
    monkeypatch.setattr(PromptStream, "learn", lambda _, *facts: told.append(facts))
    rollouts.handle(serving("a"))
    first, second = [command[2] for command in backend.taken("submit")]
    rollouts.handle([backend.generated(id) for id in (*second, *first)])
    events = [backend.scored(command[1]) for command in backend.taken("score")]
    outcomes = (Outcome.failure("it hung"), *events[0].outcomes[1:])
    rollouts.handle([replace(events[0], outcomes=outcomes), *events[1:]])
    assert told == []
    rollouts.take()
    # The greedy sample is no part of it, nor is a failed reward.
    assert [prompt.id for prompt, _ in told] == ["p0", "p1"]
    assert sorted(len(rewards) for _, rewards in told) == [1, 2]


def test_failed_rewards_are_no_difference_between_rewards():
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a"))
    rollouts.handle([backend.generated(id) for command in backend.taken("submit") for id in command[2]])
    ((_, call, _),) = backend.taken("score")
    event = backend.scored(call)
    rollouts.handle([replace(event, outcomes=(Outcome.failure("it hung"), event.outcomes[1]))])
    assert [event["zero_std"] for event in notes.of("finish")] == [True]


def test_others_draw_again_what_a_lost_engine_had():
    """The turn it was at, in the same context, with the same seed; what was drawn before stays."""
    backend = Manual("a", "b", environment=three_turns)
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a"))
    first, other = [id for command in backend.taken("submit") for id in command[2]]
    rollouts.handle([backend.generated(first), *serving("b")])
    ((_, _, (second,)),) = backend.taken("submit")
    had = [backend.requests[id][1] for id in (other, second)]
    rollouts.handle([EngineLost("a", "it died"), EngineLost("a", "it died")])
    again = backend.taken("submit")
    assert [engine for _, engine, _ in again] == ["b", "b"]
    generated = [backend.requests[id][1] for _, _, ids in again for id in ids]
    assert [(d.prompt, d.params) for d in generated] == [(d.prompt, d.params) for d in had]
    assert not {d.id for d in generated} & {first, other, second}
    assert [event["reason"] for event in notes.of("engine_lost")] == ["it died"]
    # What was under way when it died comes too late.
    rollouts.handle([backend.generated(other)])
    assert len(notes.of("ignored")) == 1
    backend.commands = again
    draw_all(rollouts, backend)
    assert [len(t.turns) for t in rollouts.take().groups[0].trajectories] == [3, 3]
    assert check_log(notes) == []


def test_answers_that_come_twice_count_once():
    backend = Manual("a")
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a"))
    ids = [id for command in backend.taken("submit") for id in command[2]]
    rollouts.handle([backend.generated(ids[0]), backend.generated(ids[0])])
    assert backend.taken("score") == []
    rollouts.handle([backend.generated(ids[1]), backend.generated(ids[1])])
    ((_, call, _),) = backend.taken("score")
    rollouts.handle([backend.scored(call), backend.scored(call)])
    assert len(rollouts.take().groups) == 1
    assert len(notes.of("ignored")) == 3
    assert len(notes.of("completed")) == 2


def test_an_abort_that_nobody_asked_for_is_drawn_again():
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a"))
    ((_, _, ids),) = backend.taken("submit")
    rollouts.handle([backend.generated(ids[0], reason="abort")])
    ((_, _, (again,)),) = backend.taken("submit")
    assert backend.requests[again][1].params == backend.requests[ids[0]][1].params
    assert again != ids[0]


def test_a_draw_that_fails_ends_the_run():
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend, groups_per_step=1)
    rollouts.handle(serving("a"))
    ((_, _, ids),) = backend.taken("submit")
    with pytest.raises(
        GenerationFailed, match=r"a failed to generate sample 1 of group 0: the logits are not finite"
    ):
        rollouts.handle([backend.generated(ids[1], reason="error")])


def test_spare_groups_are_ended_and_their_prompts_start_again():
    backend = Manual("a")
    rules = {"order": "completion", "oversample_groups": 1}
    rollouts, controller, notes = rollouts_over(backend, groups_per_step=1, rules=rules)
    rollouts.handle(serving("a"))
    slow, fast = [command[2] for command in backend.taken("submit")]
    rollouts.handle([backend.generated(slow[0])] + [backend.generated(id) for id in fast])
    rollouts.handle([backend.scored(command[1]) for command in backend.taken("score")])
    rolled = rollouts.take()
    assert rolled.taken.numbers == (1,)
    # One of its two samples was drawn, and nobody has judged it.
    assert [(g.prompt.id, [t.outcome for t in g.trajectories]) for g in rolled.dropped] == [("p0", [None])]
    assert backend.taken("abort") == [("abort", "a", [slow[1]])]
    # What the engine says of it is no surprise.
    rollouts.handle([backend.generated(slow[1], reason="abort")])
    assert notes.of("ignored") == []
    rollouts.update_weights(1)
    rollouts.handle(serving("a", version=1))
    assert [event["prompt"] for event in notes.of("start")] == ["p0", "p1", "p0", "p2"]
    assert controller.num_free == 0


def test_a_group_may_be_ended_while_its_reward_works():
    backend = Manual("a")
    rules = {"order": "completion", "oversample_groups": 1}
    rollouts, _, _ = rollouts_over(backend, groups_per_step=1, rules=rules)
    rollouts.handle(serving("a"))
    first, second = [command[2] for command in backend.taken("submit")]
    rollouts.handle([backend.generated(id) for id in first])
    rollouts.handle([backend.generated(id) for id in second])
    one, two = [command[1] for command in backend.taken("score")]
    rollouts.handle([backend.scored(two)])
    assert rollouts.take().taken.numbers == (1,)
    rollouts.handle([backend.scored(one)])
    assert backend.taken("abort") == []
    assert rollouts.take() is None


@pytest.mark.world
def test_a_stall_says_who_waits_for_whom():
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend, groups_per_step=1)
    with pytest.raises(Stalled, match=r"trainer waits for batch 0 since 7 s, at most 7 s: an engine that"):
        rollouts.next_batch(7.0)
    rollouts.handle(serving("a"))
    with pytest.raises(
        Stalled, match=r"most 5 s: group 0 \(sample 0 on a since 5 s, sample 1 on a since 5 s\)$"
    ):
        rollouts.next_batch(5.0)
    rollouts.handle([backend.generated(id) for command in backend.taken("submit") for id in command[2]])
    with pytest.raises(Stalled, match=r"group 0 \(its reward\)$"):
        rollouts.next_batch(5.0)
    rollouts.handle([backend.scored(command[1]) for command in backend.taken("score")])
    rollouts.take()
    rollouts.update_weights(1)
    with pytest.raises(Stalled, match=r"waits for weight update 1 .*: a \(loads version 1 since 5 s\)$"):
        rollouts.wait_for_weights(5.0)
    rollouts.handle(serving("a", version=1))
    rollouts.handle([EngineLost("a", "it died")])
    with pytest.raises(Stalled, match=r"an engine that serves; group 1 \(an engine\)$"):
        rollouts.next_batch(5.0)


def test_who_lets_things_happen_is_told_how_long():
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend)
    seen = []

    def let_happen(left_s):
        seen.append(left_s)
        backend.now_s += 4.0

    with pytest.raises(Stalled, match="since 12 s, at most 10 s"):
        rollouts.next_batch(10.0, let_happen)
    assert seen == [10.0, 6.0, 2.0]


def test_a_sample_that_waits_for_its_environment_is_named():
    backend = Manual("a", environment=three_turns)
    rollouts, _, _ = rollouts_over(backend, groups_per_step=1, begin=None)
    backend.now_s = 5.0
    rollouts.begin(0)
    rollouts._backend.now_s = 47.0
    (group,) = [text for text in rollouts.blockers() if text.startswith("group 0")]
    assert "sample 1 waits for its environment since 42 s" in group


def test_a_trajectory_is_as_old_as_its_oldest_turn():
    backend = Manual("a", environment=three_turns)
    rollouts, _, notes = rollouts_over(backend, groups_per_step=1, staleness=1)
    rollouts.handle(serving("a"))
    first, second = [command[2] for command in backend.taken("submit")]
    rollouts.handle([backend.generated(id) for id in second])
    later = backend.taken("submit")
    backend.commands = [("submit", "a", first)]
    draw_all(rollouts, backend)
    rollouts.take()
    rollouts.update_weights(1)
    rollouts.handle(serving("a", version=1))
    backend.commands = later
    draw_all(rollouts, backend, version=1)
    assert notes.of("finish")[-1]["oldest_steps"] == [0, 0]
    assert rollouts.take().taken.staleness == (1,)


def test_a_new_engine_takes_up_what_waits():
    backend = Manual("a")
    rollouts, _, _ = rollouts_over(backend, groups_per_step=1)
    rollouts.handle([EngineLost("a", "it died"), EngineJoined("b")])
    assert backend.taken("submit") == []
    rollouts.handle(serving("b"))
    assert [command[1] for command in backend.taken("submit")] == ["b"]


def finish_run(rollouts, controller, backend, version):
    """Train to the end; the batches' tokens."""
    seen = []
    while controller.num_taken < 4:
        rolled = rollouts.next_batch(1e6)
        seen += [[t.turns[-1].completion.token_ids for t in g.trajectories] for g in rolled.groups]
        version += 1
        rollouts.update_weights(version)
    rollouts.wait_for_weights(1e6)
    return seen


def test_a_run_goes_on_from_what_was_saved():
    """Finished groups come back bit for bit; the others start again under their number and seeds."""
    costs = Costs(num_tokens=lognormal(20, 1.0))
    given = {"num_batches": 4, "staleness": 1}
    backend = SimulatedBackend(2, costs)
    rollouts, controller, notes = rollouts_over(backend, **given)
    rollouts.next_batch(1e6)
    rollouts.update_weights(1)
    while not rollouts.state()[0]["groups"]["completions"]:
        rollouts.advance(1e6)
    words, columns = rollouts.state()
    kept = list(notes)
    expected = finish_run(rollouts, controller, backend, 1)

    again, controller, notes = rollouts_over(
        SimulatedBackend(3, costs), begin=None, notes=type(notes)(kept), **given
    )
    again.load_state(json.loads(json.dumps(words)), {name: c.copy() for name, c in columns.items()})
    assert again.state()[0] == words
    assert all(np.array_equal(column, columns[name]) for name, column in again.state()[1].items())
    again.begin(1)
    assert finish_run(again, controller, backend, 1) == expected
    assert check_log(notes) == []


def test_commands_and_events_are_recorded_with_the_decisions():
    """Events that are handled together are one event, before what is decided by them."""
    manual, notes = Manual("a", "b"), Notes()
    backend = RecordingBackend(manual, notes.add)
    rollouts, _, _ = rollouts_over(backend, groups_per_step=1, staleness=1, notes=notes)
    assert [event["command"] for event in notes.of("command")] == [
        "restart_turns",
        "update_weights",
        "load_weights",
        "load_weights",
    ]
    del notes[:]
    assert backend.poll() == []
    assert notes == []
    started = CommandsStarted("a", [(0, ["update_weights"])])
    manual.events = [started, *serving("a", "b")]
    rollouts.handle(backend.poll())
    assert [event["kind"] for event in notes] == [
        "events_received",
        "weights_loaded",
        "weights_loaded",
        "dispatch",
        "command",
        "dispatch",
        "command",
    ]
    assert notes[0]["events"] == [
        {"kind": "commands_started", "engine": "a", "commands": [(0, ["update_weights"])]},
        {"kind": "weights_loaded", "engine": "a", "version": 0},
        {"kind": "weights_loaded", "engine": "b", "version": 0},
    ]
    submit = {"kind": "command", "command": "submit", "engine": "a", "ids": ["0.0.0", "0.1.1"]}
    assert notes[4] == submit
    rollouts.update_weights(3)
    assert notes.of("update_weights") == [{"kind": "update_weights", "policy_version": 3}]
