"""An agent program as an environment: its requests are the turns, its end is the end, and it is killed."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.environments.kinds import environment_factory
from millrace.environments.program import ProgramEnvironment, Programs
from millrace.environments.running_episodes import EnvironmentFailed
from millrace.errors import SetupError
from millrace.types import ROOT, Action, Reply, Task

pytestmark = pytest.mark.world

COMMAND = ("python", str(Path(__file__).with_name("agent_program.py")))
DEADLINE_S = 60.0


def task(does="", **more) -> Task:
    return Task("prompt", "b", {"does": does, "answer": "b", **more}, 5, 0, 8)


@asynccontextmanager
async def playing(given, sandbox="none", **settings):
    columns = settings.pop("task_columns", tuple(given.row))
    programs = Programs(COMMAND, sandbox=sandbox, task_columns=columns, **settings)
    episode = ProgramEnvironment(programs)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield episode, await episode.begin(given)
    finally:
        await episode.close()
        await programs.close()


def played(given, *texts, **settings) -> list[Reply]:
    async def play() -> list[Reply]:
        async with playing(given, **settings) as (episode, first):
            return [first, *[await episode.step(Action(text, (1,), "stop")) for text in texts]]

    return asyncio.run(play())


def user(content) -> tuple:
    return ({"role": "user", "content": content},)


def asked(content, after) -> Reply:
    return Reply(messages=user(content), after=after)


def test_the_requests_are_turns_and_the_last_line_is_the_score():
    replies = played(task(), "a", "b")
    assert replies == [asked("prompt", ROOT), asked("0", 0), Reply(done=True, score=1.0)]
    assert played(task(), "a", "c")[-1] == Reply(done=True, score=0.0)
    assert played(task("calls anthropic"), "a", "b") == replies


def test_a_posted_reward_counts():
    assert played(task("posts"), "a", "c")[-1] == Reply(done=True, score=0.25)


def test_without_a_reward_the_recipe_must_have_one():
    found = played(task("prints nothing"), "a", "b")[-1]
    assert found.done
    assert found.invalid.startswith("the program ended without a reward")
    assert played(task("prints nothing"), "a", "b", is_scored=True)[-1] == Reply(done=True)


def test_a_crash_is_the_programs_fault_and_its_reason_is_one_safe_line():
    found = played(task("crashes"), "a")[-1]
    assert found.done
    assert found.invalid == r"the program ended with exit code 1: RuntimeError: the tool is \x1b[31m down"


def test_a_program_that_asks_nothing_is_a_failure():
    with pytest.raises(
        EnvironmentFailed, match="made no request: the program ended with exit code 4: of no use"
    ):
        played(task("never asks"))


def test_another_conversation_is_a_branch():
    assert played(task("forgets"), "a")[-1] == asked("another", ROOT)
    # One that may have a single branch goes on with the error, and the run counts it.
    found = played(task("branches"), "a", "b", max_branches=1)
    assert found == [asked("prompt", ROOT), replace(asked("0", 0), refused=3), Reply(done=True, score=1.0)]


def test_requests_at_the_same_time_and_a_text_completion_are_branches():
    found = played(task("branches"), "a", "x", "y", "z", "b")
    assert [one.after for one in found] == [ROOT, ROOT, ROOT, ROOT, 0, None]
    assert sorted(one.messages[0]["content"] for one in found[1:3]) == ["one", "two"]
    assert (found[3].text, found[3].verbatim) == ("Write: ", True)
    assert found[-1] == Reply(done=True, score=1.0)


def test_the_end_of_an_episode_kills_the_program_and_what_it_started(tmp_path):
    place = tmp_path / "ids"

    async def play() -> list[int]:
        async with playing(task("hangs", file=str(place))) as (episode, _):
            asking = asyncio.ensure_future(episode.step(Action("a", (1,), "stop")))
            while not (place.exists() and place.read_text(encoding="utf-8")):
                await asyncio.sleep(0.01)
            ids = [int(one) for one in place.read_text(encoding="utf-8").split()]
            for id in ids:
                os.kill(id, 0)
            asking.cancel()
        return ids

    for id in asyncio.run(play()):
        with pytest.raises(ProcessLookupError):
            os.kill(id, 0)


def test_columns_that_are_not_named_stay_hidden():
    given = task()
    with pytest.raises(EnvironmentFailed, match="has no column other in its row"):
        played(given, task_columns=("other",))
    # The program reads `does` from the row it gets, and is given none here.
    assert played(task("crashes"), "a", "b", task_columns=())[-1] == Reply(done=True, score=1.0)


def look_around(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "x")

    async def play():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        host = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, playing(task("looks around", host=host), sandbox=sandbox) as (episode, _):
            (message,) = (await episode.step(Action("a", (1,), "stop"))).messages
            assert (await episode.step(Action("b", (1,), "stop"))).messages == user("0")
            assert (await episode.step(Action("b", (1,), "stop"))) == Reply(done=True, score=1.0)
        return json.loads(message["content"])

    return asyncio.run(play())


@pytest.mark.usefixtures("needs_bubblewrap")
def test_in_bubblewrap_it_reaches_the_policy_and_nothing_else(monkeypatch):
    found = look_around("bubblewrap", monkeypatch)
    assert not found["shadow"]
    assert "Connection refused" in found["host"]
    assert found["wrong key"] == "invalid_api_key"


def test_without_a_sandbox_it_runs_as_this_process(monkeypatch):
    found = look_around("none", monkeypatch)
    assert found["shadow"]
    assert "Connection refused" not in found["host"]
    assert found["wrong key"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": ("no-such-program",), "sandbox": "none"}, "there is no program no-such-program"),
        (
            {"command": ("python",), "readable": ("no-such-file",)},
            "there is no no-such-file|install bubblewrap",
        ),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(settings, message):
    with pytest.raises(SetupError, match=f"environment program: .*({message})"):
        environment_factory("program", "", settings)


@pytest.mark.slow
def test_many_episodes_share_a_proxy():
    async def play() -> list[Reply]:
        programs = Programs(COMMAND, sandbox="none")
        episodes = [ProgramEnvironment(programs) for _ in range(6)]
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*(one.begin(task()) for one in episodes))
                for text in ("a", "b"):
                    found = await asyncio.gather(*(one.step(Action(text, (1,), "stop")) for one in episodes))
            return found
        finally:
            await asyncio.gather(*(one.close() for one in episodes))
            await programs.close()

    assert asyncio.run(play()) == [Reply(done=True, score=1.0)] * 6
