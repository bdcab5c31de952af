"""A reward whose outcomes are recorded, because they are not a function of the answers: a judge's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from millrace.protocols import EpisodeReward
from millrace.rollout.recorder import outcome_record, recorded_outcome
from millrace.types import Episode, Outcome, Prompt


class RecordedScores:
    """A reward of all ranks that keeps its outcomes, and in a replay returns recorded ones instead.

    On several ranks rank 0 has the recorded outcomes and broadcasts them; all ranks make the same calls.
    """

    def __init__(self, reward: EpisodeReward, broadcast: Callable[[str], str] | None = None) -> None:
        """Wrap a reward; `broadcast` returns rank 0's text on every rank, None with one rank."""
        self._reward, self._broadcast = reward, broadcast
        self._given: Sequence[Outcome] | None = None
        self._last: list[Outcome] = []

    @property
    def sees_episodes(self) -> bool:
        """Whether the reward needs the episodes."""
        return self._reward.sees_episodes

    @property
    def last(self) -> list[Outcome]:
        """The outcomes of the last call."""
        return self._last

    def give(self, outcomes: Sequence[Outcome] | None) -> None:
        """Take the recorded outcomes of the next call, on rank 0; None if it is to score."""
        self._given = outcomes

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        """Score each completion, in order, or return what is recorded.

        Raises:
            ValueError: the recorded outcomes are of another number of completions.
        """
        given, self._given = self._given, None
        if self._broadcast is not None:
            mine = None if given is None else [outcome_record(one) for one in given]
            found = json.loads(self._broadcast(json.dumps(mine)))
            given = None if found is None else [recorded_outcome(one) for one in found]
        if given is None:
            given = self._reward.score(prompts, completions, episodes)
        elif len(given) != len(completions):
            raise ValueError(
                f"the run recorded {len(given)} scores here, and the replay has {len(completions)} answers"
            )
        self._last = list(given)
        return self._last

    def close(self) -> None:
        """Close the reward."""
        self._reward.close()
