"""Environments in the calling thread: replies in tokens, checked; every fault is a failure with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.environments.in_thread import EnvironmentsInThread
from millrace.environments.kinds import environment_factory
from millrace.environments.running_episodes import CloseEpisode, EnvironmentReply
from millrace.errors import SetupError
from tests.environments import games
from tests.environments.steps import ENCODE, PROMPT, letters, step

GAMES = "tests.environments.games"


def host(name, **options):
    replies = []
    make = environment_factory("function", f"{GAMES}:{name}", options)
    return EnvironmentsInThread(make, ENCODE, replies.append), replies


@pytest.mark.parametrize("name", ["Counting", "counting", "Asynchronous"])
def test_an_episode_is_begin_and_steps_until_done(name):
    if name == "Asynchronous":
        # In the trainer's thread nothing may wait, not even for nothing.
        environments, replies = host(name)
        environments.execute(step())
        assert "set environment.workers to 1 or more" in replies[0].failure
        return
    environments, replies = host(name)
    for texts in [(), ("a",), ("a", "b"), ("a", "b", "c")]:
        environments.execute(step(*texts))
    assert replies == [
        EnvironmentReply("0.0.0.0", PROMPT.token_ids, state="start"),
        EnvironmentReply("0.0.0.1", letters("1a"), 0.5, "turn 1"),
        EnvironmentReply("0.0.0.2", letters("2b"), 0.5, "turn 2"),
        EnvironmentReply("0.0.0.3", (), 0.5, "turn 3", True, 1.0),
    ]


def test_episodes_are_apart():
    environments, replies = host("Counting")
    for episode in ("0.0.0", "0.1.0"):
        environments.execute(step(episode=episode))
        environments.execute(step("a", episode=episode))
    assert [reply.state for reply in replies] == ["start", "turn 1"] * 2


def test_a_pure_episode_that_is_not_in_progress_is_repeated_from_its_actions():
    environments, replies = host("Counting")
    environments.execute(step("a", "b"))
    assert replies == [EnvironmentReply("0.0.0.2", letters("2b"), 0.5, "turn 2")]
    environments, replies = host("Impure")
    environments.execute(step("a", "b"))
    assert "it is not pure, so it is not repeated" in replies[0].failure


def test_an_episode_goes_on_from_its_saved_state_elsewhere():
    environments, replies = host("Saving")
    for texts in [(), ("a",), ("a", "b"), ("a", "b", "c")]:
        environments.execute(step(*texts))
    assert [reply.saved for reply in replies] == [
        *({"state": {"num": num, "note": "?"}} for num in range(3)),
        None,
    ]
    # No step before the newest is run: this one repeats other actions.
    other, again = host("Saving")
    other.execute(replace(step("?", "?", "c"), saved=replies[2].saved))
    assert again == replies[3:]
    other.execute(replace(step("?", "?", "c"), saved={"state": {"num": 1, "note": "!"}}))
    assert "load raised ValueError: this is another task (games.py line" in again[1].failure


def test_what_cannot_be_kept_of_an_environment_is_a_failure():
    faults = {
        "wrong": "returned a state from save that is no JSON: bytes is no value of JSON",
        "large": "returned 40002 bytes of JSON from save, and at most 32768 are kept; save less, or return",
        "raise": "save raised OSError: the disk is full (games.py line",
        "refuse": "",
    }
    for number, (fault, expected) in enumerate(faults.items()):
        environments, replies = host("Saving")
        environments.execute(step(episode=f"{number}.0.0"))
        environments.execute(step(fault, episode=f"{number}.0.0"))
        assert replies[1].failure.startswith(expected) and bool(replies[1].failure) == bool(expected)
        assert replies[1].saved is None


def test_a_closed_episode_is_forgotten():
    environments, replies = host("Impure")
    environments.execute(step())
    environments.execute(CloseEpisode("0.0.0"))
    environments.execute(CloseEpisode("0.0.0"))
    environments.execute(step("a"))
    assert [bool(reply.failure) for reply in replies] == [False, True]


BAD = {
    "raise": "step 1 raised OSError: the tool is down (games.py line",
    "leave": "step 1 raised SystemExit: 3 (games.py line",
    "type": "returned str from step, not a Reply",
    "text": "replied with text of type int in step",
    "reward": "replied with reward nan in step, not a finite number",
    "progress": "replied with progress 'half' in step, not a finite number",
    "state": "replied in step with a state that is no text, or done that is no bool",
    "done": "replied in step with a state that is no text, or done that is no bool",
}


@pytest.mark.filterwarnings("ignore:close of an environment raised RuntimeError")
@pytest.mark.parametrize("how", BAD)
def test_a_bad_step_fails_with_its_reason(how):
    environments, replies = host("Bad")
    environments.execute(step())
    environments.execute(step(how))
    assert replies[1].failure.startswith(BAD[how])
    # The episode is over: a further step does not find it.
    environments.execute(step(how, "fine"))
    assert replies[2].failure


@pytest.mark.filterwarnings("ignore:close of an environment raised RuntimeError")
def test_a_fault_at_the_third_step_ends_an_episode_that_went_well_so_far():
    environments, replies = host("Bad")
    environments.execute(step())
    for texts in (["fine"], ["fine"] * 2, ["fine", "fine", "raise"]):
        environments.execute(step(*texts))
    assert [reply.failure.partition(":")[0] for reply in replies] == ["", "", "", "step 3 raised OSError"]


def test_an_environment_that_cannot_be_made_for_an_episode_fails_that_one(monkeypatch):
    monkeypatch.setattr(games.FullLater, "num_made", 0)
    environments, replies = host("FullLater")
    for episode in ("0.0.0", "0.1.0"):
        environments.execute(step(episode=episode))
    environments.execute(step("a", episode="0.0.0"))
    assert [reply.failure.partition(" (")[0] for reply in replies] == [
        "",
        "begin raised OSError: there is no room",
        "",
    ]


@pytest.mark.filterwarnings("ignore:close of an environment raised RuntimeError")
@pytest.mark.parametrize("how", ["raise", "type", "over"])
def test_a_bad_begin_fails_with_its_reason(how):
    environments, replies = host("Bad", at_begin=how)
    environments.execute(step())
    expected = {
        "raise": "begin raised OSError",
        "type": "returned str from begin",
        "over": "ended the episode in",
    }
    assert replies[0].failure.startswith(expected[how])


def test_a_long_reply_is_cut_to_one_token_more_than_an_episode_may_have():
    environments, replies = host("Bad")
    environments.execute(step())
    environments.execute(step("huge"))
    environments.execute(step("huge", "surrogate"))
    assert [len(reply.token_ids) for reply in replies] == [2, 101, 1]
    # Files are written with the state.
    assert replies[2].state == "?"


def test_close_that_raises_is_a_warning():
    environments, _ = host("Bad")
    environments.execute(step())
    with pytest.warns(UserWarning, match="close of an environment raised RuntimeError: close fails, too"):
        environments.execute(CloseEpisode("0.0.0"))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("nowhere:Game", {}, "environment function nowhere:Game: there is no module nowhere"),
        (f"{GAMES}:Nothing", {}, f"environment function {GAMES}:Nothing: module {GAMES} does not have"),
        (
            f"{GAMES}:Bad",
            {"at_begin": "leave at once"},
            "with its options: SystemExit: 3 (games.py line",
        ),
        (f"{GAMES}:NoStep", {}, "is a class without a method step; it needs begin and step"),
        (f"{GAMES}:OnlySaves", {}, "is a class with a method save and without load; it needs both or none"),
        (f"{GAMES}:Counting", {"rounds": 2}, "does not take environment.options {'rounds': 2}"),
        (f"{GAMES}:counting", {"rounds": 2}, "does not take environment.options {'rounds': 2}"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(function, options, message):
    with pytest.raises(SetupError) as error:
        environment_factory("function", function, options)
    assert message in str(error.value)


def test_a_built_in_environment_refuses_wrong_options():
    with pytest.raises(SetupError, match="environment guess cannot be made with its options: highest is 99"):
        environment_factory("guess", "", {"highest": 99})
