"""OpenAI's text completions as data: a prompt that is a text or tokens, and a turn as its continuation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from millrace.environments.agent_protocol import AgentError, Json, encoded, read_fields
from millrace.types import Action

# The first are read, the second have no effect because they are the run's, the others change no response.
_KNOWN = (
    *("prompt", "model", "stream", "stream_options", "logprobs", "return_token_ids"),
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("user", "metadata", "store"),
)
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "n": (1,),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for the continuation of a text.

    Attributes:
        prompt: all that the policy is to read, as text or as tokens.
        stream: whether the response is a stream of chunks.
        include_usage: whether the stream ends with the usage.
        logprobs: whether the response has the log-probabilities of its tokens.
        return_token_ids: whether it has the tokens themselves, and those of a prompt of tokens.
    """

    prompt: str | tuple[int, ...]
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


def read_completion(body: bytes, model: str) -> TextRequest:
    """Read the body of `/v1/completions`.

    Raises:
        AgentError: 404 for another model than `model`, 400 for what is malformed or not supported.
    """
    given = read_fields(body, _KNOWN, _UNSUPPORTED, model)
    options, logprobs = given.get("stream_options", {}), given.get("logprobs")
    if not isinstance(options, dict):
        raise AgentError(400, "stream_options is an object", param="stream_options")
    if "stream_options" in given and not given["stream"]:
        raise AgentError(400, "stream_options has no effect without stream: true", param="stream_options")
    if logprobs is not None and (isinstance(logprobs, bool) or logprobs != 0):
        raise AgentError(
            400,
            f"logprobs is {str(logprobs)[:20]}; only those of the sampled tokens are known, so ask for "
            "logprobs: 0",
            param="logprobs",
        )
    token_ids = given.get("return_token_ids", False)
    if not isinstance(token_ids, bool):
        raise AgentError(400, "return_token_ids is true or false", param="return_token_ids")
    usage = options.get("include_usage") is True
    return TextRequest(_prompt(given.get("prompt")), given["stream"], usage, logprobs is not None, token_ids)


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    """Read a text, a list of tokens, or a list of one of them."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise AgentError(
                400, f"prompt has {len(prompt)} prompts; send one request for each", param="prompt"
            )
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(one) is int and one >= 0 for one in prompt):
        return tuple(prompt)
    raise AgentError(400, "prompt is missing, empty, or neither a text nor a list of tokens", param="prompt")


def check_vocabulary(request: TextRequest, num_tokens: int) -> None:
    """Raise AgentError if a token of the prompt is not one of so many."""
    most = -1 if isinstance(request.prompt, str) else max(request.prompt)
    if most >= num_tokens:
        raise AgentError(400, f"prompt has the token {most}; the vocabulary has {num_tokens}", param="prompt")


def write_completion(
    message: Json, action: Action, request: TextRequest, *, id: str, created_s: int, model: str
) -> dict[str, Any]:
    """Return the response object of a turn, whose text is the action's."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": action.text,
        "logprobs": _logprobs(action) if request.logprobs else None,
        "finish_reason": "length" if action.finish_reason == "length" else "stop",
    }
    if request.return_token_ids:
        choice["token_ids"] = list(action.token_ids)
        choice["prompt_token_ids"] = None if isinstance(request.prompt, str) else list(request.prompt)
    num_prompt, num_completion = action.num_context_tokens, len(action.token_ids)
    return {
        "id": id,
        "object": "text_completion",
        "created": created_s,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        },
    }


def _logprobs(action: Action) -> dict[str, Any]:
    """The sampled tokens as texts, where each begins, and their log-probabilities."""
    texts = list(action.token_texts)
    offsets = [0, *accumulate(map(len, texts))][: len(texts)]
    return {
        "tokens": texts,
        "token_logprobs": list(action.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def completion_stream(whole: Json, request: TextRequest) -> bytes:
    """Return a response as server-sent events: the text, the end."""
    (choice,) = whole["choices"]
    end = {"index": 0, "text": "", "logprobs": None, "finish_reason": choice["finish_reason"]}
    chunks: list[dict[str, Any]] = [{"choices": [choice | {"finish_reason": None}]}, {"choices": [end]}]
    if request.include_usage:
        chunks = [*({**chunk, "usage": None} for chunk in chunks), {"choices": [], "usage": whole["usage"]}]
    head = {name: whole[name] for name in ("id", "object", "created", "model")}
    events = [b"data: " + encoded(head | chunk) + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])
