"""Incremental detokenization: never a partial character, never a part of a possible stop string."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

# Output of a decoder for bytes that are no character, or an incomplete one.
HALF = "\N{REPLACEMENT CHARACTER}"
# Tokens without an end of a character, after which a part of them is settled, and after which all are.
MANY_OPEN = 16
MOST_OPEN = 256
# A character has at most four bytes, so one of so many ends of tokens is likely the end of a character.
TRIED_ENDS = 8


class Detokenizer:
    """The text of one growing completion; returned text never changes.

    Only the tokens since the last whole character are decoded again, at most `MOST_OPEN` if the bytes never
    form a character. So the work is linear in the text. `decode` leaves `special` tokens out; the texts in
    `stop` end the completion, and are not part of it.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        special: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._special = special
        self._tokens: list[int] = []
        # Tokens before `_end` are text already; those from `_begin` on give the decoder its left context.
        self._begin = 0
        self._end = 0
        self._held = ""
        self._sent = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that can no longer change."""
        for token in token_ids:
            if token in self._special:
                continue  # thousands of end tokens (`ignore_eos`) must not pile up
            self._tokens.append(token)
            known = self._decode(self._tokens[self._begin : self._end])
            text = self._decode(self._tokens[self._begin :])
            num_open = len(self._tokens) - self._end
            is_whole = len(text) > len(known) and not text.endswith(HALF)
            if is_whole or num_open >= MOST_OPEN:
                self._settle(text, known, len(self._tokens))
            elif num_open >= MANY_OPEN and num_open % TRIED_ENDS == 0:
                self._settle_part(text, known)
        return self._give(self._certain())

    def _settle(self, text: str, known: str, end: int) -> None:
        self._held += text[len(known) :]
        self._begin, self._end = self._end, end

    def _settle_part(self, text: str, known: str) -> None:
        """Settle the tokens up to an end that later ones cannot change: bytes that are no character."""
        for end in range(len(self._tokens) - 4, len(self._tokens) - 4 - TRIED_ENDS, -1):
            part = self._decode(self._tokens[self._begin : end])
            if len(part) > len(known) and text.startswith(part):
                self._settle(part, known, end)
                return

    def finish(self, text: str) -> str:
        """Return the rest of `text`, that of the whole completion, cut at the stop string.

        With some decoders, later tokens change the text of earlier ones; text returned before stays as it is.
        """
        return text[self._sent :]

    def _give(self, length: int) -> str:
        given, self._held = self._held[:length], self._held[length:]
        self._sent += length
        return given

    def _certain(self) -> int:
        """Length of the held text that cannot be part of a stop string."""
        starts = [_uncertain(self._held, stop) for stop in self._stop]
        return min(starts, default=len(self._held))


def _uncertain(text: str, stop: str) -> int:
    """Start of `stop` in the text, or of the longest suffix of the text that is a prefix of `stop`."""
    if (found := text.find(stop)) >= 0:
        return found
    longest = min(len(text), len(stop) - 1)
    return next(len(text) - n for n in range(longest, -1, -1) if text.endswith(stop[:n]))
