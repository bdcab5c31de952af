"""Prompts of several sources in exact proportions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

from millrace.data.curriculum import Curriculum
from millrace.data.prompts import PromptStream, source_seed
from millrace.data.rows import DataError
from millrace.types import Prompt


class PromptFeed(Protocol):
    """An endless stream of prompts, of one source or several."""

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts."""

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Take what a group of a prompt earned."""

    def state(self) -> dict[str, Any]:
        """Return what `load_state` continues from."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; DataError if it is of other data."""


class MixtureStream:
    """An endless stream of prompts of several sources, each in its own order and at its own pace.

    Of the first n prompts, the number from each source differs from n times its fraction by less than 1,
    for every n; where the fractions have a common denominator d, any d prompts in a row have exactly its
    part from each source. The choice of sources is the same for every seed. The state is the number of
    prompts from each source and the place in each.

    Source: Tijdeman 1980, "The chairman assignment problem".
    """

    def __init__(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        fractions: Mapping[str, Fraction],
        *,
        seed: int,
        shuffle: bool,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Create the stream at its begin.

        Args:
            prompts: of each source, by name.
            fractions: of all prompts, by name; they are above 0 and add up to 1.
            seed: of the orders; a source's depends on it and the name alone.
            shuffle: whether each epoch of a source has a new order.
            curriculum: of all sources.
        """
        self._fractions = dict(fractions)
        self._streams = {
            name: PromptStream(
                prompts[name], seed=source_seed(seed, name), shuffle=shuffle, curriculum=curriculum
            )
            for name in fractions
        }
        self._curriculum = curriculum
        self._counts = dict.fromkeys(fractions, 0)

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; DataError if the curriculum's function fails."""
        found = []
        for _ in range(num_prompts):
            name = self._next_source()
            self._counts[name] += 1
            found += self._streams[name].next(1)
        return found

    def _next_source(self) -> str:
        """Of the sources that may have the next prompt, the one that must have one the soonest."""
        place = 1 + sum(self._counts.values())
        slack = Fraction(1, max(1, 2 * len(self._fractions) - 2))
        owed = {name: part * place - self._counts[name] for name, part in self._fractions.items()}
        allowed = [name for name, missing in owed.items() if missing >= slack]
        return min(allowed, key=lambda name: (1 - slack - owed[name]) / self._fractions[name])

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """What a group of a prompt earned, for the curriculum if there is one."""
        self._streams[prompt.source].learn(prompt, rewards)

    def state(self) -> dict[str, Any]:
        """Number of prompts from each source, the place in each, and the curriculum's `known`."""
        found: dict[str, Any] = {
            "counts": dict(self._counts),
            "sources": {name: stream.place() for name, stream in self._streams.items()},
        }
        return found if self._curriculum is None else {**found, "known": self._curriculum.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; DataError for other sources or another size of one."""
        counts, places = state.get("counts"), state.get("sources")
        if not isinstance(counts, Mapping) or not isinstance(places, Mapping):
            raise DataError(
                "the checkpoint was made without data.sources; resume with the same data settings"
            )
        if counts.keys() != self._counts.keys() or places.keys() != self._counts.keys():
            raise DataError(
                f"the checkpoint was made with the sources {', '.join(counts)} and the recipe now has "
                f"{', '.join(self._counts)}; resume with the same sources"
            )
        self._counts = {name: int(counts[name]) for name in self._counts}
        for name, stream in self._streams.items():
            try:
                stream.load_state(places[name])
            except DataError as error:
                raise DataError(f"source {name}: {error}") from None
        if self._curriculum is not None:
            self._curriculum.load_state(state.get("known", {}))
