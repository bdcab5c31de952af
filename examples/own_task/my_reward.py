"""A reward of one's own. It runs in a process that can be killed, so it may hang or crash without harm."""

from __future__ import annotations


def letters_in_place(prompt: str, completion: str, answer: str, row: dict) -> float | None:
    """Share of the letters that stand where they should; None says that there is no answer to judge."""
    if not completion:
        return None
    right = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    return right / max(len(answer), len(completion))
