"""Each completion is scored by the reward of its prompt's source."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millrace.rewards.by_source import SourceReward
from millrace.types import Episode, Outcome, Prompt


class Named:
    def __init__(self, name: str, *, sees_episodes: bool = False) -> None:
        self.name, self.sees_episodes = name, sees_episodes
        self.calls: list[tuple[list[str], int]] = []
        self.closed = False

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[Episode] = ()
    ) -> list[Outcome]:
        self.calls.append(([prompt.id for prompt in prompts], len(episodes)))
        return [Outcome("score", float(text), self.name) for text in completions]

    def close(self) -> None:
        self.closed = True
        if self.name == "a":
            raise RuntimeError("cannot close")


def prompts(*sources: str) -> list[Prompt]:
    return [Prompt(f"train:{place}", (1,), "", source=source) for place, source in enumerate(sources)]


def test_outcomes_are_in_order_and_each_source_is_one_call() -> None:
    a, other = Named("a"), Named("other", sees_episodes=True)
    reward = SourceReward({"a": a}, other)
    assert reward.sees_episodes
    found = reward.score(prompts("a", "b", "", "a"), ["0", "1", "2", "3"], [Episode(())] * 4)
    assert [(one.value, one.reason) for one in found] == [(0, "a"), (1, "other"), (2, "other"), (3, "a")]
    assert a.calls == [(["train:0", "train:3"], 0)]
    assert other.calls == [(["train:1", "train:2"], 2)]
    assert reward.score([], []) == []


def test_every_reward_is_closed_even_if_one_fails() -> None:
    a, b, other = Named("a"), Named("b"), Named("other")
    with pytest.raises(RuntimeError, match="cannot close"):
        SourceReward({"a": a, "b": b}, other).close()
    assert a.closed and b.closed and other.closed
