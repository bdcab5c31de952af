"""The requests of a program: what each continues, what is repeated, and what is refused. No port."""

from __future__ import annotations

import asyncio
import json

import pytest

from millrace.environments.agent_protocol import AgentError
from millrace.environments.agent_session import AgentSession, HttpRequest, printed_reward
from millrace.types import ROOT, Action, Reply

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
TURN = {"role": "assistant", "content": "one"}
KEY = {"authorization": "Bearer right"}
RETRY = {"x-stainless-retry-count": "1"}


def chat(*messages, **more) -> HttpRequest:
    body = json.dumps({"model": "policy", "messages": list(messages), **more}).encode()
    return HttpRequest("POST", "", KEY, body)


class Program:
    """What a program does with its session, in one thread."""

    def __init__(self, **settings) -> None:
        self.session = AgentSession("right", "policy", "7", clock=lambda: 5.5, **settings)

    async def ask(self, request, path="/v1/chat/completions", **headers):
        given = HttpRequest(request.method, request.path, {**request.headers, **headers}, request.body)
        return await self.session.handle(given, path)

    async def turn(self, request, text="one", **headers):
        """Ask, and let the policy answer; the response and what the policy was given."""
        asking = asyncio.ensure_future(self.ask(request, **headers))
        reply = await self.session.next_reply()
        self.session.answer(Action(text, (1,), "stop"))
        return json.loads((await asking).body), reply


def played(play, **settings):
    return asyncio.run(play(Program(**settings)))


async def refusal(asking) -> AgentError:
    with pytest.raises(AgentError) as refused:
        await asking
    return refused.value


def test_each_request_gives_the_policy_the_new_messages():
    async def play(program):
        tool = {"type": "function", "function": {"name": "add"}}
        first, begin = await program.turn(chat(USER, tools=[tool]))
        assert (begin.messages, [one["function"]["name"] for one in begin.tools]) == ((USER,), ["add"])
        assert (first["id"], first["created"]) == ("chatcmpl-7-1", 5)
        assert first["choices"][0]["message"]["content"] == "one"
        second, reply = await program.turn(chat(USER, TURN, MORE, tools=[tool]), "two")
        assert reply == Reply(messages=(MORE,), tools=begin.tools, after=0)
        assert second["id"] == "chatcmpl-7-2"

    played(play)


def test_a_retry_gets_the_response_in_flight_or_the_recorded_one():
    async def play(program):
        request = chat(USER)
        both = [asyncio.ensure_future(program.ask(request, **more)) for more in ({}, RETRY)]
        await program.session.next_reply()
        await asyncio.sleep(0)
        both[0].cancel()  # its connection was cut
        program.session.answer(Action("one", (1,), "stop"))
        found = await both[1]
        again = await program.ask(request, **RETRY)
        assert found is again
        # The conversation goes on from the one turn.
        _, reply = await program.turn(chat(USER, TURN, MORE))
        assert reply.messages == (MORE,)

    played(play)


def test_requests_at_the_same_time_are_answered_in_turn_and_are_branches():
    async def play(program):
        await program.turn(chat(USER))
        # Without a retry count, an equal body is a question of its own.
        both = [asyncio.ensure_future(program.ask(chat(USER, TURN, MORE))) for _ in range(2)]
        for text in ("two", "three"):
            reply = await program.session.next_reply()
            assert (reply.messages, reply.after) == ((MORE,), 0)
            program.session.answer(Action(text, (1,), "stop"))
        found = [json.loads((await one).body)["choices"][0]["message"]["content"] for one in both]
        assert found == ["two", "three"]

    played(play)


@pytest.mark.parametrize(
    ("messages", "tools", "added", "after"),
    [
        ((USER, TURN, MORE), [], (MORE,), 0),
        # One message more or fewer, or another one, before the policy's turn.
        ((USER,), [], (USER,), ROOT),
        ((MORE, TURN, MORE), [], (MORE, TURN, MORE), ROOT),
        ((USER, MORE, TURN, MORE), [], (USER, MORE, TURN, MORE), ROOT),
        # Another turn than the policy's, and one of its own behind the policy's.
        ((USER, TURN | {"content": "x"}, MORE), [], (USER, TURN | {"content": "x"}, MORE), ROOT),
        ((USER, TURN, TURN, MORE), [], (USER, TURN, TURN, MORE), ROOT),
        ((USER, TURN, MORE, TURN | {"content": "x"}, MORE), [], (MORE, TURN | {"content": "x"}, MORE), 0),
        ((USER, TURN, MORE), [{"name": "add"}], (USER, TURN, MORE), ROOT),
    ],
)
def test_a_request_continues_what_it_begins_with(messages, tools, added, after):
    async def play(program):
        await program.turn(chat(USER))
        _, reply = await program.turn(chat(*messages, tools=tools))
        assert (reply.messages, reply.after) == (added, after)
        assert [one["function"]["name"] for one in reply.tools] == [one["name"] for one in tools]

    played(play)


def test_of_equal_histories_the_newest_is_continued_and_older_turns_can_be():
    async def play(program):
        await program.turn(chat(USER))
        await program.turn(chat(USER))
        _, third = await program.turn(chat(USER, TURN, MORE), "two")
        _, fourth = await program.turn(chat(USER, TURN, MORE, TURN | {"content": "two"}, USER))
        _, fifth = await program.turn(chat(USER, TURN, USER))
        assert (third.after, fourth.after, fifth.after) == (1, 2, 1)
        assert fifth.messages == (USER,)

    played(play)


def test_a_branch_too_many_is_refused_and_counted_and_the_episode_goes_on():
    async def play(program):
        await program.turn(chat(USER))
        await program.turn(chat(MORE))
        for _ in range(2):
            error = await refusal(program.ask(chat(MORE, MORE)))
            assert (error.status, error.code) == (400, "too_many_branches")
            assert "opens branch 3 of this episode, and it may have 2" in str(error)
        _, reply = await program.turn(chat(USER, TURN, MORE))
        assert (reply.after, reply.refused) == (0, 2)
        _, reply = await program.turn(chat(MORE, TURN, MORE))
        assert (reply.after, reply.refused) == (1, 0)

    played(play, max_branches=2)


def test_a_retry_of_an_earlier_request_gets_its_recorded_response():
    async def play(program):
        first, _ = await program.turn(chat(USER))
        await program.turn(chat(USER, TURN, MORE))
        again = await program.ask(chat(USER), **RETRY)
        assert json.loads(again.body) == first

    played(play)


def test_a_mistake_in_a_request_leaves_the_conversation_as_it_is():
    async def play(program):
        assert (await refusal(program.ask(chat(USER, n=3)))).status == 400
        assert (await program.turn(chat(USER)))[1].messages == (USER,)

    played(play)


def test_a_limit_of_the_run_answers_the_requests_in_flight():
    async def play(program):
        asking = [asyncio.ensure_future(program.ask(chat(one))) for one in (USER, MORE, MORE)]
        await program.session.next_reply()
        program.session.end()
        for found in await asyncio.gather(*asking):
            assert found.status == 400
            assert json.loads(found.body)["error"]["code"] == "context_length_exceeded"
        assert (await refusal(program.ask(chat(USER)))).status == 410

    played(play)


def test_a_branch_that_would_be_too_long_is_refused_and_opens_none():
    async def play(program):
        await program.turn(chat(USER))
        for _ in range(2):  # of the two branches that there may be
            asking = asyncio.ensure_future(program.ask(chat(MORE)))
            assert (await program.session.next_reply()).after == ROOT
            program.session.refuse()
            found = await asking
            assert found.status == 400
            assert json.loads(found.body)["error"]["code"] == "context_length_exceeded"
        _, reply = await program.turn(chat(MORE))
        assert (reply.after, reply.refused) == (ROOT, 2)

    played(play, max_branches=2)


def test_the_key_is_that_of_the_episode():
    async def play(program):
        for headers in ({"authorization": "Bearer other"}, {"authorization": ""}, {"authorization": "right"}):
            error = await refusal(program.ask(chat(USER), **headers))
            assert (error.status, error.code) == (401, "invalid_api_key")

    played(play)


def test_the_reward_is_posted_once_and_is_a_number():
    async def play(program):
        for body in (
            b'{"reward": NaN}',
            b'{"reward": true}',
            b'{"reward": 1, "x": 2}',
            b"{}",
            b'{"reward": 1e999}',
        ):
            request = HttpRequest("POST", "", KEY, body)
            assert (await refusal(program.ask(request, "/reward"))).status == 400
        assert program.session.reward is None
        request = HttpRequest("POST", "", KEY, b'{"reward": 0.5}')
        assert (await program.ask(request, "/reward")).status == 200
        assert program.session.reward == 0.5
        assert (await refusal(program.ask(request, "/reward"))).status == 409

    played(play)


def test_the_models_are_the_policy():
    async def play(program):
        get = HttpRequest("GET", "", KEY, b"")
        assert json.loads((await program.ask(get, "/v1/models")).body)["data"][0]["id"] == "policy"
        assert json.loads((await program.ask(get, "/v1/models/policy")).body)["id"] == "policy"
        assert (await refusal(program.ask(get, "/v1/models/other"))).code == "model_not_found"
        assert (await refusal(program.ask(get, "/v1/embeddings"))).status == 404

    played(play)


@pytest.mark.parametrize(
    ("line", "reward"),
    [('{"reward": 1}', 1.0), ('{"reward": "1"}', None), ("1", None), ("", None), ("[[", None)],
)
def test_a_printed_reward(line, reward):
    assert printed_reward(line) == reward
