"""`async def` functions in reward workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.rewards.reward_errors import RewardError
from millrace.types import Episode, EpisodeTurn, Outcome
from tests.rewards.helpers import Clock, calls, hangs, prompts, score

pytestmark = pytest.mark.world

FUNCTIONS = '''
import asyncio, os, time

begun, everyone = [], asyncio.Event()

async def grade(prompt, completion, answer, row):
    """Does what the completion says, and keeps a record of every call."""
    with open("calls.txt", "a") as record:
        record.write(completion + "\\n")
    word, _, rest = completion.partition(" ")
    if word == "meet":  # until so many calls are in progress in this process
        begun.append(completion)
        if len(begun) == int(rest):
            everyone.set()
        await everyone.wait()
        return os.getpid()
    if word == "die":
        os._exit(3)
    if word == "block":
        open("hangs", "w").write(str(os.getpid()))
        time.sleep(600)
    if word == "wait":
        await asyncio.sleep(600)
    await asyncio.sleep(0)
    return float(rest)

def episodic(prompt, completion, answer, row, episode):
    return {
        "score": 1 / len(episode.turns) if episode.turns else None,
        "turns": len(episode.turns),
        "tokens": sum(turn.completion_tokens for turn in episode.turns),
        "rewards": sum(turn.reward for turn in episode.turns) + episode.score,
        "end": episode.end,
    }

async def episodic_async(prompt, completion, answer, row, episode):
    return episodic(prompt, completion, answer, row, episode)

def plain(prompt, completion, answer, row):
    return 1.0
'''
SPEC = {"kind": "function", "function": "waiting_rewards:grade"}


@pytest.fixture
def make_async(make, tmp_path: Path):
    (tmp_path / "waiting_rewards.py").write_text(FUNCTIONS)
    return lambda **options: make(SPEC, **options)


def test_a_worker_has_many_calls_in_progress(make_async):
    """One after another they would never end."""
    outcomes = score(make_async(concurrency=200), *["meet 200"] * 200)
    assert {outcome.kind for outcome in outcomes} == {"score"} and len({one.value for one in outcomes}) == 1


def test_there_are_no_more_than_the_recipe_says(make_async):
    """The first waits for the second until it is late; only then the second begins."""
    first, second = score(make_async(concurrency=1, timeout_s=0.2), "meet 2", "meet 2")
    assert first.reason == "took longer than 0.2 s" and second.kind == "score"


def test_what_ends_the_worker_fails_alone(make_async):
    completions = ["value 1", "value 2", "die 3", "wait 0", "value 4"]
    outcomes = score(make_async(timeout_s=0.5), *completions)
    assert [outcome.kind for outcome in outcomes] == ["score", "score", "failed", "failed", "score"]
    assert outcomes[2].reason == "its process ended with exit code 3"
    assert outcomes[3].reason == "took longer than 0.5 s"
    assert calls().count("die 3") == 2


@pytest.mark.slow
def test_a_call_that_blocks_the_event_loop_fails_alone(make_async):
    reward = make_async(timeout_s=200.0, clock=Clock(hangs))
    outcomes = score(reward, "value 1", "block 0", "value 2")
    assert [outcome.kind for outcome in outcomes] == ["score", "failed", "score"]
    assert outcomes[1].reason == "took longer than 210 s"


def test_a_function_sees_the_whole_episode(make, make_async):
    turns = [EpisodeTurn("1+1=", "3", 4, 1, "stop", 0.0), EpisodeTurn("no", "2", 1, 1, "stop", 0.5)]
    for name in ("episodic", "episodic_async"):
        reward = make({"kind": "function", "function": f"waiting_rewards:{name}"})
        reward.check()
        assert reward.sees_episodes
        outcomes = reward.score(prompts(2), ["2", "3"], [Episode(tuple(turns), "done", 0.25), Episode(())])
        extras = {"turns": 2.0, "tokens": 2.0, "rewards": 0.75, "end": "done"}
        assert outcomes[0] == Outcome("score", 0.5, extras=extras)
        assert outcomes[1].kind == "invalid" and outcomes[1].extras["turns"] == 0.0
        with pytest.raises(ValueError, match="takes episodes; there are 0 of them"):
            reward.score(prompts(1), ["2"])


def test_concurrency_of_a_function_that_has_none_is_a_mistake(make, make_async):
    reward = make({"kind": "function", "function": "waiting_rewards:plain"}, concurrency=8)
    with pytest.raises(RewardError, match="concurrency is for `async def` functions.*; remove it, or raise"):
        reward.check()
