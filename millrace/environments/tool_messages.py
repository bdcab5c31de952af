"""Messages of tools as the policy can read them: short, and in characters of its tokenizer. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


class ToolMessages:
    """Cuts replies of tools in their middle, and leaves out characters that the tokenizer cannot spell."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        """Take the tokenizer and the most tokens of a reply."""
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with the content of those of tools cut; the note on it is part of the content.

        `num_characters` of a message is the length of its content before it was shortened, if it was.
        """
        return [self._fitted(one) if one["role"] == "tool" else one for one in messages]

    def _fitted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        text = self._spelled(message["content"] or "")
        total = message.get("num_characters", len(text))
        fitted = {key: value for key, value in message.items() if key != "num_characters"}
        if total == len(text) and len(self._encode(text)) <= self._max_tokens:
            return fitted | {"content": text}
        middle = len(text) // 2
        head, tail = self._encode(text[:middle]), self._encode(text[middle:])
        kept = self._max_tokens
        while True:
            first, last = self._decode(head[: (kept + 1) // 2]), self._decode(tail[len(tail) - kept // 2 :])
            left_out = total - len(first) - len(last)
            cut = first + self._spelled(f"\n[{left_out} characters left out]\n") + last
            excess = len(self._encode(cut)) - self._max_tokens
            if excess <= 0 or kept == 0:
                return fitted | {"content": cut}
            kept = max(0, min(kept, len(head) + len(tail)) - excess)

    def _spelled(self, text: str) -> str:
        """Leave out the characters for which the tokenizer has no token."""
        unknown = self._tokenizer.unk_token_id
        if unknown is None or unknown not in self._encode(text):
            return text
        there = {letter for letter in set(text) if unknown not in self._encode(letter)}
        return "".join(letter for letter in text if letter in there)

    def _encode(self, text: str) -> list[int]:
        found = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return list(found["input_ids"])

    def _decode(self, token_ids: Sequence[int]) -> str:
        # A character of several tokens may be cut at either end.
        text = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return str(text).strip("\ufffd")
