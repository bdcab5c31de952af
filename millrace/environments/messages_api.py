"""Anthropic's Messages API as data: blocks become messages, and a turn becomes a message. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

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
)
from millrace.types import Action

# The first are read, the second have no effect because they are the run's, the others change no response.
_KNOWN = (
    *("messages", "system", "tools", "model", "stream"),
    *("max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "thinking", "output_config"),
    *("cache_control", "inference_geo", "metadata", "service_tier"),
)
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_format": (),
    "tool_choice": ({"type": "auto"},),
}


def read_anthropic(body: bytes, model: str) -> ChatRequest:
    """Read the body of `/v1/messages`.

    Raises:
        AgentError: 404 for another model than `model`, 400 for what is malformed or not supported.
    """
    given = read_fields(body, _KNOWN, _UNSUPPORTED, model)
    messages: list[dict[str, Any]] = []
    if system := given.get("system"):
        messages.append({"role": "system", "content": joined_text(system, "system")})
    for number, entry in enumerate(read_list(given.get("messages"), "messages")):
        messages += _messages(entry, f"messages.{number}")
    tools = read_request_tools(given.get("tools", []), _tool)
    return ChatRequest(read_conversation(messages, "messages"), tools, given["stream"])


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise AgentError(400, f"{where} is not of type custom, which a program runs itself", param="tools")
    function = {key: tool.get(key) for key in ("name", "description")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _messages(entry: Any, where: str) -> Iterator[dict[str, Any]]:
    """The messages of an entry: results of tools are messages of their own, before the text beside them."""
    if not isinstance(entry, dict) or entry.get("role") not in ("user", "assistant"):
        raise AgentError(400, f"{where} is no object with the role user or assistant", param="messages")
    content = entry.get("content")
    if not isinstance(content, list):
        yield {"role": entry["role"], "content": content}
        return
    texts, calls, has_results = [], [], False
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and entry["role"] == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"type": "function", "id": block.get("id"), "function": function})
        elif kind == "tool_result" and entry["role"] == "user":
            has_results = True
            text = joined_text(block.get("content") or "", f"{where}.content.{number}")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
        elif kind not in ("thinking", "redacted_thinking"):  # the tokens of the turn have these
            texts.append(block)
    if texts or not has_results:
        written: dict[str, Any] = {
            "role": entry["role"],
            "content": joined_text(texts, f"{where}.content"),
        }
        yield written | ({"tool_calls": calls} if calls else {})


def write_message(
    message: Json, action: Action, request: ChatRequest, *, id: str, created_s: int, model: str
) -> dict[str, Any]:
    """Return the message object of a turn; `message` is its `policy_message`."""
    content: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    calls = message.get("tool_calls") or []
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        used = {"id": call["id"], "name": function["name"], "input": function["arguments"]}
        content.append({"type": "tool_use", **used})
    reason = "tool_use" if calls else "end_turn"
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "max_tokens" if action.finish_reason == "length" else reason,
        "stop_sequence": None,
        "usage": {"input_tokens": action.num_context_tokens, "output_tokens": len(action.token_ids)},
    }


def messages_stream(whole: Json, request: ChatRequest) -> bytes:
    """Return a message as server-sent events: each block whole, then the end."""
    usage = whole["usage"]
    begun = {**whole, "content": [], "stop_reason": None, "usage": usage | {"output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(whole["content"]):
        empty, delta = _block_parts(block)
        place = {"index": index}
        events.append({"type": "content_block_start", **place, "content_block": empty})
        events.append({"type": "content_block_delta", **place, "delta": delta})
        events.append({"type": "content_block_stop", **place})
    ends = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": ends, "usage": usage})
    events.append({"type": "message_stop"})
    return event_stream(events)


def _block_parts(block: Json) -> tuple[Json, Json]:
    """The start of a block, and the delta that completes it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
