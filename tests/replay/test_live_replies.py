"""Live environments beside recorded replies: equal ones are counted, and the first difference is named."""

from __future__ import annotations

import pytest

from millrace.environments.in_thread import EnvironmentsInThread
from millrace.environments.kinds import environment_factory
from millrace.environments.running_episodes import CloseEpisode, EnvironmentReply
from millrace.replay.live_replies import LiveComparison, LiveReplies, first_difference, replies_of_log
from millrace.replay.recorded_log import ReplayError
from millrace.rollout.recorder import as_record
from tests.environments.steps import ENCODE, letters, step


def decode(token_ids):
    return "".join(map(chr, token_ids))


def played(name, *steps, **options):
    """The replies of an environment to steps."""
    replies = []
    host = EnvironmentsInThread(
        environment_factory("function", f"tests.environments.games:{name}", options), ENCODE, replies.append
    )
    for one in steps:
        host.execute(one)
    return replies


def log_of(*replies):
    taken = {"kind": "take", "batch": 6}
    return [taken, *({"kind": "events_received", "events": [as_record(reply)]} for reply in replies)]


def live(recorded, name, **options):
    """A live host over recorded replies, what it gives, and the comparison."""
    given, comparison = [], LiveComparison()
    make = environment_factory("function", f"tests.environments.games:{name}", options)
    host = LiveReplies(
        replies_of_log(log_of(*recorded)),
        lambda on_reply: EnvironmentsInThread(make, ENCODE, on_reply),
        given.append,
        comparison,
        decode,
    )
    return host, given, comparison


STEPS = [step(), step("a"), step("a", "b"), step("a", "b", "c")]


def test_equal_replies_are_counted_and_given_as_recorded():
    recorded = played("Counting", *STEPS)
    host, given, comparison = live(recorded, "Counting")
    for one in STEPS:
        host.execute(one)
    assert given == recorded
    comparison.check()
    assert (comparison.num_replies, comparison.num_episodes, comparison.notices()) == (4, 1, [])


def test_the_first_difference_of_an_episode_is_named_and_the_recorded_replies_go_on():
    recorded = played("Counting", *STEPS)
    host, given, comparison = live(recorded, "Counting", turns=2)
    for one in STEPS:
        host.execute(one)
    assert given == recorded
    text = "step 8, group 0, sample 0, turn 2: text was '2b' in the run and is '' live"
    assert comparison.notices() == [f"a live environment differs: {text}"]
    assert comparison.notices() == []
    with pytest.raises(ReplayError) as caught:
        comparison.check()
    assert str(caught.value) == (
        f"live environments reply otherwise in 1 of 1 episodes; the first difference is at {text}"
    )
    # What follows in the episode is not compared.
    assert comparison.num_replies == 3


def test_a_step_of_an_episode_that_the_run_closed_needs_no_live_reply():
    recorded, started = [EnvironmentReply("0.0.0.0", (7, 8), state="start")], []
    comparison, given = LiveComparison(), []

    class Silent:
        execute = staticmethod(started.append)

    host = LiveReplies(
        replies_of_log(log_of(*recorded)), lambda on_reply: Silent(), given.append, comparison, decode
    )
    host.execute(step())
    assert given == []
    host.execute(CloseEpisode("0.0.0"))
    assert (given, len(started)) == (recorded, 2)
    with pytest.raises(ReplayError, match="--live compared nothing: no reply of an environment is recorded"):
        comparison.check()


RECORDED = EnvironmentReply("id", letters("yes"), 0.5, "s", saved={"state": 1})


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        (EnvironmentReply("id", letters("yes"), 0.5, "s"), ""),
        (EnvironmentReply("id", failure="is gone\n"), r"failure was '' in the run and is 'is gone\n' live"),
        (
            EnvironmentReply("id", letters("yes"), 0.25, "other"),
            "reward was 0.5 in the run and is 0.25 live",
        ),
        (EnvironmentReply("id", letters("yes"), 0.5, "t"), "state was 's' in the run and is 't' live"),
        (
            EnvironmentReply("id", letters("yes"), 0.5, "s", calls=1),
            "calls was None in the run and is 1 live",
        ),
        (
            EnvironmentReply("id", letters("yes"), 0.5, "s", after=-1),
            "after was None in the run and is -1 live",
        ),
        (
            EnvironmentReply("id", letters("yes"), 0.5, "s", refused=1),
            "refused was 0 in the run and is 1 live",
        ),
    ],
)
def test_each_field_is_compared_but_for_what_was_saved(live, expected):
    assert first_difference(RECORDED, live, decode) == expected


def test_a_long_text_is_shown_from_where_it_differs():
    texts = ["a" * 300 + end for end in ("b" * 500, "c")]
    found = first_difference(*[EnvironmentReply("id", letters(text)) for text in texts], decode)
    assert found.startswith(f"text from character 280 on was '{'a' * 20}{'b' * 100}… (400 more characters)'")
    assert found.endswith(f"in the run and is '{'a' * 20}c' live")
    # Equal texts of other tokens.
    found = first_difference(EnvironmentReply("id", (1, 2)), EnvironmentReply("id", (3,)), lambda ids: "same")
    assert found == "token_ids was [1, 2] in the run and is [3] live"
