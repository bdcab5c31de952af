"""Resources servers of NeMo Gym: the same episodes as of its own simple_agent, and clear errors."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import replace

import pytest

from millrace.config.environment_section import NemoGymEnvironmentConfig
from millrace.config.recipe import load_recipe
from millrace.environments import nemo_gym_environment
from millrace.environments.kinds import environment_factory
from millrace.environments.running_episodes import EnvironmentFailed, checked
from millrace.errors import SetupError
from millrace.rewards.chat_endpoint import HttpReply
from millrace.types import Action, Task
from tests.environments.nemo_gym_server import Counter, serving
from tests.house.source import ROOT

# A Python with nemo-gym, which requires Python 3.12, ray and much else.
NEMO_GYM_PYTHON = os.environ.get("NEMO_GYM_PYTHON", "")


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    schema |= {"additionalProperties": False}
    return {"type": "function", "name": name, "description": "", "strict": True, "parameters": schema}


TOOLS = [tool("increment_counter", count={"type": "integer"}), tool("get_counter_value")]
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add 1, then 2."}], "tools": TOOLS},
    "initial_count": 3,
    "expected_count": 6,
}


def factory(url="http://127.0.0.1:9", **given):
    config = NemoGymEnvironmentConfig(kind="nemo_gym", url=url, **given)
    return environment_factory("nemo_gym", "nemo_gym", config.arguments)


@pytest.fixture
def counter(monkeypatch):
    made = Counter()
    monkeypatch.setattr(nemo_gym_environment, "exchange", made.exchange)
    return made


def turn(*calls, content="", reason="stop", **more):
    entries = [
        {"type": "function", "id": f"call{number}", "function": {"name": name, "arguments": given}}
        for number, (name, given) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content} | ({"tool_calls": entries} if calls else {})
    return Action(content, (1, 2), reason, message | more)


def add(count):
    return ("increment_counter", {"count": count})


async def episode(make, row, turns, max_turns=8):
    game = make()
    replies = [checked(await game.begin(Task("", "", row, 0, 0, max_turns)), "begin")]
    for one in turns:
        replies.append(checked(await game.step(one), "step"))
        if replies[-1].done:
            break
    return replies


def played(make, row, turns, max_turns=8):
    return asyncio.run(episode(make, row, turns, max_turns))


DONE = turn(content="Done.", reasoning_content="It is 6.")


def test_an_episode_is_seeded_called_and_verified_with_all_that_was_written(counter):
    turns = [turn(add(1), add(2), content="I add."), turn(("get_counter_value", {})), DONE]
    begun, added, counted, end = played(factory(), ROW, turns)
    assert begun.messages == ({"role": "user", "content": "Add 1, then 2."},)
    assert [one["function"]["name"] for one in begun.tools] == ["increment_counter", "get_counter_value"]
    assert [one["content"] for one in added.messages] == ['{"success": true}'] * 2
    assert counted.messages[0]["content"] == '{"count": 6}'
    assert (end.done, end.score) == (True, 1.0)
    (body,) = counter.verified
    assert {name: body[name] for name in ROW} == ROW
    output = body["response"]["output"]
    short = [item.get("output") or item.get("arguments") or item.get("content") for item in output]
    text = {"type": "output_text", "annotations": [], "logprobs": []}
    assert short == [
        [text | {"text": "I add."}],
        *('{"count": 1}', '{"count": 2}', '{"success": true}', '{"success": true}'),
        *("{}", '{"count": 6}'),
        [{"type": "reasoning_text", "text": "It is 6."}],
        [text | {"text": "Done."}],
    ]
    assert output[-2]["summary"] == [{"type": "summary_text", "text": "It is 6."}]
    assert [item["call_id"] for item in output[1:5]] == ["call0", "call1"] * 2
    assert body["response"]["tools"] == TOOLS


def test_the_last_turn_runs_its_calls_and_a_cut_one_does_not(counter):
    assert played(factory(), ROW, [turn(add(1)), turn(add(2)), DONE], max_turns=2)[-1].score == 1.0
    assert played(factory(), ROW, [turn(add(3)), turn(add(1), reason="length")])[-1].score == 1.0
    assert len(counter.verified[1]["response"]["output"]) == 3


def test_calls_that_cannot_be_run_get_their_reason_and_then_end_the_episode(counter):
    wrong = replace(turn(content="<call>"), status="invalid_json", error="no JSON")
    replies = played(factory(max_invalid_calls=1), ROW, [wrong, wrong])
    assert replies[1].messages[0]["content"] == "error: no JSON"
    assert "2 turns had a call that cannot be run; the last: no JSON" in replies[2].invalid
    # A tool that the server does not have, or that fails, is read by the policy.
    row = {**ROW, "responses_create_params": {"input": "Hi", "tools": [*TOOLS, tool("gone")]}}
    replies = played(factory(), row, [turn(("gone", {})), DONE])
    assert replies[1].messages[0]["content"] == "no such tool" and replies[2].score == 0.0
    with pytest.raises(EnvironmentFailed, match="no calls are read; set environment.tool_format"):
        played(factory(), ROW, [Action("Done.", (1,), "stop")])


@pytest.mark.parametrize(
    ("path", "status", "body", "reason"),
    [
        (
            "seed_session",
            500,
            b"KeyError('a')",
            r"got status 500 from http://127.*/seed_session: KeyError\('a'",
        ),
        ("seed_session", 307, b"", "got status 307 from http://127.*/seed_session"),
        ("seed_session", 200, b"Welcome.", "got no JSON object from http://127.*/seed_session"),
        ("verify", 422, b'{"detail": "no id"}', 'got status 422 from .*/verify: {"detail": "no id"}'),
        ("verify", 200, b"[1.0]", "got no JSON object from .*/verify"),
        ("verify", 200, b"[" * 100_000, "got no JSON object from .*/verify"),
        ("verify", 200, b"{}", "got no finite number as the reward from .*/verify"),
        ("verify", 200, b'{"reward": NaN}', "got no finite number as the reward"),
        ("verify", 200, b'{"reward": "1"}', "got no finite number as the reward"),
        ("verify", 200, b'{"reward": true}', "got no finite number as the reward"),
        ("verify", 200, b'{"reward": 1' + b"0" * 400 + b"}", "got no finite number as the reward"),
    ],
)
def test_a_reply_that_is_not_nemo_gyms_fails_the_episode(counter, path, status, body, reason):
    counter.broken[path] = HttpReply(status, body)
    with pytest.raises(EnvironmentFailed, match=reason):
        played(factory(), ROW, [DONE])


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (None, "has a row without the object responses_create_params"),
        ({"input": []}, "cannot read responses_create_params of its row: input is missing, empty or no list"),
        ({"input": "Hi", "tool_choice": "required"}, "tool_choice is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "the policy reads text"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools.0 is not of type function"),
    ],
)
def test_a_row_that_cannot_be_played_fails_the_episode(counter, params, reason):
    with pytest.raises(EnvironmentFailed, match=reason):
        played(factory(), {**ROW, "responses_create_params": params}, [DONE])


def test_rows_are_nemo_gyms_own(tmp_path):
    given = {"environment.kind": "nemo_gym", "environment.url": "http://127.0.0.1:9", "rewards": []}
    given |= {"data.train": "rows.jsonl", "model.path": str(tmp_path)}
    with pytest.raises(Exception, match="set data.prompt_column to responses_create_params.input"):
        load_recipe("grpo", given)
    load_recipe("grpo", {**given, "data.prompt_column": "responses_create_params.input"})
    with pytest.raises(ValueError, match="is no URL of the form http://host:port"):
        NemoGymEnvironmentConfig(kind="nemo_gym", url="127.0.0.1:8000")


@pytest.mark.world
def test_sessions_side_by_side_are_apart_and_a_lost_server_is_named(monkeypatch):
    counter = Counter()
    with serving(counter) as url:
        make = factory(url + "/")

        async def together():
            rows = [{**ROW, "initial_count": number} for number in range(4)]
            turns = [turn(add(1)), turn(add(2)), DONE]
            return await asyncio.gather(*(episode(make, row, turns) for row in rows))

        assert [replies[-1].score for replies in asyncio.run(together())] == [0.0, 0.0, 0.0, 1.0]
        assert sorted(counter.counts.values()) == [3, 4, 5, 6]
        monkeypatch.setattr(nemo_gym_environment, "_MAX_BYTES", 100)
        with pytest.raises(EnvironmentFailed, match="its reply has more than 100 bytes"):
            played(make, ROW, [DONE])
    with pytest.raises(EnvironmentFailed, match="cannot reach the server http://127.*Connection refused"):
        played(make, ROW, [DONE])
    with pytest.raises(
        SetupError, match="Connection refused.*; start the server, or correct environment.url"
    ):
        factory(url)


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.skipif(not NEMO_GYM_PYTHON, reason="set NEMO_GYM_PYTHON to a Python with nemo-gym")
def test_an_episode_is_the_same_as_of_nemo_gyms_own_agent():
    scripts = [
        [turn(add(1), add(2), content="I add."), turn(("get_counter_value", {})), DONE],
        [turn(content="Nothing to do.")],
        [turn(add(3)), turn(add(4), content="and", reason="length")],
        [turn(("increment_counter", {"count": "x"})), DONE],
    ]
    rows = [{**ROW, "expected_count": number} for number in (6, 6, 6, 3)]
    outputs = [
        [{"output": items(one), "cut": one.finish_reason == "length"} for one in turns] for turns in scripts
    ]
    loop = str(ROOT / "tests" / "environments" / "nemo_gym_loop.py")
    command = [NEMO_GYM_PYTHON, loop, json.dumps(rows), json.dumps(outputs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        port, expected = (json.loads(process.stdout.readline()) for _ in range(2))
        make = factory(f"http://127.0.0.1:{port}")
        scores = [played(make, row, turns)[-1].score for row, turns in zip(rows, scripts, strict=True)]
        process.stdin.write("\n")
        process.stdin.flush()
        found = json.loads(process.stdout.readline())
        process.communicate("", timeout=60)
    assert scores == [reward for _, reward in expected] == [1.0, 0.0, 1.0, 1.0]
    assert [[*map(plain, output)] for output, _ in found] == [[*map(plain, output)] for output, _ in expected]


def items(one):
    """The output of a response that the turn is."""
    found = []
    if thought := one.message.get("reasoning_content"):
        found.append({"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": thought}]})
    if one.text:
        part = {"type": "output_text", "text": one.text, "annotations": []}
        found.append(
            {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
        )
    for call in one.message.get("tool_calls", []):
        arguments = json.dumps(call["function"]["arguments"])
        own = {"type": "function_call", "call_id": call["id"], "name": call["function"]["name"]}
        found.append(own | {"arguments": arguments})
    return found


def plain(item):
    """What a verifier reads of an item."""
    names = ("type", "role", "name", "arguments", "call_id", "output", "summary")
    texts = [part["text"] for part in item.get("content") or [] if part["type"] == "output_text"]
    return {name: item[name] for name in names if item.get(name)}, texts
