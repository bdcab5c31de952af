"""OpenAI's own client against a session: streams, tools, and retries that make no second turn."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest

from millrace.environments.agent_http import AgentServer
from millrace.environments.agent_session import AgentSession
from millrace.types import Action

pytestmark = pytest.mark.world

USER = {"role": "user", "content": "2+2?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
DEADLINE_S = 60.0


@asynccontextmanager
async def connected(**options):
    session = AgentSession("key", "policy", "1")
    server = AgentServer(lambda request: session.handle(request, request.path))
    url = f"http://127.0.0.1:{await server.listen()}/v1"
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            openai.AsyncOpenAI(base_url=url, api_key="key", **options) as client,
        ):
            yield session, client.chat.completions, server
    finally:
        await server.close()


async def answered(session, asking, *actions):
    """Let the policy answer each request; the client's result and what the policy was given."""
    doing = asyncio.ensure_future(asking)
    replies = []
    for action in actions:
        replies.append(await session.next_reply())
        session.answer(action)
    return await doing, replies


def test_a_call_goes_out_in_a_stream_and_its_result_comes_back():
    async def play():
        async with connected() as (session, completions, _):
            say = Action("", (1,), "stop", {"role": "assistant", "content": "", "tool_calls": [CALL]})

            async def stream():
                options = {"include_usage": True}
                asked = completions.create(
                    model="policy", messages=[USER], tools=[TOOL], stream=True, stream_options=options
                )
                return [chunk async for chunk in await asked]

            chunks, (begin,) = await answered(session, stream(), say)
            assert (begin.messages, begin.tools[0]["function"]["name"]) == ((USER,), "add")
            (call,) = [
                call for one in chunks for choice in one.choices for call in choice.delta.tool_calls or []
            ]
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 2}')
            assert chunks[-1].usage.completion_tokens == 1
            said = {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": call.function.model_dump(exclude_none=True),
                    }
                ],
            }
            result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
            asked = completions.create(model="policy", messages=[USER, said, result], tools=[TOOL])
            found, (reply,) = await answered(session, asked, Action("four", (2,), "stop"))
            assert reply.messages == (result,)
            assert found.choices[0].message.content == "four"

    asyncio.run(play())


def test_a_retry_after_a_cut_connection_gets_the_one_turn():
    async def play():
        async with connected(max_retries=5) as (session, completions, server):
            asking = asyncio.ensure_future(completions.create(model="policy", messages=[USER]))
            assert (await session.next_reply()).messages == (USER,)
            (connection,) = server._connections
            connection.transport.abort()
            session.answer(Action("four", (1,), "stop"))
            found = await asking
            assert (found.id, found.choices[0].message.content) == ("chatcmpl-1-1", "four")
            more = [USER, found.choices[0].message, {"role": "user", "content": "sure?"}]
            _, (reply,) = await answered(
                session, completions.create(model="policy", messages=more), Action("yes", (1,), "stop")
            )
            assert reply.messages == ({"role": "user", "content": "sure?"},)

    asyncio.run(play())


def test_its_errors_are_those_that_the_client_knows():
    async def play():
        async with connected(max_retries=0) as (session, completions, _):
            with pytest.raises(openai.NotFoundError, match="the policy is called policy"):
                await completions.create(model="gpt-9", messages=[USER])
            with pytest.raises(openai.BadRequestError, match="n is 2"):
                await completions.create(model="policy", messages=[USER], n=2)
            asking = asyncio.ensure_future(completions.create(model="policy", messages=[USER]))
            await session.next_reply()
            with pytest.raises(openai.ConflictError, match="another request of this episode"):
                await completions.create(model="policy", messages=[USER, USER])
            session.end()
            with pytest.raises(openai.BadRequestError) as refused:
                await asking
            assert refused.value.code == "context_length_exceeded"

    asyncio.run(play())
