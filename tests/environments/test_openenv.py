"""Servers of OpenEnv: the same episodes as in its own loop, and clear errors."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

from millrace.config.environment_section import OpenEnvEnvironmentConfig
from millrace.environments import openenv_environment
from millrace.environments.kinds import environment_factory, seeded_rows
from millrace.environments.running_episodes import EnvironmentFailed, RunningEpisodes, call_here, checked
from millrace.errors import SetupError
from millrace.types import Action, Task
from tests.house.source import ROOT

pytestmark = pytest.mark.world
needs_websockets = pytest.mark.skipif(
    find_spec("websockets") is None, reason="needs websockets: pip install 'millrace-rl[openenv]'"
)
# A Python with openenv-core, which requires gradio and much else.
OPENENV_PYTHON = os.environ.get("OPENENV_PYTHON", "")
HIGHER = {"action_field": "guess", "action": {"code": 7}, "text_field": "text"}


def factory(url, **given):
    config = OpenEnvEnvironmentConfig(kind="openenv", url=url, **{**HIGHER, **given})
    return environment_factory("openenv", "openenv", config.arguments)


def task(seed=3, **row):
    return Task("", "", row, seed, 0, 8)


async def played(make, seed, texts, **row):
    """Texts, rewards and ends."""
    game = make()
    try:
        reply = checked(await game.begin(task(seed, **row)), "begin")
        found = [(reply.text, None, False)]
        for text in texts:
            reply = checked(await game.step(Action(text, (1,), "stop")), "step")
            found.append((reply.text, reply.reward, reply.done))
            if reply.done:
                break
    finally:
        await game.close()
    return found, reply.invalid


@pytest.fixture
def server():
    from tests.environments.openenv_server import serving

    with serving() as url:
        yield url


@needs_websockets
def test_a_session_is_reset_by_the_seed_and_stepped_to_its_end(server):
    make = factory(server, instructions="A number below 8.")
    found, _ = asyncio.run(played(make, (1 << 31) + 3, ["9", "1", "3"]))
    texts = ["A number below 8.\nGuess.", "lower", "higher", None]
    assert found == list(zip(texts, [None, -0.1, -0.1, 1.0], [False, False, False, True], strict=True))
    both = asyncio.run(played(factory(server, reset_columns=["low"], text_field=None), 3, ["3", "5"], low=2))
    assert [text for text, *_ in both[0]][:2] == [
        '{"text": "Guess.", "left": 3}',
        '{"text": "higher", "left": 2}',
    ]
    assert both[0][-1] == (None, 1.0, True)


@needs_websockets
def test_sessions_side_by_side_are_apart(server):
    make = factory(server, pure=True)

    async def together():
        return await asyncio.gather(*(played(make, seed, ["3", "4", "5"]) for seed in (3, 4, 5, 3)))

    ends = [len(found) for found, _ in asyncio.run(together())]
    assert ends == [2, 3, 4, 2] and make().pure


@needs_websockets
def test_what_the_server_refuses_gets_its_reason_and_then_ends_the_episode(server):
    found, invalid = asyncio.run(played(factory(server, max_invalid_actions=1), 3, ["two", "2", "\ud800"]))
    why = "Invalid message; guess: Input should be a valid integer"
    assert [text for text, *_ in found] == ["Guess.", f"That is not an action: {why}", "higher", None]
    assert invalid == f"2 completions were no action; the last: {why}"


@needs_websockets
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", r"got an error from http://127.* in step: the board is gone \(EXECUTION_ERROR\)$"),
        ("text", "got no JSON from http://127"),
        ("list", "got a reply from http://127.* that is not OpenEnv's"),
        ("other", "got a reply from http://127.* that is not OpenEnv's"),
        ("reward", "replied with a reward that is no number"),
        ("field", "gave an observation without the text text; its fields are: words"),
    ],
)
def test_a_fault_of_the_server_fails_the_episode(server, how, reason):
    with pytest.raises(EnvironmentFailed, match=reason):
        asyncio.run(played(factory(server), 3, [how]))


@needs_websockets
def test_wrong_names_of_fields_are_no_fault_of_the_policy(server):
    with pytest.raises(EnvironmentFailed, match="code: Field required .*; correct environment.action_field"):
        asyncio.run(played(factory(server, action={}), 3, ["2"]))
    with pytest.raises(EnvironmentFailed, match="a row without the column low of environment.reset_columns"):
        asyncio.run(played(factory(server, reset_columns=["low"]), 3, ["2"]))


@needs_websockets
def test_a_server_that_is_lost_or_silent_fails_the_episode_within_the_deadline():
    from tests.environments.openenv_server import answer, serving

    def half(game, message):
        return answer(game, message) if message["type"] == "reset" else os._exit  # json.dumps raises

    with serving(half) as url:
        make = factory(url)
        with pytest.raises(EnvironmentFailed, match=f"lost the server {url}: .*ConnectionClosed"):
            asyncio.run(played(make, 3, ["2"]))
    # Nothing listens any more.
    with pytest.raises(EnvironmentFailed, match="lost the server .*Connect call failed"):
        asyncio.run(played(make, 3, ["2"]))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        episodes = RunningEpisodes(factory(url, reset_columns=["low"]), call_here)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(episodes.reply("0", task(low=1), ()), 0.05))


@needs_websockets
def test_a_server_that_cannot_be_played_is_refused(server, monkeypatch):
    with pytest.raises(SetupError, match="without the text words; its fields are: text, left; start the ser"):
        factory(server, text_field="words")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(openenv_environment, "START_S", 0.05)
        with pytest.raises(SetupError, match="did not answer within 0.05 s; start the server"):
            factory(f"http://127.0.0.1:{silent.getsockname()[1]}")
    with pytest.raises(SetupError, match="lost the server .*Connect call failed.*; start the server"):
        factory(f"http://127.0.0.1:{silent.getsockname()[1] if silent.fileno() > 0 else 9}")
    with pytest.raises(ValueError, match="is no URL of the form http://host:port"):
        OpenEnvEnvironmentConfig(kind="openenv", url="127.0.0.1:8000", action_field="guess")


@needs_websockets
def test_the_token_is_sent_and_no_other_variable_is_needed(server, monkeypatch):
    from tests.environments.openenv_server import SESSIONS

    with pytest.raises(SetupError, match="takes its key from the variable MY_SERVER_KEY, which is not set"):
        factory(server, api_key_env="MY_SERVER_KEY")
    monkeypatch.setenv("MY_SERVER_KEY", "abc")
    factory(server, api_key_env="MY_SERVER_KEY")
    assert SESSIONS[-1] == "Bearer abc"
    config = OpenEnvEnvironmentConfig(
        kind="openenv", url=server, action_field="g", api_key_env="MY_SERVER_KEY"
    )
    assert config.visible_env_vars == ("MY_SERVER_KEY",)


def test_problems_are_seeds():
    rows = list(seeded_rows(2, 0, url="http://127.0.0.1:8000", action_field="guess"))
    assert [row["problem"] for row in rows] == [0, 1] and rows[0]["prompt"]


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(SetupError, match=r'pip install "millrace-rl\[openenv\]"'):
        factory("http://127.0.0.1:9")


@needs_websockets
@pytest.mark.slow
@pytest.mark.skipif(not OPENENV_PYTHON, reason="set OPENENV_PYTHON to a Python with openenv-core")
def test_an_episode_is_the_same_as_in_openenvs_own_loop():
    texts = ["cod", "tag", "dog", "cat"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        OPENENV_PYTHON,
        str(ROOT / "tests" / "environments" / "openenv_loop.py"),
        str(port),
        "5",
        *texts,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        expected = json.loads(process.stdout.readline())
        given = {"action_field": "message", "action": {"strict": True}, "text_field": "text"}
        make = factory(f"http://127.0.0.1:{port}", **given)
        found = [asyncio.run(played(make, 5 + one, texts))[0] for one in range(4)]
        process.communicate("", timeout=60)
    # A last observation is not read by the policy.
    assert found == [
        [(None if done else text, reward, done) for text, reward, done in one] for one in expected
    ]
    assert len({one[-1][1] for one in found}) > 1
