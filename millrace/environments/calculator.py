"""The environment `calculator`: products that the policy may compute with a tool. No torch."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from millrace.types import Action, Reply, Task

_CALL = re.compile(r"calc\((\d{1,9})\*(\d{1,9})\)")
_NUMBER = re.compile(r"\d{1,18}")


class Calculator:
    """Answer a product of two numbers, directly or after `calc(a*b)`, whose reply is `=` and the product.

    The state is `tool` after a call.
    """

    pure = True

    def __init__(self, digits: int = 2) -> None:
        if not 1 <= digits <= 9:
            raise ValueError(f"digits is {digits}; take 1 to 9")

    @staticmethod
    def rows(count: int, seed: int, *, digits: int = 2) -> Iterator[dict[str, Any]]:
        """Yield problems; the demonstrations of one in five call the tool, the others answer at once."""
        numbers, low, high = random.Random(seed), 10 ** (digits - 1), 10**digits - 1
        for _ in range(count):
            a, b = numbers.randint(low, high), numbers.randint(low, high)
            prompt, answer, call = f"{a}*{b}=", str(a * b), f"calc({a}*{b})"
            turns = [answer] if numbers.random() >= 0.2 else [call, f"={answer};", answer]
            yield {"prompt": prompt, "answer": answer, "demonstration": turns}

    def begin(self, task: Task) -> Reply:
        """Give the row's prompt."""
        self._answer = task.answer
        return Reply()

    def step(self, action: Action) -> Reply:
        """Run the tool or score an answer."""
        text = action.text.strip()
        if call := _CALL.fullmatch(text):
            return Reply(f"={int(call[1]) * int(call[2])};", state="tool", calls=1)
        right = _NUMBER.fullmatch(text) is not None and text == self._answer
        return Reply(done=True, score=float(right), calls=0)
