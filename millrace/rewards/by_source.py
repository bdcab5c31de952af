"""Rewards that differ by the source of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from millrace.protocols import EpisodeReward
from millrace.types import Episode, Outcome, Prompt


class SourceReward:
    """Scores each completion by the reward of its prompt's source, one source after another.

    `own` is by the name of a source; `other` scores all other prompts.
    """

    def __init__(self, own: Mapping[str, EpisodeReward], other: EpisodeReward) -> None:
        self._own, self._other = dict(own), other

    @property
    def sees_episodes(self) -> bool:
        """Whether the reward of a source needs the episodes."""
        return any(reward.sees_episodes for reward in (*self._own.values(), self._other))

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        """Return one outcome for each completion, in order."""
        places: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            places.setdefault(prompt.source if prompt.source in self._own else "", []).append(place)
        found: dict[int, Outcome] = {}
        for source, here in places.items():
            reward = self._own.get(source, self._other)
            outcomes = reward.score(
                [prompts[place] for place in here],
                [completions[place] for place in here],
                [episodes[place] for place in here] if episodes and reward.sees_episodes else (),
            )
            found |= zip(here, outcomes, strict=True)
        return [found[place] for place in range(len(prompts))]

    def close(self) -> None:
        """Close the reward of every source, even if one of them raises."""
        with ExitStack() as stack:
            for reward in (*self._own.values(), self._other):
                stack.callback(reward.close)
