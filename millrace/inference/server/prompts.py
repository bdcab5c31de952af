"""From what a client sent to the tokens the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from millrace.data.chat import CHAT, render
from millrace.data.rows import DataError
from millrace.inference.server.errors import ApiError
from millrace.inference.server.schemas import Message
from millrace.inference.server.service import Served

# Special tokens that the tokenizer puts in front, the text as it is, and no end token behind.
AS_IT_IS = "{prompt}"


def check_model(served: Served, name: str | None) -> None:
    """Refuse a request for another model.

    Raises:
        ApiError: its name is not the one that is served.
    """
    if name is not None and name != served.name:
        raise ApiError(
            404,
            f"there is no model {name}; this server has {served.name}",
            param="model",
            code="model_not_found",
        )


def texts(served: Served, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
    """The prompts of a completion request: one or several, as text or as tokens.

    Raises:
        ApiError: there is none, or one is empty or cannot be spelled.
    """
    if isinstance(prompt, str):
        return [_tokens(served, AS_IT_IS, prompt, "prompt")]
    if not prompt:
        raise ApiError(400, "prompt is empty; a completion needs something to follow", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    found = []
    for number, one in enumerate(cast(list[str | list[int]], prompt)):
        found.append(one if isinstance(one, list) else _tokens(served, AS_IT_IS, one, f"prompt {number}"))
    return found


def conversation(served: Served, messages: Sequence[Message]) -> list[int]:
    """A conversation as the model reads it, the assistant's turn opened.

    Raises:
        ApiError: the model's template does not take it.
    """
    turns = [{"role": message.role, "content": _content(message)} for message in messages]
    for turn, message in zip(turns, messages, strict=True):
        if message.name is not None:
            turn["name"] = message.name
    if served.template != CHAT:
        if len(turns) != 1 or turns[0]["role"] != "user":
            raise ApiError(
                400,
                f"messages has {len(turns)} messages, but this model was trained on single prompts; send one "
                "message of role user, or use /v1/completions",
                param="messages",
            )
        return _tokens(served, served.template, turns[0]["content"], "messages")
    if not served.tokenizer.chat_template:
        raise ApiError(
            400,
            "this model has no chat template; write the prompt yourself and use /v1/completions",
            param="messages",
        )
    return _tokens(served, CHAT, turns, "messages")


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)


def _tokens(served: Served, template: str, prompt: object, where: str) -> list[int]:
    try:
        return list(render(served.tokenizer, template, prompt, where)[1])
    except DataError as error:
        raise ApiError(400, str(error), param=where.split()[0]) from None
