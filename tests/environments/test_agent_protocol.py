"""Requests of programs become messages, and turns become what OpenAI's client reads."""

from __future__ import annotations

import json

import pytest

from millrace.environments.agent_protocol import (
    AgentError,
    ChatRequest,
    as_stream,
    comparable,
    policy_message,
    read_chat,
    response,
)
from millrace.types import Action
from tests.clients import openai

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": "é"}}}
ANSWER = Action("<say>two", (4, 5), "stop", {"role": "assistant", "content": "two"}, num_context_tokens=7)


def read(**body) -> ChatRequest:
    return read_chat(json.dumps({"messages": [USER], "model": "policy", **body}).encode(), "policy")


def written(action) -> dict:
    return response(
        policy_message(action), action, ChatRequest(()), id="chatcmpl-1-1", created_s=3, model="policy"
    )


def test_a_request_is_the_conversation_and_its_tools():
    history = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        },
        USER | {"name": "ann"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "reasoning_content": "hm",
            "tool_calls": [CALL | {"function": {"name": "add", "arguments": '{"a": "\\u00e9"}'}}],
        },
        {"role": "tool", "tool_call_id": "call00000", "content": "3"},
    ]
    found = read(messages=history, tools=[TOOL], temperature=0.2, max_tokens=5, user="me", n=1, stop=None)
    assert found.messages == (
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call00000", "content": "3"},
    )
    assert [tool["function"]["name"] for tool in found.tools] == ["add"]
    assert read(stream=True, stream_options={"include_usage": True}) == ChatRequest((USER,), (), True, True)


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"n": 2}, 400, "n", "n is 2, and a turn of the policy is sampled once"),
        ({"model": "gpt-9"}, 404, "model", "there is no model gpt-9; the policy is called policy"),
        ({"mesages": []}, 400, "mesages", "there is no field mesages; did you mean messages?"),
        ({"logprobs": True}, 400, "logprobs", "logprobs is not supported while a program is trained"),
        ({"tool_choice": "required"}, 400, "tool_choice", "tool_choice is not supported"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "response_format is not"),
        ({"stream_options": {}}, 400, "stream_options", "stream_options has no effect"),
        ({"messages": []}, 400, "messages", "messages is missing, empty or no list"),
        (
            {"messages": [{"role": "bot", "content": ""}]},
            400,
            "messages",
            "the request: the role of message 1 is 'bot'; there are",
        ),
        (
            {"messages": [{"role": "user"}]},
            400,
            "messages",
            "the request: message 1 is not an object with role and content",
        ),
        ({"messages": [USER | {"mood": 1}]}, 400, "messages.0", "messages.0.mood is not read"),
        (
            {"messages": [USER | {"content": "\ud800"}]},
            400,
            "messages",
            "the request: the content of message 1 holds half a character",
        ),
        (
            {"messages": [USER | {"content": [{"type": "image_url"}]}]},
            400,
            "messages.0.content",
            "messages.0.content.0 is not a part of type text",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}
                ]
            },
            400,
            "messages",
            "the request: tool_calls of message 1: the arguments of a are not JSON",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "x"}]},
            400,
            "messages",
            "the request: the last message is",
        ),
        ({"tools": [{"type": "function"}]}, 400, "tools", "the request: tool 1 is not an object with a name"),
    ],
)
def test_a_mistake_gets_a_sentence(body, status, param, message):
    with pytest.raises(AgentError) as refused:
        read(**body)
    assert (refused.value.status, refused.value.param) == (status, param)
    assert str(refused.value).startswith(message)
    assert json.loads(refused.value.body())["error"]["message"] == str(refused.value)


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"messages":' + b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(AgentError, match="the body is"):
        read_chat(body, "policy")


def test_a_turn_is_the_response_that_the_client_reads():
    whole = written(ANSWER)
    read_by_client = openai.types.chat.ChatCompletion.model_validate(whole)
    assert read_by_client.choices[0].message.content == "two"
    assert read_by_client.choices[0].finish_reason == "stop"
    assert read_by_client.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
    }
    # Without a format, the text is the message.
    assert written(Action("two", (4,), "length"))["choices"][0] | {"index": 1} == {
        "index": 1,
        "message": {"role": "assistant", "content": "two", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }


def test_a_call_is_text_of_json_and_one_that_cannot_be_used_stays_text():
    message = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    choice = written(Action("", (1,), "stop", message))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        CALL | {"function": {"name": "add", "arguments": '{"a": "é"}'}},
    ]
    broken = Action(
        "x<call>{", (1,), "stop", {"role": "assistant", "content": "x"}, "unclosed", "does not end"
    )
    assert written(broken)["choices"][0]["message"]["content"] == "x<call>{"


@pytest.mark.parametrize("include_usage", [True, False])
def test_the_chunks_of_a_stream_are_the_response(include_usage):
    message = {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL | {"id": "call00001"}]}
    whole = written(Action("so", (1,), "stop", message))
    *events, end = (
        as_stream(whole, ChatRequest((), include_usage=include_usage))
        .decode()
        .removesuffix("\n\n")
        .split("\n\n")
    )
    chunks = [
        openai.types.chat.ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
        for event in events
    ]
    assert end == "data: [DONE]"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [include_usage]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "so"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.id) for call in calls] == [(0, "call00000"), (1, "call00001")]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["tool_calls"]


def test_what_comes_back_is_the_same_message_without_its_reasoning():
    said = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    echoed = written(Action("", (1,), "stop", said))["choices"][0]["message"]
    back = read(
        messages=[USER, echoed, {"role": "tool", "tool_call_id": "call00000", "content": "3"}]
    ).messages[1]
    assert comparable(back) == comparable(said)
    assert comparable(back) != comparable(said | {"content": "other"})
    assert comparable(back) != comparable(said | {"tool_calls": [CALL | {"id": "call00001"}]})
