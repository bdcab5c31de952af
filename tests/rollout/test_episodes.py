"""Episodes: the context of a turn is exactly the tokens so far."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import pytest

from millrace.environments.running_episodes import EnvironmentReply
from millrace.rollout.episodes import RunningGroup, SampleProgress, UnfinishedGroup
from millrace.rollout.serialization import pack_groups, unpack_groups
from millrace.types import ROOT, Outcome, SamplingParams
from tests.rollout.manual import PROMPTS, RULES, completion


def generated(seed, text):
    request = type("Request", (), {"params": type("Params", (), {"seed": seed})})
    return completion(request, text=text)


def begin(num_samples, before=None):
    running = RunningGroup.begin(7, PROMPTS["p1"], num_samples, before, with_environment=True)
    for sample in running.samples:
        if not sample.context:
            sample.replied(EnvironmentReply("begin", PROMPTS["p1"].token_ids, state="start"), RULES)
    return running


def turn(sample, seed, text, reply=None):
    sample.finish_turn(generated(seed, text), RULES)
    sample.replied(reply or EnvironmentReply("step", done=True), RULES)


def test_the_context_is_what_was_observed_and_generated():
    running = begin(2)
    first, second = running.samples
    assert (first.number, first.place, second.place, running.num_running) == (7, 0, 1, 2)
    assert first.context == first.observation == (101, 5)
    turn(first, 30, "one", EnvironmentReply("step", (30, 30), reward=0.5, state="middle"))
    assert first.context == (101, 5, 30, 9, 30, 30)
    assert second.context == (101, 5)
    turn(first, 40, "two", EnvironmentReply("step", done=True, score=0.25))
    assert first.done
    assert [turn.observation for turn in first.turns] == [(101, 5), (30, 30)]
    assert [(turn.reward, turn.state) for turn in first.turns] == [(0.5, "start"), (0.0, "middle")]
    assert first.answer == "two"
    turn(second, 60, "four")
    group = running.scored({"two": Outcome("score", 2.0), "four": Outcome("score", 4.0)})
    assert group.prompt is PROMPTS["p1"]
    # The environment's score is added to the reward's.
    assert [t.outcome.value for t in group.trajectories] == [2.25, 4.0]
    assert [t.end for t in group.trajectories] == ["done", "done"]
    tokens = [[turn.completion.token_ids[0] for turn in t.turns] for t in group.trajectories]
    assert tokens == [[30, 40], [60]]


def test_without_an_environment_the_prompt_is_all():
    running = RunningGroup.begin(7, PROMPTS["p1"], 1)
    (sample,) = running.samples
    assert sample.observation == sample.context == (101, 5)
    sample.finish_turn(generated(30, "one"), None)
    assert sample.done
    assert running.scored({"one": Outcome("score", 1.0)}).trajectories[0].end == ""


def test_a_sample_continues_from_its_saved_state():
    running = begin(5)
    first, second, third, _, fifth = running.samples
    reply = EnvironmentReply("step", (3, 3), reward=0.5, state="middle", saved={"state": {"at": [1]}})
    turn(first, 30, "one", reply)
    turn(first, 40, "two", EnvironmentReply("step", done=True, score=0.25))
    turn(second, 50, "three", reply)
    second.partial_output = replace(generated(60, "fo"), finish_reason="abort")
    third.partial_output = replace(generated(70, ""), finish_reason="abort")
    fifth.finish_turn(generated(80, "waits"), RULES)
    fifth.oldest_step, fifth.saved = 4, {"state": 7}
    before = running.so_far
    # As a checkpoint has it.
    progress = [SampleProgress(*one) for one in json.loads(json.dumps(list(map(astuple, before.progress))))]
    before = UnfinishedGroup(before.group, progress)
    again = RunningGroup.begin(7, PROMPTS["p1"], 5, before, with_environment=True)
    assert again.num_running == 4
    for old, new in zip(running.samples, again.samples, strict=True):
        names = ("context", "observation", "done", "state", "score", "end", "outcome", "oldest_step", "saved")
        assert [getattr(new, name) for name in names] == [getattr(old, name) for name in names]
        assert new.partial_output is old.partial_output
        assert [(t.completion, t.reward, t.state) for t in new.turns] == [
            (t.completion, t.reward, t.state) for t in old.turns
        ]
    # The last one has yet to get the reply of its environment.
    assert again.samples[4].waits
    assert [one.saved for one in again.samples] == [None, {"state": {"at": [1]}}, None, None, {"state": 7}]
    assert again.samples[4].next_step("id", PROMPTS["p1"], RULES).saved == {"state": 7}
    turn(again.samples[1], 60, "four")
    assert again.samples[1].partial_output is None
    assert [t.completion.token_ids[0] for t in again.samples[1].turns] == [50, 60]


@pytest.mark.parametrize(
    ("limit", "reply", "end"),
    [
        ({"max_turns": 1}, EnvironmentReply("step", (3,)), "max_turns"),
        ({"max_tokens": 7}, EnvironmentReply("step", (3, 3, 3)), "context"),
        ({"max_turns": 1, "max_tokens": 1}, EnvironmentReply("step", (3, 3, 3), done=True), "done"),
    ],
)
def test_an_episode_ends_at_a_limit_unless_its_environment_ends_it(limit, reply, end):
    rules = replace(RULES, scored=False, invalid_score=-1.0, **limit)
    (sample,) = begin(1).samples
    sample.finish_turn(generated(30, "one"), rules)
    sample.replied(reply, rules)
    assert (sample.done, sample.end) == (True, end)
    expected = (
        Outcome("score", 0.0) if end == "done" else Outcome("invalid", -1.0, f"the episode ended by {end}")
    )
    assert sample.outcome == expected


def test_a_completion_that_ran_out_of_tokens_ends_the_episode_unless_the_rules_go_on():
    for ends, expected in ((True, (True, "length")), (False, (False, ""))):
        (sample,) = begin(1).samples
        cut = replace(generated(30, "one"), finish_reason="length")
        sample.finish_turn(cut, replace(RULES, ends_at_length=ends))
        assert (sample.done, sample.end) == expected
        assert sample.waits is not ends


def test_the_next_attempt_begins_without_a_trace_of_the_failed_one():
    (sample,) = begin(1).samples
    sample.finish_turn(generated(30, "one"), RULES)
    first = sample.episode
    failure = EnvironmentReply("step", failure="raised OSError")
    sample.saved = {"state": 1}
    sample.replied(failure, RULES)
    assert sample.waits and sample.saved is None
    assert (sample.context, sample.observation, sample.turns, sample.oldest_step) == ((), None, [], None)
    assert sample.episode != first
    sample.replied(failure, RULES)
    assert (sample.outcome.kind, sample.outcome.reason) == ("failed", "the environment raised OSError")
    trajectory = sample.finished(None)
    assert (trajectory.turns, trajectory.end, trajectory.text) == ((), "failed", "")
    assert trajectory.episode_return != trajectory.episode_return


def test_a_begin_that_an_episode_has_no_room_for_is_a_failure():
    """There is no completion that could be trained on."""
    sample = RunningGroup.begin(7, PROMPTS["p1"], 1, with_environment=True).samples[0]
    sample.replied(EnvironmentReply("begin", (1, 2, 3)), replace(RULES, max_tokens=3))
    reason = "the environment begins with 3 tokens, and an episode may have 3"
    assert (sample.end, sample.outcome.kind, sample.outcome.reason) == ("failed", "failed", reason)


def test_a_completion_has_no_more_tokens_than_the_episode_has_room_for():
    params = SamplingParams(max_tokens=50)
    assert RULES.limited(params, (1,) * 9_950) is params
    assert RULES.limited(params, (1,) * 9_951).max_tokens == 49


def test_an_invalid_end_scores_as_the_recipe_sets_it():
    (sample,) = begin(1).samples
    given = {"calls": 0, "invalid_calls": 1, "progress": 0.5}
    reply = EnvironmentReply("step", done=True, score=9.0, invalid="no call", **given)
    turn(sample, 30, "one", reply)
    found = sample.finished(None)
    assert (found.end, found.outcome) == ("invalid", Outcome("invalid", RULES.invalid_score, "no call"))
    assert [(turn.calls, turn.invalid_calls, turn.progress) for turn in found.turns] == [(0, 1, 0.5)]


def test_branches_keep_exact_tokens_and_come_back_from_a_checkpoint():
    running = begin(1)
    (sample,) = running.samples
    turn(sample, 30, "a", EnvironmentReply("step", (1,)))
    turn(sample, 40, "b", EnvironmentReply("step", (2, 3), after=0))
    assert sample.context == (101, 5, 30, 9, 2, 3)
    turn(sample, 50, "c", EnvironmentReply("step", (4,), after=ROOT, refused=2))
    assert sample.context == (4,)
    # A checkpoint while this branch is unfinished.
    fields, columns = pack_groups({7: running.so_far.group})
    assert [each[1] for each in fields["turn_branch"]] == [0, 0, 2, 0]
    group = unpack_groups(json.loads(json.dumps(fields)), columns, PROMPTS)[7]
    restored = begin(1, replace(running.so_far, group=group))
    (sample,) = restored.samples
    assert (sample.context, sample.after) == ((4,), ROOT)
    turn(sample, 60, "d", EnvironmentReply("step", (6,), after=2))
    assert sample.context == (101, 5, 30, 9, 2, 3, 50, 9, 6)
    sizes = [one.num_context_tokens for one in sample.next_step("s", PROMPTS["p1"], RULES).actions]
    assert sizes == [2, 5, 6, 1]
    turn(sample, 70, "e")
    (trajectory,) = restored.scored({"e": Outcome("score", 1.0)}).trajectories
    assert trajectory.branches == ((0, 1), (3,), (0, 2, 4))
    assert (trajectory.num_roots, trajectory.num_tokens) == (2, 2 + 1 + 2 + 1 + 1 + 5 * 2)


def test_the_limit_of_tokens_is_that_of_each_branch():
    rules = replace(RULES, max_tokens=20)
    for after, end in ((None, "context"), (ROOT, "")):
        (sample,) = begin(1).samples
        turn(sample, 1, "a", EnvironmentReply("step", (1,) * 10))
        sample.finish_turn(generated(2, "b"), rules)
        sample.replied(EnvironmentReply("step", (1,) * 10, after=after), rules)
        assert (sample.end, sample.done) == (end, bool(end))
