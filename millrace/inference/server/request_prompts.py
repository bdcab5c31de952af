"""Convert request bodies to prompt tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

from millrace.data.chat import CHAT
from millrace.inference.server.http_errors import ApiError, shown
from millrace.inference.server.schemas import Message
from millrace.inference.server.service import GenerationService, ModelService


def check_model(served: ModelService, name: str | None) -> None:
    """Raise ApiError if the name is not that of the served model."""
    if name is not None and name != served.name:
        raise ApiError(
            404,
            f"there is no model {shown(name)}; this server has {served.name}",
            param="model",
            code="model_not_found",
        )


async def texts(
    service: GenerationService, prompt: str | list[str] | list[int] | list[list[int]], num_samples: int = 1
) -> list[list[int]]:
    """Tokenize the prompts of a completion request: one or several, as text or as tokens.

    Raises:
        ApiError: there is no prompt, there are too many, or one is empty or cannot be tokenized.
    """
    if not prompt and not isinstance(prompt, str):
        raise ApiError(400, "prompt is empty; a completion needs something to follow", param="prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    elif isinstance(prompt[0], int):
        return [prompt]
    service.check_count(len(prompt) * num_samples)
    if isinstance(prompt[0], str):
        found: list[list[int]] = json.loads(await service.texts.ask("prompts", prompt))
        return found
    return prompt


async def conversation(service: GenerationService, messages: Sequence[Message]) -> list[int]:
    """Render and tokenize a conversation and the next header; ApiError if the chat template fails."""
    turns = checked_turns(service.served, messages)
    token_ids: list[int] = json.loads(await service.texts.ask("messages", turns))
    return token_ids


def checked_turns(served: ModelService, messages: Sequence[Message]) -> list[dict[str, str]]:
    """Convert messages to the input of chat templates; ApiError if the model has none for them."""
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
    elif not served.tokenizer.chat_template:
        raise ApiError(
            400,
            "this model has no chat template; write the prompt yourself and use /v1/completions",
            param="messages",
        )
    return turns


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)
