"""The simplest environment: one prompt, one answer."""

from __future__ import annotations

from millrace.types import Completion, Prompt


class SingleTurn:
    """Says the prompt and is over after one completion."""

    def __init__(self, prompt: Prompt) -> None:
        """An episode of one prompt."""
        self._prompt = prompt

    def observe(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return self._prompt.token_ids

    def step(self, completion: Completion) -> tuple[int, ...] | None:
        """None: the episode is over."""
        return None
