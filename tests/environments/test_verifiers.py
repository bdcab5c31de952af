"""Tasksets of verifiers: played by a process of its own, with clear errors; most on a twin of the package."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millrace.config.environment_section import VerifiersEnvironmentConfig
from millrace.environments.kinds import environment_factory
from millrace.environments.program import ProgramEnvironment
from millrace.environments.running_episodes import EnvironmentFailed, checked
from millrace.errors import SetupError
from millrace.run.build_environments import environment_rows
from millrace.types import ROOT, Action, Reply, Task

pytestmark = pytest.mark.world

HERE = Path(__file__).parent
# A Python with verifiers, which excludes our versions of mcp and openai.
VERIFIERS_PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
needs_verifiers = pytest.mark.skipif(
    not VERIFIERS_PYTHON, reason="set VERIFIERS_PYTHON to a Python with verifiers"
)
DEADLINE_S = 120.0
LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture
def twin(monkeypatch):
    monkeypatch.chdir(HERE / "verifiers_twin")


def config(**given):
    given = {"id": "guess", "python": "python", "sandbox": "none", **given}
    return VerifiersEnvironmentConfig(kind="verifiers", **given)


def make(**given):
    return environment_factory("verifiers", "verifiers", config(**given).arguments)


def task(does="", **more):
    return Task("prompt", "", {"task": {"prompt": "Guess 1.", "answer": "1", "does": does, **more}}, 0, 0, 8)


@asynccontextmanager
async def playing(made, given):
    episode: ProgramEnvironment = made()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield episode, checked(await episode.begin(given), "begin")
    finally:
        await episode.close()


async def play(made, given, *texts):
    async with playing(made, given) as (episode, first):
        replies = [first]
        for number, text in enumerate(texts, start=1):
            reply = await episode.step(Action(text, (1,), "stop"))
            replies.append(checked(reply, "step", num_actions=number))
        return replies


def end(made):
    """Close what the episodes shared."""
    return made()._programs.close()


def played(made, *episodes):
    """Replies of episodes at the same time, each a task and the texts of the policy."""

    async def together():
        try:
            return await asyncio.gather(*(play(made, *one) for one in episodes), return_exceptions=True)
        finally:
            await end(made)

    return asyncio.run(together())


@pytest.mark.usefixtures("twin")
def test_one_process_plays_all_episodes_each_with_an_address_of_its_own():
    asked = Reply(messages=({"role": "user", "content": "Guess 1."},), after=ROOT)
    found = played(make(), (task(), "1"), (task(), "2"), (task("judge"), "1"), (task(), "1"))
    assert found[0] == found[3] == [asked, Reply(done=True, score=1.0)]
    assert found[1] == [asked, Reply(done=True, score=0.0)]
    assert "the agent judge is not trained and has no client; set options.judge.client" in str(found[2])


@pytest.mark.slow_beyond(3)
@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("raise", "failed: RuntimeError: the taskset is broken"),
        ("error", "failed: TaskError: no reward"),
        ("error at length", "failed: RuntimeError: xxx"),
        ("nan", "failed: its reward is nan"),
        ("two", "failed: the episode has 2 traces that are trained; one is needed"),
        ("silent", "made no request: the program ended"),
        ("exit", "failed: the process of verifiers ended: "),
    ],
)
def test_a_fault_of_the_taskset_fails_the_episode(does, reason):
    made = make()
    (found,) = played(made, (task(does), "1"))
    assert isinstance(found, EnvironmentFailed) and reason in str(found)


@pytest.mark.usefixtures("twin")
def test_after_the_process_was_lost_another_plays_and_an_episode_that_is_closed_ends():
    made = make()

    async def both():
        with pytest.raises(EnvironmentFailed, match="the process of verifiers ended"):
            await play(made, task("exit"))
        async with playing(made, task()):
            pass  # it is asked, and closed
        found = await play(made, task(), "1")
        with pytest.raises(EnvironmentFailed, match="has no object in the column task of its row"):
            await play(made, Task("", "", {}, 0, 0, 8))
        await end(made)
        return found

    assert asyncio.run(both())[-1].score == 1.0


@pytest.mark.usefixtures("twin", "needs_bubblewrap")
def test_in_bubblewrap_it_plays_too():
    made = make(sandbox="bubblewrap", readable=("verifiers",))
    assert played(made, (task(), "1"))[0][-1] == Reply(done=True, score=1.0)


@pytest.mark.usefixtures("twin")
def test_tasks_are_rows():
    rows = list(environment_rows(config(), 2, seed=0))
    data = {"prompt": "Guess 1.", "answer": "1", "does": ""}
    assert dict(rows[1]) == {"prompt": "Guess 1.", "answer": "", "problem": 1, "task": data}
    assert len(rows) == 2


@pytest.mark.usefixtures("twin")
def test_what_cannot_be_made_is_refused_in_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(
        SetupError, match="verifiers gone cannot be made: ModuleNotFoundError: taskset 'gone' not f"
    ):
        make(id="gone")
    with pytest.raises(SetupError, match="there is no no/python; correct environment.python"):
        make(python="no/python")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match="cannot be made: ModuleNotFoundError: No module named 'verifiers'"):
        make()


@needs_verifiers
@pytest.mark.slow
def test_a_taskset_of_verifiers_is_played_as_by_itself(monkeypatch):
    monkeypatch.chdir(HERE)
    given = {"id": "verifiers_guess", "python": VERIFIERS_PYTHON, "options": LOCAL}
    rows = list(environment_rows(config(**given), 4, seed=0))
    assert [row["task"]["answer"] for row in rows] == ["1", "2", "3", "1"]
    tasks = [Task("", "", row, 0, 0, 2) for row in rows]
    found = played(make(**given), (tasks[0], "1"), (tasks[1], "1", "2"), (tasks[2], "1", "0"))
    assert [[one.messages[0]["content"] for one in replies[:-1]] for replies in found] == [
        ["< > ?"],
        ["< > ?", ">"],
        ["< > ?", ">"],
    ]
    assert [replies[-1] for replies in found] == [Reply(done=True, score=score) for score in (1.0, 1.0, 0.0)]
