"""OpenAI's two JSON shapes of a response: text completion and chat completion."""

from __future__ import annotations

from typing import Any

from millrace.inference.server.detokenize import HALF


class TextShape:
    """Of `/v1/completions`, for one request."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def __init__(self, *, wants_logprobs: bool) -> None:
        self.wants_logprobs = wants_logprobs
        self._num_letters: dict[int, int] = {}

    def choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        """A whole sample."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> None:
        """Return the chunk before a sample's first token: none."""

    def piece(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """More of a sample."""
        return self.choice(index, text, None, logprobs)

    def closing(self, index: int, text: str, reason: str) -> list[dict[str, Any]]:
        """The end of a sample, with the last of its text."""
        return [self.choice(index, text, reason, None)]

    def logprobs(self, index: int, tokens: list[str], values: list[float]) -> dict[str, Any]:
        """The next tokens of a sample as texts, and their log-probabilities."""
        offsets = []
        for token in tokens:
            offsets.append(self._num_letters.get(index, 0))
            self._num_letters[index] = offsets[-1] + len(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


class ChatShape:
    """Of `/v1/chat/completions`, for one request."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, *, wants_logprobs: bool) -> None:
        self.wants_logprobs = wants_logprobs

    def choice(self, index: int, text: str, reason: str, logprobs: Any) -> dict[str, Any]:
        """A whole sample."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any]:
        """Return the chunk before a sample's first token: the role."""
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """More of a sample."""
        return self._delta(index, {"content": text}, None, logprobs)

    def closing(self, index: int, text: str, reason: str) -> list[dict[str, Any]]:
        """The last of a sample's text, and its end."""
        last = [self.piece(index, text, None)] if text else []
        return [*last, self._delta(index, {}, reason, None)]

    def logprobs(self, index: int, tokens: list[str], values: list[float]) -> dict[str, Any]:
        """The next tokens of a sample as texts, and their log-probabilities."""
        pairs = zip(tokens, values, strict=True)
        entries = [{"token": t, "logprob": v, "bytes": _bytes(t), "top_logprobs": []} for t, v in pairs]
        return {"content": entries, "refusal": None}

    @staticmethod
    def _delta(index: int, delta: dict[str, str], reason: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


Shape = TextShape | ChatShape


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token; None for a part of a character, because its text does not determine them."""
    return None if HALF in text else list(text.encode())


def envelope(
    id: str, kind: str, model: str, created_s: int, choices: list[dict[str, Any]], usage: Any
) -> dict[str, Any]:
    """Build the response object around the choices."""
    return {
        "id": id,
        "object": kind,
        "created": created_s,
        "model": model,
        "choices": choices,
        "usage": usage,
    }


def usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """Tokens of a whole request; a prompt with several samples counts once."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
