"""From the prompt of a row to the text and tokens the policy sees: a plain template, or the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millrace.config.inputs import AUTO
from millrace.data.rows import DataError, json_kind
from millrace.errors import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHAT = "chat"
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]


def template_of(template: str, prompt: Any) -> str:
    """The template that a prompt gets: `auto` is `chat` for messages, and the text itself for text."""
    if template != AUTO:
        return template
    return CHAT if isinstance(prompt, list) else "{prompt}"


def render(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    prompt: Any,
    where: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[str, tuple[int, ...]]:
    """The text of a prompt and its tokens.

    A plain template gets the special tokens the tokenizer puts in front (BOS), never an end token behind; a
    chat template writes its own special tokens, shows the tools (of `read_tools`) and opens the assistant's
    turn. The prompt is text; with `chat` and `auto` also a list of messages, as `read_messages` takes them.
    `where` is the row's place, for messages. Raises DataError for another or an empty prompt, a character
    that the tokenizer cannot spell, and a tokenizer without a chat template.
    """
    if template_of(template, prompt) == CHAT:
        text = chat_text(tokenizer, messages_of(prompt, where), where, tools=tools)
        token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        text = plain_text(template, prompt, where)
        token_ids = _without_end(tokenizer, text, tokenizer(text, verbose=False)["input_ids"])
    if not token_ids:
        raise DataError(f"{where}: the prompt is empty")
    refuse_unknown(tokenizer, text, token_ids, where)
    return text, tuple(token_ids)


def refuse_unknown(
    tokenizer: PreTrainedTokenizerBase, text: str, token_ids: Sequence[int], where: str
) -> None:
    """Raise DataError if the tokens of a text hold the unknown token."""
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in token_ids:
        raise DataError(
            f"{where}: the tokenizer has no token for some character of {text!r}; keep to the characters of "
            "its training data, or train it with tokenizer.alphabet: bytes"
        )


def plain_text(template: str, prompt: Any, where: str) -> str:
    """The template with `{prompt}` replaced; other braces, and those in the prompt, stay as they are.

    Raises DataError if the template is `chat`, which a tokenizer must write, or the prompt is not text.
    """
    if template_of(template, prompt) == CHAT:
        what = "data.template chat" if template == CHAT else f"{where}: a prompt that is a list of messages"
        raise DataError(
            f"{what} needs a tokenizer with a chat template, which one trained on the data has not; set "
            "data.template to text around {prompt}, or tokenizer.path to a folder"
        )
    if isinstance(prompt, list):
        raise DataError(f"{where}: the prompt is a list of messages; set data.template to chat")
    return template_of(template, prompt).replace("{prompt}", as_text(prompt, "the prompt", where))


def as_text(value: Any, what: str, where: str) -> str:
    """The value, which must be text that can be written as UTF-8; else DataError names `where` and `what`."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is {json_kind(value)}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {what} holds half a character (at {error.start}) that is not Unicode text"
        ) from None
    return value


def _without_end(tokenizer: PreTrainedTokenizerBase, text: str, token_ids: list[int]) -> list[int]:
    """Remove the end token that some tokenizers append, since generation continues after the prompt."""
    if not token_ids or token_ids[-1] != tokenizer.eos_token_id:
        return token_ids
    written = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    is_in_text = bool(written) and written[-1] == tokenizer.eos_token_id
    return token_ids if is_in_text and token_ids[-len(written) :] == written else token_ids[:-1]


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    where: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    opens_turn: bool = True,
) -> str:
    """Messages of `read_messages` as the tokenizer's chat template writes them.

    With `opens_turn` the text ends where the assistant's next message begins. DataError if there is no
    template, or it refuses the messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; set data.template to a plain one, text around {prompt}, "
            "or take a model that was trained to chat"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=opens_turn, tokenize=False
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise DataError(f"{where}: the tokenizer's chat template refuses the messages: {error}") from error
    return str(text)


def messages_of(prompt: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt; text is one message of the user. Raises DataError."""
    return read_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, where)


def read_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: `{role, content}`, and what tools need.

    An assistant's message may have `tool_calls`, each `{"id", "type", "function": {name, arguments}}` or that
    inner object; arguments given as JSON text become an object. A tool's message may have `tool_call_id` and
    `name`. Keys that are null, as Parquet writes them, are left out. `where` is the place, for messages.
    Raises DataError for anything else, and for a last message of the assistant.
    """
    if not isinstance(messages, list | tuple):
        raise DataError(f"{where}: the prompt is {json_kind(messages)}, not text or a list of messages")
    if not messages:
        raise DataError(f"{where}: the prompt is an empty list of messages")
    read = [_read_message(message, number, where) for number, message in enumerate(messages, start=1)]
    if read[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is the assistant's, so there is nothing left for it to answer"
        )
    return read


def _read_message(message: Any, number: int, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise DataError(f"{where}: message {number} is not an object with role and content")
    role = as_text(message["role"], f"the role of message {number}", where)
    if role not in ROLES:
        raise DataError(f"{where}: the role of message {number} is {role!r}; {did_you_mean(role, ROLES)}")
    known = {key: value for key, value in message.items() if value not in (None, [])}
    if "tool_calls" in known:
        if role != "assistant":
            raise DataError(f"{where}: message {number} has tool_calls, which only an assistant's may have")
        known["tool_calls"] = _read_calls(known["tool_calls"], f"{where}: tool_calls of message {number}")
        # Templates recognize a call without text by its null content.
        known.setdefault("content", None)
    if "tool_calls" not in known or known["content"] is not None:
        if "content" not in message:
            raise DataError(f"{where}: message {number} is not an object with role and content")
        as_text(message["content"], f"the content of message {number}", where)
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in known:
            as_text(known[key], f"{key} of message {number}", where)
    return known


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise DataError(f"{where} is {json_kind(calls)}, not a list of calls")
    read = []
    for call in calls:
        function = call.get("function") or call if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not {"name", "arguments"} <= function.keys():
            raise DataError(f"{where}: a call is not an object with name and arguments")
        name = as_text(function["name"], "the name of a call", where)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: the arguments of {name} are not JSON: {error}") from None
        if not isinstance(arguments, Mapping):
            raise DataError(f"{where}: the arguments of {name} are {json_kind(arguments)}, not an object")
        entry = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        number = {} if call.get("id") is None else {"id": as_text(call["id"], "the id of a call", where)}
        read.append(entry | number)
    return read
