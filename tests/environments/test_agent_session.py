"""One conversation of a program: what is new, what is repeated, and what ends it. No port."""

from __future__ import annotations

import asyncio
import json

import pytest

from millrace.environments.agent_protocol import AgentError
from millrace.environments.agent_session import AgentSession, HttpRequest, printed_reward
from millrace.types import Action, Reply

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

    def __init__(self) -> None:
        self.session = AgentSession("right", "policy", "7", clock=lambda: 5.5)

    async def ask(self, request, path="/v1/chat/completions", **headers):
        given = HttpRequest(request.method, request.path, {**request.headers, **headers}, request.body)
        return await self.session.handle(given, path)

    async def turn(self, request, text="one", **headers):
        """Ask, and let the policy answer; the response and what the policy was given."""
        asking = asyncio.ensure_future(self.ask(request, **headers))
        reply = await self.session.next_reply()
        self.session.answer(Action(text, (1,), "stop"))
        return json.loads((await asking).body), reply


def played(play):
    return asyncio.run(play(Program()))


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
        assert reply == Reply(messages=(MORE,))
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


def test_a_second_request_at_the_same_time_is_refused_and_changes_nothing():
    async def play(program):
        asking = asyncio.ensure_future(program.ask(chat(USER)))
        await program.session.next_reply()
        error = await refusal(program.ask(chat(MORE)))
        assert (error.status, error.code) == (409, "concurrent_request")
        program.session.answer(Action("one", (1,), "stop"))
        assert (await asking).status == 200

    played(play)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (chat(USER), "it has 1 messages, and the conversation 2"),
        (chat(MORE, TURN, MORE), "message 0 is not the one that was there"),
        (chat(USER, TURN | {"content": "other"}, MORE), "message 1 is not"),
        (
            chat(USER, TURN, MORE, TURN, MORE),
            "it has a message of the assistant that the policy did not write",
        ),
        (chat(USER, TURN, MORE, tools=[{"name": "add"}]), "its tools are not those of the first request"),
    ],
)
def test_a_request_that_does_not_extend_the_conversation_ends_it(request_, why):
    async def play(program):
        await program.turn(chat(USER))
        error = await refusal(program.ask(request_))
        assert (error.status, error.code) == (400, "history_not_extended")
        assert f"the request does not extend the conversation: {why}" in str(error)
        reply = await program.session.next_reply()
        assert reply.done
        assert reply.invalid == f"the program's request: {error}"
        assert (await refusal(program.ask(chat(USER, TURN, MORE)))).status == 410

    played(play)


def test_a_mistake_in_a_request_leaves_the_conversation_as_it_is():
    async def play(program):
        assert (await refusal(program.ask(chat(USER, n=3)))).status == 400
        assert (await program.turn(chat(USER)))[1].messages == (USER,)

    played(play)


def test_a_limit_of_the_run_answers_the_request_in_flight():
    async def play(program):
        asking = asyncio.ensure_future(program.ask(chat(USER)))
        await program.session.next_reply()
        program.session.end()
        found = await asking
        assert found.status == 400
        assert json.loads(found.body)["error"]["code"] == "context_length_exceeded"
        assert (await refusal(program.ask(chat(USER)))).status == 410

    played(play)


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
