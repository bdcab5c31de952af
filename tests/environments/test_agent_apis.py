"""One conversation by three APIs: the policy reads the same messages, and the official clients its turns."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from millrace.environments.agent_http import AgentServer
from millrace.environments.agent_protocol import AgentError
from millrace.environments.agent_session import APIS, AgentSession, HttpRequest
from millrace.types import Action
from tests.clients import anthropic, openai

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLS = [
    {"type": "function", "id": f"call0000{n}", "function": {"name": "add", "arguments": {"a": n}}}
    for n in range(2)
]
FIRST = {"role": "assistant", "content": "I add.", "tool_calls": CALLS}
TURN = Action("raw", (1, 2), "stop", FIRST, num_context_tokens=7)
LAST = Action("fo\u00fcr", (3,), "length", num_context_tokens=20)
RESULTS = [{"role": "tool", "tool_call_id": call["id"], "content": f"={n}"} for n, call in enumerate(CALLS)]
BEGUN = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"})
DEADLINE_S = 60.0


class Chat:
    path = "/v1/chat/completions"

    def first(self):
        function = {"name": "add", "description": "Add.", "parameters": SCHEMA}
        return {"messages": list(BEGUN), "tools": [{"type": "function", "function": function}]}

    def second(self, body, turn):
        said = {key: value for key, value in turn["choices"][0]["message"].items() if value is not None}
        return body | {"messages": [*body["messages"], said, *RESULTS, {"role": "user", "content": "Well?"}]}

    def text(self, turn):
        return turn["choices"][0]["message"]["content"], turn["choices"][0]["finish_reason"]


class Responses:
    path = "/v1/responses"

    def first(self):
        tool = {
            "type": "function",
            "name": "add",
            "description": "Add.",
            "parameters": SCHEMA,
            "strict": True,
        }
        return {"instructions": "be brief", "input": [{"role": "user", "content": "2+2?"}], "tools": [tool]}

    def second(self, body, turn):
        said = openai.types.responses.Response.model_validate(turn, strict=True)
        assert [item.type for item in said.output] == ["message", "function_call", "function_call"]
        results = [
            {"type": "function_call_output", "call_id": one["tool_call_id"], "output": one["content"]}
            for one in RESULTS
        ]
        echo = [item.model_dump(exclude_none=True) for item in said.output]
        asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Well?"}]}
        return body | {"input": [*body["input"], *echo, *results, asked]}

    def text(self, turn):
        said = openai.types.responses.Response.model_validate(turn, strict=True)
        assert said.usage.total_tokens == 21 and said.status == "incomplete"
        return said.output_text, {"max_output_tokens": "length"}[said.incomplete_details.reason]


class Anthropic:
    path = "/v1/messages"

    def first(self):
        tool = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
        system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
        return {
            "max_tokens": 9,
            "system": system,
            "messages": [{"role": "user", "content": "2+2?"}],
            "tools": [tool],
        }

    def second(self, body, turn):
        said = anthropic.types.Message.model_validate(turn, strict=True)
        assert said.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": one["content"]}
            for one in RESULTS
        ]
        echo = [block.model_dump(exclude_none=True) for block in said.content]
        asked = [*results, {"type": "text", "text": "Well?"}]
        added = [{"role": "assistant", "content": echo}, {"role": "user", "content": asked}]
        return body | {"messages": [*body["messages"], *added]}

    def text(self, turn):
        said = anthropic.types.Message.model_validate(turn, strict=True)
        assert said.usage.output_tokens == 1
        return said.content[0].text, {"max_tokens": "length"}[said.stop_reason]


EVERY = [Chat(), Responses(), Anthropic()]


async def turn(session, path, body, action):
    """Post a request, and let the policy answer; its response and what the policy was given."""
    asked = json.dumps({"model": "policy", **body}).encode()
    request = HttpRequest("POST", path, {"x-api-key": "key"}, asked)
    asking = asyncio.ensure_future(session.handle(request, path))
    reply = await session.next_reply()
    session.answer(action)
    return json.loads((await asking).body), reply


@pytest.mark.parametrize("api", EVERY, ids=lambda api: api.path)
def test_a_conversation_is_the_same_by_every_api(api):
    async def play():
        session = AgentSession("key", "policy", "1")
        body = api.first()
        said, begun = await turn(session, api.path, body, TURN)
        assert begun.messages == BEGUN
        assert begun.tools == (
            {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}},
        )
        said, reply = await turn(session, api.path, api.second(body, said), LAST)
        assert reply.messages == (*RESULTS, {"role": "user", "content": "Well?"})
        assert api.text(said) == ("fo\u00fcr", "length")

    assert {api.path for api in EVERY} | {"/v1/completions"} == set(APIS)
    asyncio.run(play())


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("responses", {"input": []}, "input", "input is missing, empty or no list"),
        (
            "responses",
            {"input": "a", "previous_response_id": "resp_1"},
            "previous_response_id",
            "not supported",
        ),
        (
            "responses",
            {"input": [{"type": "item_reference", "id": "a"}]},
            "input",
            "input.0 is of type item_ref",
        ),
        ("responses", {"input": [3]}, "input", "input.0 is a number, not an object"),
        ("responses", {"input": [{"role": "bot", "content": "a"}]}, "input", "input.0.role is none of user"),
        (
            "responses",
            {"input": "a", "tools": [{"type": "web_search"}]},
            "tools",
            "tools.0 is not of type function",
        ),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text", "not supported"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input.0.content",
            "not a part of type text",
        ),
        ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "input", "the request: "),
        ("messages", {"messages": []}, "messages", "messages is missing, empty or no list"),
        (
            "messages",
            {"messages": [{"role": "system", "content": "a"}]},
            "messages",
            "messages.0 is no object with",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content",
            "text",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}], "tools": {}},
            "tools",
            "tools is an object",
        ),
        (
            "messages",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "bash_20250124", "name": "bash"}],
            },
            "tools",
            "tools.0 is not of type custom",
        ),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "n": 2}, "n", "there is no field n"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_read_says_why(path, body, param, message):
    with pytest.raises(AgentError) as refused:
        APIS[f"/v1/{path}"].read(json.dumps({"model": "policy", **body}).encode(), "policy")
    assert refused.value.param == param and message in str(refused.value)


@asynccontextmanager
async def served():
    session = AgentSession("key", "policy", "1")
    server = AgentServer(lambda request: session.handle(request, request.path))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield session, f"http://127.0.0.1:{await server.listen()}"
    finally:
        await server.close()


async def answered(session, asking, action):
    doing = asyncio.ensure_future(asking)
    await session.next_reply()
    session.answer(action)
    return await doing


@pytest.mark.slow
@pytest.mark.world
def test_the_client_of_openai_reads_a_response_and_its_stream():
    async def play():
        async with (
            served() as (session, url),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key") as client,
        ):
            api, given = Responses(), {"model": "policy"}
            body = api.first()

            async def streamed():
                async with client.responses.stream(**given, **body) as stream:
                    events = [event.type async for event in stream]
                    return events, await stream.get_final_response()

            events, found = await answered(session, streamed(), TURN)
            assert events.count("response.function_call_arguments.done") == 2
            assert events[-1] == "response.completed" and found.output[2].arguments == '{"a": 1}'
            later = api.second(
                body, found.model_dump(mode="json", exclude={"output": {0: {"content": {0: {"parsed"}}}}})
            )
            found = await answered(session, client.responses.create(**given, **later), LAST)
            assert found.output_text == "fo\u00fcr"
            with pytest.raises(openai.NotFoundError, match="the policy is called policy"):
                await client.responses.create(model="gpt-9", input="a")

    asyncio.run(play())


@pytest.mark.slow
@pytest.mark.world
def test_the_client_of_anthropic_reads_a_message_and_its_stream():
    async def play():
        async with (
            served() as (session, url),
            anthropic.AsyncAnthropic(base_url=url, api_key="key") as client,
        ):
            api, given = Anthropic(), {"model": "policy"}
            body = api.first()

            async def streamed():
                async with client.messages.stream(**given, **body) as stream:
                    return "".join(
                        [text async for text in stream.text_stream]
                    ), await stream.get_final_message()

            text, found = await answered(session, streamed(), TURN)
            assert text == "I add." and [block.input for block in found.content[1:]] == [{"a": 0}, {"a": 1}]
            later = api.second(body, found.model_dump(mode="json"))
            found = await answered(session, client.messages.create(**given, **later), LAST)
            assert (found.content[0].text, found.stop_reason) == ("fo\u00fcr", "max_tokens")
            with pytest.raises(anthropic.NotFoundError, match="the policy is called policy"):
                await client.messages.create(
                    model="claude-9", max_tokens=9, messages=[{"role": "user", "content": "a"}]
                )

    asyncio.run(play())
