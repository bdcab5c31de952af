"""A single-turn environment: one prompt, one completion."""

from __future__ import annotations

from millrace.types import Completion, Prompt


class SingleTurn:
    """Gives the prompt and is done after one completion."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def observe(self) -> tuple[int, ...]:
        """Return the prompt's tokens."""
        return self._prompt.token_ids

    def step(self, completion: Completion) -> tuple[int, ...] | None:
        """Return None: the episode is done."""
        return None
