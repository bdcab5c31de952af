"""The environment `guess`: find a number by guesses that are answered with higher or lower. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.types import Action, Reply, Task

DIGITS = "0123456789abcdef"


class Guess:
    """Guess my number: a hexadecimal digit from 1 to `highest`, with so many guesses.

    The reply to a guess is `>` if the number is higher and `<` if it is lower. The state is the interval that
    remains, so that advantages can compare equal positions.
    """

    pure = True

    def __init__(self, highest: int = 15, guesses: int = 4) -> None:
        if not 1 <= highest <= 15 or guesses < 1:
            raise ValueError(f"highest is {highest} and guesses {guesses}; take 1 to 15, and 1 or more")
        self._highest, self._guesses = highest, guesses

    @staticmethod
    def rows(count: int, seed: int, *, highest: int = 15, guesses: int = 4) -> Iterator[dict[str, Any]]:
        """Yield problems, each number equally often; the prompt names the replies, the answer the number."""
        for index in range(count):
            number = 1 + (index + seed) % highest
            yield {"prompt": "< > ?", "answer": DIGITS[number], "problem": index}

    def begin(self, task: Task) -> Reply:
        """Choose the number."""
        self._number = DIGITS.index(task.answer)
        self._low, self._high, self._left = 1, self._highest, self._guesses
        return Reply(state=self._state())

    def step(self, action: Action) -> Reply:
        """Reply to a guess; anything but one digit is a guess that tells nothing."""
        self._left -= 1
        text = action.text.strip()
        guess = DIGITS.find(text) if len(text) == 1 else -1
        if guess == self._number:
            return Reply(done=True, score=1.0)
        if self._left == 0:
            return Reply(done=True)
        if guess < 1:
            return Reply("?", state=self._state())
        if guess < self._number:
            self._low = max(self._low, guess + 1)
            return Reply(">", state=self._state())
        self._high = min(self._high, guess - 1)
        return Reply("<", state=self._state())

    def _state(self) -> str:
        return f"{self._low}-{self._high} {self._left}"
