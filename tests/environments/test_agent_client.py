"""OpenAI's own client against a session: streams, tools, and retries that make no second turn."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from millrace.environments.agent_http import AgentServer
from millrace.environments.agent_session import AgentSession
from millrace.types import ROOT, Action
from tests.clients import openai

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
async def connected(max_branches=16, **options):
    session = AgentSession("key", "policy", "1", num_tokens=50, max_branches=max_branches)
    server = AgentServer(lambda request: session.handle(request, request.path))
    url = f"http://127.0.0.1:{await server.listen()}/v1"
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            openai.AsyncOpenAI(base_url=url, api_key="key", **options) as client,
        ):
            yield session, client, server
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
        async with connected() as (session, client, _):
            completions = client.chat.completions
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
        async with connected(max_retries=5) as (session, client, server):
            completions = client.chat.completions
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
        async with connected(max_branches=1, max_retries=0) as (session, client, _):
            completions = client.chat.completions
            with pytest.raises(openai.NotFoundError, match="the policy is called policy"):
                await completions.create(model="gpt-9", messages=[USER])
            with pytest.raises(openai.BadRequestError, match="n is 2"):
                await completions.create(model="policy", messages=[USER], n=2)
            asking = asyncio.ensure_future(completions.create(model="policy", messages=[USER]))
            await session.next_reply()
            with pytest.raises(openai.BadRequestError, match="opens branch 2 .* it may have 1") as refused:
                await completions.create(model="policy", messages=[USER, USER])
            assert refused.value.code == "too_many_branches"
            session.end()
            with pytest.raises(openai.BadRequestError) as refused:
                await asking
            assert refused.value.code == "context_length_exceeded"

    asyncio.run(play())


@pytest.mark.parametrize("streams", [False, True])
def test_text_completions_continue_a_text_or_tokens(streams):
    async def play():
        async with connected() as (session, client, _):

            async def text(prompt):
                asked = {"model": "policy", "prompt": prompt, "max_tokens": 9, "logprobs": 0}
                more = {"return_token_ids": True}
                if not streams:
                    return (await client.completions.create(**asked, extra_body=more)).choices[0]
                chunks = [
                    one
                    async for one in await client.completions.create(**asked, extra_body=more, stream=True)
                ]
                first, last = (one.choices[0] for one in chunks)
                return first.model_copy(update={"finish_reason": last.finish_reason})

            one = Action("wei", (7, 8), "stop", logprobs=(-0.5, -1.5), token_texts=("w", "ei"))
            found, (begin,) = await answered(session, text("drei, z"), one)
            assert (begin.text, begin.verbatim, begin.after) == ("drei, z", True, ROOT)
            assert (found.text, found.finish_reason) == ("wei", "stop")
            assert found.logprobs.tokens == ["w", "ei"]
            assert found.logprobs.token_logprobs == [-0.5, -1.5]
            assert found.logprobs.text_offset == [0, 1]
            assert (found.token_ids, found.prompt_token_ids) == ([7, 8], None)
            _, (reply,) = await answered(session, text("drei, zwei, "), one)
            assert (reply.text, reply.after) == (", ", 0)
            found, (reply,) = await answered(session, text([3, 4]), one)
            assert (reply.token_ids, reply.after, found.prompt_token_ids) == ((3, 4), ROOT, [3, 4])
            _, (reply,) = await answered(session, text([3, 4, 7, 8, 5]), one)
            assert (reply.token_ids, reply.after) == ((5,), 2)
            with pytest.raises(
                openai.BadRequestError, match="prompt has the token 50; the vocabulary has 50"
            ):
                await text([50])

    asyncio.run(play())
