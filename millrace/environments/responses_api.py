"""OpenAI's Responses API as data: items become messages, and a turn becomes a response. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.data.rows import json_kind
from millrace.environments.agent_protocol import (
    AgentError,
    ChatRequest,
    Json,
    event_stream,
    joined_text,
    read_conversation,
    read_fields,
    read_list,
    read_request_tools,
    written_arguments,
)
from millrace.types import Action

# The first are read, the second have no effect because they are the run's, the others change no response.
_KNOWN = (
    *("input", "instructions", "tools", "model", "stream", "stream_options"),
    *("temperature", "top_p", "max_output_tokens", "reasoning"),
    *("include", "max_tool_calls", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "truncation", "user"),
)
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
}
_ROLES = ("user", "system", "developer", "assistant")


def read_responses(body: bytes, model: str) -> ChatRequest:
    """Read the body of `/v1/responses`: the whole conversation as items, since no response is stored.

    Raises:
        AgentError: 404 for another model than `model`, 400 for what is malformed or not supported.
    """
    given = read_fields(body, _KNOWN, _UNSUPPORTED, model)
    messages: list[dict[str, Any]] = []
    if (instructions := given.get("instructions")) is not None:
        messages.append({"role": "system", "content": instructions})
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for number, item in enumerate(read_list(items, "input")):
        _add(item, f"input.{number}", messages)
    tools = read_request_tools(given.get("tools", []), _tool)
    return ChatRequest(read_conversation(messages, "input"), tools, given["stream"])


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise AgentError(400, f"{where} is not of type function, which a program runs itself", param="tools")
    function = {key: tool.get(key) for key in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _add(item: Any, where: str, messages: list[dict[str, Any]]) -> None:
    """Add an item to the messages; calls belong to the message of the assistant before them."""
    if not isinstance(item, dict):
        raise AgentError(400, f"{where} is {json_kind(item)}, not an object", param="input")
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise AgentError(400, f"{where}.role is none of {', '.join(_ROLES)}", param="input")
            messages.append({"role": role, "content": joined_text(item.get("content"), f"{where}.content")})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"type": "function", "id": item.get("call_id"), "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = joined_text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        case "reasoning":
            pass  # the tokens of the turn have it
        case kind:
            raise AgentError(400, f"{where} is of type {str(kind)[:60]}, which is not read", param="input")


def write_response(
    message: Json, action: Action, request: ChatRequest, *, id: str, created_s: int, model: str
) -> dict[str, Any]:
    """Return the response object of a turn; `message` is its `policy_message`."""
    is_cut = action.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{id}", "summary": [], "content": content})
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        content = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
        own = {"type": "message", "id": f"msg_{id}", "status": status, "role": "assistant"}
        output.append(own | {"content": content})
    for call in calls:
        named = {"call_id": call["id"], "name": call["function"]["name"]}
        own = {"type": "function_call", "id": f"fc_{id}_{call['id']}", "status": "completed"}
        output.append(own | named | {"arguments": written_arguments(call)})
    num_prompt, num_completion = action.num_context_tokens, len(action.token_ids)
    return {
        "id": id,
        "object": "response",
        "created_at": created_s,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_completion,
        },
    }


def responses_stream(whole: Json, request: ChatRequest) -> bytes:
    """Return a response as server-sent events: each item whole, then the response."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for index, item in enumerate(whole["output"]):
        events += _item_events(item, index)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return event_stream([event | {"sequence_number": number} for number, event in enumerate(events)])


def _item_events(item: Json, index: int) -> Iterator[dict[str, Any]]:
    place = {"output_index": index, "item_id": item["id"]}
    empty = {"status": "in_progress"} if "status" in item else {}
    match item["type"]:
        case "message":
            (part,) = item["content"]
            place |= {"content_index": 0}
            none = {**part, "text": ""}
            yield _item_event("added", index, {**item, **empty, "content": []})
            yield {"type": "response.content_part.added", **place, "part": none}
            text: dict[str, Any] = {"logprobs": []}
            yield {"type": "response.output_text.delta", **place, **text, "delta": part["text"]}
            yield {"type": "response.output_text.done", **place, **text, "text": part["text"]}
            yield {"type": "response.content_part.done", **place, "part": part}
        case "function_call":
            given = {"arguments": item["arguments"], "name": item["name"]}
            yield _item_event("added", index, {**item, **empty, "arguments": ""})
            yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **given}
        case _:
            yield _item_event("added", index, item)
    yield _item_event("done", index, item)


def _item_event(name: str, index: int, item: Json) -> dict[str, Any]:
    return {"type": f"response.output_item.{name}", "output_index": index, "item": item}
