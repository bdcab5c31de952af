"""OpenAI's chat completions as data: a program's request, and the policy's turn as its response. No torch.

These are pure functions; `agent_session` decides which request is answered by what. `responses_api` and
`messages_api` read other APIs as the same messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.data.chat import read_messages
from millrace.data.rows import DataError, json_kind
from millrace.data.tool_schema import read_tools
from millrace.errors import did_you_mean
from millrace.observability.plain import plain_text
from millrace.types import Action

MAX_MESSAGES = 10_000
MAX_MESSAGE_CHARACTERS = 1000
Json = Mapping[str, Any]
# Sampling parameters are the run's, so that what is trained on was sampled as the recipe says.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("reasoning_effort", "verbosity"),
)
# They change no response: bookkeeping, caching and billing.
_IGNORED = (
    *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
)
_READ = ("messages", "tools", "model", "stream", "stream_options")
# Options that would change what a response is, each with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "web_search_options": (),
}
# What clients send back of the assistant's message beside its content and calls.
_ECHOED = ("annotations", "audio", "function_call", "parsed", "reasoning", "refusal")
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_KINDS = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}


class AgentError(Exception):
    """A request that is refused: an HTTP status, and an error object that every client reads."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str = "") -> None:
        super().__init__(plain_text(message, MAX_MESSAGE_CHARACTERS))
        self.status, self.param, self.code = status, param, code

    def body(self) -> bytes:
        """Return the error object as JSON."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code or kind}
        return encoded({"type": "error", "error": error})


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the policy's next turn.

    Attributes:
        messages: the whole conversation, each message as `data.chat.read_messages` takes it.
        tools: as `data.tool_schema.read_tools` returns them.
        stream: whether the response is a stream of chunks.
        include_usage: whether the stream ends with the usage.
    """

    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = ()
    stream: bool = False
    include_usage: bool = False


def encoded(value: Any) -> bytes:
    """Encode as JSON in one line of ASCII."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def read_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object; AgentError for anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise AgentError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise AgentError(400, f"the body is {json_kind(value)}, not a JSON object")
    return value


def read_chat(body: bytes, model: str) -> ChatRequest:
    """Read the body of `/v1/chat/completions`.

    Raises:
        AgentError: 404 for another model than `model`, 400 for what is malformed or not supported.
    """
    given = read_fields(body, (*_READ, *_SAMPLING, *_IGNORED), _UNSUPPORTED, model)
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise AgentError(400, "stream_options is an object", param="stream_options")
    if "stream_options" in given and not given["stream"]:
        raise AgentError(400, "stream_options has no effect without stream: true", param="stream_options")
    tools, usage = read_request_tools(given.get("tools", [])), options.get("include_usage") is True
    return ChatRequest(read_conversation(given.get("messages"), "messages"), tools, given["stream"], usage)


def read_fields(
    body: bytes, known: Sequence[str], unsupported: Mapping[str, tuple[Any, ...]], model: str
) -> dict[str, Any]:
    """Read the fields of a request that are not null, `stream` among them.

    Args:
        body: JSON.
        known: fields that may be given.
        unsupported: further ones, each with the values that ask for nothing.
        model: the policy's name.

    Raises:
        AgentError: 404 for another model, 400 for what is malformed, unknown or not supported.
    """
    given = {name: value for name, value in read_object(body).items() if value is not None}
    for name, value in given.items():
        if name in unsupported and not any(value is v or value == v for v in unsupported[name]):
            raise _unsupported(name, value)
        if name not in known and name not in unsupported:
            name = name[:60]
            near = did_you_mean(name, [*known, *unsupported])
            raise AgentError(400, f"there is no field {name}; {near}", param=name)
    check_model(given.get("model", model), model)
    if not isinstance(given.setdefault("stream", False), bool):
        raise AgentError(400, "stream is true or false", param="stream")
    return given


def read_request_tools(tools: Any, convert: Callable[[Any, str], Any] | None = None) -> tuple[Json, ...]:
    """Read the tools of a request; AgentError for what are none.

    `convert` makes a tool of the form of chat completions of each, given its place for messages.
    """
    if convert is not None and isinstance(tools, list):
        tools = [convert(tool, f"tools.{number}") for number, tool in enumerate(tools)]
    try:
        return read_tools(tools, "the request")
    except DataError as error:
        raise AgentError(400, str(error), param="tools") from None


def check_model(name: Any, model: str) -> None:
    """Raise AgentError unless the name is that of the policy."""
    if name != model:
        raise AgentError(
            404,
            f"there is no model {str(name)[:60]}; the policy is called {model}, which environment.model_name "
            "sets",
            param="model",
            code="model_not_found",
        )


def _unsupported(name: str, value: Any) -> AgentError:
    if name == "n":
        return AgentError(
            400,
            f"n is {str(value)[:20]}, and a turn of the policy is sampled once; the run has "
            "rollout.samples_per_prompt for several samples",
            param="n",
        )
    return AgentError(400, f"{name} is not supported while a program is trained; leave it out", param=name)


def read_conversation(messages: Any, field: str) -> tuple[Json, ...]:
    """Read messages of the form of chat completions, which are or were made from a field of the request.

    Raises:
        AgentError: there are none or too many, or one is malformed.
    """
    given = read_list(messages, field)
    plain = [_plain(message, f"{field}.{n}") for n, message in enumerate(given)]
    try:
        return tuple(read_messages(plain, "the request"))
    except DataError as error:
        raise AgentError(400, str(error), param=field) from None


def read_list(entries: Any, field: str) -> list[Any]:
    """Return the entries of a conversation; AgentError unless they are a list with some and not too many."""
    if not isinstance(entries, list) or not entries:
        raise AgentError(400, f"{field} is missing, empty or no list; send the conversation", param=field)
    if len(entries) > MAX_MESSAGES:
        raise AgentError(400, f"{field} has {len(entries)} entries; at most {MAX_MESSAGES}", param=field)
    return entries


def _plain(message: Any, where: str) -> Json:
    """A message with its content as one text, without what the official clients send back beside it."""
    if not isinstance(message, dict):
        raise AgentError(400, f"{where} is {json_kind(message)}, not an object", param=where)
    is_policy = message.get("role") == "assistant"
    plain: dict[str, Any] = {"content": ""} if is_policy else {}
    for key, value in message.items():
        if value is None or value == [] or (is_policy and key in _ECHOED):
            continue
        if key not in _FIELDS:
            raise AgentError(400, f"{where}.{key[:60]} is not read; leave it out", param=where)
        plain[key] = joined_text(value, f"{where}.content") if key == "content" else value
    return plain


def joined_text(content: Any, where: str) -> Any:
    """The text of a list of parts; other content as it is.

    Raises:
        AgentError: a part is no text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise AgentError(
                400, f"{where}.{number} is not a part of type text; the policy reads text", param=where
            )
        texts.append(text)
    return "".join(texts)


def comparable(message: Json) -> str:
    """Return a text that is equal for equal messages; without reasoning, which clients leave out."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content" and value}
    return json.dumps(kept, sort_keys=True)


def policy_message(action: Action) -> Json:
    """Return a completion as a message of the conversation: its text, unless a format read it.

    Where a call in it cannot be used, the content is the whole text, so that the program sees the call.
    """
    message = action.message
    if message is None:
        return {"role": "assistant", "content": action.text}
    whole = action.status != "ok" and not message.get("tool_calls")
    return dict(message) | {"content": action.text if whole else message.get("content") or ""}


def response(
    message: Json, action: Action, request: ChatRequest, *, id: str, created_s: int, model: str
) -> dict[str, Any]:
    """Return the response object of a turn; `message` is its `policy_message`."""
    written: dict[str, Any] = {"role": "assistant", "content": message["content"], "refusal": None}
    if message.get("reasoning_content"):
        written["reasoning_content"] = message["reasoning_content"]
    reason = "length" if action.finish_reason == "length" else "stop"
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [_written_call(call) for call in calls]
        written["content"] = written["content"] or None
        reason = "tool_calls" if reason == "stop" else reason
    num_prompt, num_completion = action.num_context_tokens, len(action.token_ids)
    return {
        "id": id,
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [{"index": 0, "message": written, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        },
    }


def _written_call(call: Json) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": written_arguments(call)}
    return {"id": call["id"], "type": "function", "function": function}


def written_arguments(call: Json) -> str:
    """Return the arguments of a call as JSON text."""
    return json.dumps(call["function"]["arguments"], ensure_ascii=False)


def event_stream(events: Sequence[Json]) -> bytes:
    """Return server-sent events that are named by their field `type`."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + encoded(event) + b"\n\n" for event in events
    )


def as_stream(whole: Json, request: ChatRequest) -> bytes:
    """Return a response as server-sent events: the role, the text, each call, the end."""
    (choice,) = whole["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    deltas += [
        {"tool_calls": [{"index": n, **call}]} for n, call in enumerate(message.get("tool_calls") or [])
    ]
    ends = [None] * len(deltas) + [choice["finish_reason"]]
    chunks: Sequence[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}]}
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]
    if request.include_usage:
        chunks = [*({**chunk, "usage": None} for chunk in chunks), {"choices": [], "usage": whole["usage"]}]
    head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    events = [b"data: " + encoded(head | chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])
