"""Draws whose caller waits for them, beside those that end in events."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.inference.engine import RequestFailed
from millrace.orchestration.runtime.base import Draw
from millrace.orchestration.runtime.script import PREFIX
from millrace.types import Completion, SamplingParams


class Direct:
    """What was asked for, by id, and what came of it."""

    def __init__(self) -> None:
        """Nothing is asked for."""
        self._found: dict[str, Completion | ValueError | None] = {}
        self._num_asked = 0

    def ask(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Draw]:
        """Draws for these prompts, to be submitted and in the end collected."""
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts were given with {len(params)} sampling parameters")
        first, self._num_asked = self._num_asked, self._num_asked + len(prompts)
        draws = [
            Draw(f"{PREFIX}{first + place}", tuple(prompt), wanted)
            for place, (prompt, wanted) in enumerate(zip(prompts, params, strict=True))
        ]
        self._found.update({draw.id: None for draw in draws})
        return draws

    def answer(self, id: str, found: Completion | ValueError) -> bool:
        """Take in what came of a draw; False if it was not asked for here."""
        asked = id in self._found
        if asked:
            self._found[id] = found
        return asked

    @property
    def open(self) -> list[str]:
        """Ids of all that is asked for and not there."""
        return [id for id, found in self._found.items() if found is None]

    def missing(self, draws: Sequence[Draw]) -> list[Draw]:
        """Those of which nothing came yet."""
        return [draw for draw in draws if self._found[draw.id] is None]

    def forget(self, draws: Sequence[Draw]) -> list[Completion | ValueError | None]:
        """What came of draws, which nobody waits for any more."""
        return [self._found.pop(draw.id) for draw in draws]


def completions(found: Sequence[Completion | ValueError | None]) -> list[Completion]:
    """What was drawn, as `Engine.generate` gives it.

    Raises:
        ValueError: a draw could not be served.
        RequestFailed: the model gave logits that are not finite.
    """
    drawn = []
    for place, one in enumerate(found):
        if isinstance(one, ValueError):
            raise ValueError(f"prompt {place} of {len(found)}: {one}") from None
        assert one is not None
        if one.finish_reason == "error":
            raise RequestFailed(f"prompt {place} of {len(found)} failed: {one.reason}")
        drawn.append(one)
    return drawn
